// Causal attention of a step's query tokens over the blocks of their rows, where they lie: prefill and decode
// are the same work, tiles of (tokens x query heads of a KV head) against chunks of keys.
#pragma once

#include <array>
#include <utility>

#include "attention_plan.h"
#include "blocks.h"
#include "scratch.h"
#include "softmax.h"
#include "threads.h"

namespace headroom {

#if defined(__AVX512F__)
constexpr int kQueryRows = 14;  // query rows of the largest tile
constexpr int kSums = 28;       // 16-lane sums that stay in registers
#else
constexpr int kQueryRows = 4;
constexpr int kSums = 4;
#endif
constexpr int kPanels = int(kChunk / kLanes);

// Panels side by side for M query rows.
constexpr int panels_beside(int m) { return kSums / m > 4 ? 4 : kSums / m; }

// What `attend` was called for: one layer.
template <class T>
struct Task {
  const T* q;
  int64_t q_stride;  // elements from token to token
  const T* k_arena;  // [N] blocks, see blocks.h
  const T* v_arena;
  int64_t window;  // 0: none
  T* out;          // [T, Hq, D]
};

// Keys [first, first + kChunk) of a row, as far as it goes.
struct Chunk {
  int64_t first;
  const uint32_t* k[kPanels];
  const uint32_t* v[kPanels];
  int panels;
};

// One unit, by one thread.
template <class T>
class Attention {
 public:
  // next: the unit that this thread probably takes after it, or null.
  Attention(const Rows& rows, const Plan& plan, const Unit& unit, const Unit* next, const Task<T>& task)
      : rows_(rows), plan_(plan), unit_(unit), next_(next), task_(task), head_dim_(rows.head_dim),
        group_(rows.q_heads / rows.kv_heads(unit.sequence)), count_(unit.tokens * group_),
        scale_(kLog2E / std::sqrt(float(rows.head_dim))) {
    const int64_t padded = Sums::rounded(count_);
    Scratch& scratch = Scratch::of_thread();
    scratch.start(2 * Sums::floats(count_, head_dim_) * sizeof(float) + padded * head_dim_ * sizeof(T) +
                  padded * sizeof(int32_t) + kQueryRows * kChunk * (sizeof(float) + sizeof(T)));
    sums_ = Sums::at(scratch.take<float>(Sums::floats(count_, head_dim_)), count_, head_dim_);
    part_ = Sums::at(scratch.take<float>(Sums::floats(count_, head_dim_)), count_, head_dim_);
    scores_ = scratch.take<float>(kQueryRows * kChunk);
    weights_ = scratch.take<T>(kQueryRows * kChunk);
    queries_ = scratch.take<T>(padded * head_dim_);
    position_ = scratch.take<int32_t>(padded);
  }

  void run() {
    gather_queries();
    find(unit_, unit_.begin, chunks_[0]);
    const int64_t first = unit_.first_segment(), last = first + unit_.segments();
    if (unit_.split < 0) {
      add_up(first, sums_);
      for (int64_t segment = first + 1; segment < last; ++segment) {
        add_up(segment, part_);
        merge(part_);
      }
      return finish();
    }
    const Split& split = plan_.split(unit_);
    for (int64_t segment = first; segment < last; ++segment) add_up(segment, plan_.sums(split, segment));
    if (!plan_.finish(unit_)) return;
    sums_ = plan_.sums(split, split.first);
    for (int64_t i = 1; i < split.segments; ++i) merge(plan_.sums(split, split.first + i));
    finish();
  }

 private:
  using Step = void (Attention::*)(const Chunk&, const Chunk&, int64_t, const Sums&);

  // Row m of the unit is query head m % G of token m / G.
  void gather_queries() {
    const int64_t width = group_ * head_dim_;
    for (int64_t t = 0; t < unit_.tokens; ++t) {
      const T* from = task_.q + (unit_.token + t) * task_.q_stride + unit_.head * width;
      std::memcpy(queries_ + t * width, from, width * sizeof(T));
      std::fill_n(position_ + t * group_, group_, int32_t(rows_.position(unit_.sequence, unit_.token + t)));
    }
  }

  // The sums over the unit's keys in one segment.
  void add_up(int64_t segment, const Sums& sums) {
    std::fill_n(sums.out, Sums::rounded(count_) * (head_dim_ + kLanes), 0.0f);
    std::fill_n(sums.best, Sums::rounded(count_), kHidden);
    const int64_t end = std::min((segment + 1) * kSegment, unit_.end);
    for (int64_t first = std::max(segment * kSegment, unit_.begin); first < end; first += kChunk) {
      const Chunk& now = chunks_[turn_];
      Chunk& then = chunks_[turn_ ^= 1];
      if (first + kChunk < unit_.end) {
        find(unit_, first + kChunk, then);
      } else if (next_ != nullptr) {
        find(*next_, next_->begin, then);
      } else {
        then = now;
      }
      add_chunk(now, then, sums);
    }
  }

  void find(const Unit& unit, int64_t first, Chunk& chunk) const {
    const int32_t* table = rows_.table(unit.row);
    const int64_t elements = rows_.block_size * head_dim_;
    chunk.first = first;
    chunk.panels = int(std::min<int64_t>(kPanels, (unit.end - first + kLanes - 1) / kLanes));
    for (int p = 0; p < kPanels; ++p) {
      const int64_t key = first + std::min(p, chunk.panels - 1) * kLanes;
      const int64_t block = table[key / rows_.block_size], offset = key % rows_.block_size;
      chunk.k[p] = key_panel(task_.k_arena + block * elements, offset);
      chunk.v[p] = value_panel(task_.v_arena + block * elements, offset, head_dim_);
    }
  }

  // All rows of the unit, a tile at a time; the first brings the next chunk nearer.
  void add_chunk(const Chunk& chunk, const Chunk& next, const Sums& sums) {
    static constexpr std::array<Step, kQueryRows> steps = all_steps(std::make_integer_sequence<int, kQueryRows>());
    for (int64_t row = 0; row < count_; row += kQueryRows) {
      const int64_t rows = std::min<int64_t>(kQueryRows, count_ - row);
      (this->*steps[rows - 1])(chunk, row == 0 ? next : chunk, row, sums);
    }
  }

  template <int... I>
  static constexpr std::array<Step, sizeof...(I)> all_steps(std::integer_sequence<int, I...>) {
    return {&Attention::template add_tile<I + 1>...};
  }

  // M rows from `row` on against the keys of a chunk that any of them sees.
  template <int M>
  void add_tile(const Chunk& chunk, const Chunk& next, int64_t row, const Sums& sums) {
    const int64_t earliest = position_[row] - chunk.first, latest = position_[row + M - 1] - chunk.first;
    const int64_t keys = std::min<int64_t>(chunk.panels * kLanes, latest + 1);
    int from = 0;
    if (task_.window > 0 && earliest >= task_.window) from = int((earliest - task_.window + 1) / kLanes);
    const int to = int((keys + kLanes - 1) / kLanes);
    if (from >= to) return;
    score<M>(chunk, next, queries_ + row * head_dim_, from, to);
    const bool hide = to * kLanes > earliest + 1 || (task_.window > 0 && latest >= task_.window);
    if (hide) hide_unseen<M>(chunk, row, from, to);
    alignas(64) float correction[kLanes];
    weigh<M>(row, from, to, sums, correction);
    combine<M>(chunk, next, row, from, keys, sums, correction);
  }

  // scores_[m][key of the chunk] = q . k
  template <int M>
  void score(const Chunk& chunk, const Chunk& next, const T* queries, int from, int to) {
    constexpr int beside = panels_beside(M);
    int p = from;
    for (; p + beside <= to; p += beside) score_panels<M, beside>(chunk, next, queries, p);
    for (; p < to; ++p) score_panels<M, 1>(chunk, next, queries, p);
  }

  template <int M, int N>
  inline void score_panels(const Chunk& chunk, const Chunk& next, const T* queries, int p) {
    constexpr int width = Pair<T>::width;
    f32x16 acc[M][N] = {};
    const int64_t step = rows_.block_size, row = head_dim_;
    for (int64_t k = 0; k < row / width; ++k) {
      u32x16 column[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        column[n] = load<u32x16>(chunk.k[p + n] + k * step);
        __builtin_prefetch(next.k[p + n] + k * step);
      }
      multiply<M, N>(queries + k * width, row, column, acc);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) store(scores_ + m * kChunk + (p + n) * kLanes, acc[m][n]);
    }
  }

  // Key j is visible to query i iff 0 <= i - j, and < window where there is one.
  template <int M>
  void hide_unseen(const Chunk& chunk, int64_t row, int from, int to) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int32_t window = task_.window > 0 ? int32_t(std::min<int64_t>(task_.window, INT32_MAX)) : INT32_MAX;
    for (int m = 0; m < M; ++m) {
      for (int p = from; p < to; ++p) {
        const i32x16 behind = position_[row + m] - int32_t(chunk.first + p * kLanes) - lane;
        float* at = scores_ + m * kChunk + p * kLanes;
        const f32x16 score = load<f32x16>(at);
        store(at, (behind >= 0) & (behind < window) ? score : fill(kHidden));
      }
    }
  }

  // Scores become weights 2^(score - best), 0 for what is hidden; totals and bests go on.
  template <int M>
  void weigh(int64_t row, int from, int to, const Sums& sums, float* correction) {
    alignas(64) float best[kLanes] = {};
    for (int m = 0; m < M; ++m) {
      f32x16 most = load<f32x16>(scores_ + m * kChunk + from * kLanes);
      for (int p = from + 1; p < to; ++p) {
        most = maximum(most, load<f32x16>(scores_ + m * kChunk + p * kLanes));
      }
      best[m] = largest(most);
    }
    // `best` is by row of the tile, whose sums need not lie at a multiple of 16.
    alignas(64) float before[kLanes];
    std::memset(before, 0, sizeof before);
    std::memcpy(before, sums.best + row, M * sizeof(float));
    const f32x16 old = load<f32x16>(before), now = maximum(load<f32x16>(best) * scale_, old);
    const f32x16 base = finite(now);
    store(correction, exp2_of_negative<float>(old - base));
    store(best, base);
    store(before, now);
    std::memcpy(sums.best + row, before, M * sizeof(float));
    for (int m = 0; m < M; ++m) {
      float* total = sums.total + (row + m) * kLanes;
      f32x16 sum = load<f32x16>(total) * correction[m];
      for (int p = from; p < to; ++p) {
        const f32x16 x = load<f32x16>(scores_ + m * kChunk + p * kLanes) * scale_ - best[m];
        const f32x16 weight = exp2_of_negative<T>(x);
        sum += weight;
        store_floats(weights_ + m * kChunk + p * kLanes, weight);
      }
      store(total, sum);
    }
  }

  // out = out * correction + weights . V
  template <int M>
  void combine(const Chunk& chunk, const Chunk& next, int64_t row, int from, int64_t keys, const Sums& sums,
               const float* correction) {
    constexpr int beside = panels_beside(M);
    int64_t d = 0;
    for (; d + beside * kLanes <= head_dim_; d += beside * kLanes) {
      combine_panels<M, beside>(chunk, next, row, from, keys, sums, correction, d);
    }
    for (; d < head_dim_; d += kLanes) combine_panels<M, 1>(chunk, next, row, from, keys, sums, correction, d);
  }

  template <int M, int N>
  inline void combine_panels(const Chunk& chunk, const Chunk& next, int64_t row, int from, int64_t keys, const Sums& sums,
                             const float* correction, int64_t d) {
    constexpr int width = Pair<T>::width;
    f32x16 acc[M][N];
    float* out = sums.out + row * head_dim_ + d;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        acc[m][n] = load<f32x16>(out + m * head_dim_ + n * kLanes) * correction[m];
      }
    }
    for (int p = from; p * kLanes < keys; ++p) {
      const int64_t own = std::min<int64_t>(kLanes, keys - p * kLanes);
      const T* weights = weights_ + p * kLanes;
      const uint32_t *values = chunk.v[p] + d, *ahead = next.v[p] + d;
      for (int64_t k = 0; k < own / width; ++k) {
        u32x16 column[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          column[n] = load<u32x16>(values + k * head_dim_ + n * kLanes);
          __builtin_prefetch(ahead + k * head_dim_ + n * kLanes);
        }
        multiply<M, N>(weights + k * width, kChunk, column, acc);
      }
      if (width == 2 && own % 2 != 0) {
        last_key<M, N>(weights + own - 1, values + own / 2 * head_dim_, acc);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) store(out + m * head_dim_ + n * kLanes, acc[m][n]);
    }
  }

  // A pair of which only the first is the row's: the second may be NaN, which a weight of 0 does not silence.
  template <int M, int N>
  inline void last_key(const T* weights, const uint32_t* values, f32x16 (&acc)[M][N]) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const u32x16 column = load<u32x16>(values + n * kLanes) & 0xffffu;
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        uint32_t lane = 0;
        std::memcpy(&lane, weights + m * kChunk, sizeof(T));
        acc[m][n] = Pair<T>::dot(acc[m][n], column, fill(lane));
      }
    }
  }

  // acc[m][n] += lane of x's row m * column[n]
  template <int M, int N>
  static inline void multiply(const T* x, int64_t x_row, const u32x16 (&column)[N], f32x16 (&acc)[M][N]) {
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      uint32_t lane;
      std::memcpy(&lane, x + m * x_row, 4);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] = Pair<T>::dot(acc[m][n], column[n], fill(lane));
    }
  }

  // Adds the sums of a later segment to the unit's.
  void merge(const Sums& part) {
    for (int64_t row = 0; row < count_; row += kLanes) {
      const f32x16 own = load<f32x16>(sums_.best + row), other = load<f32x16>(part.best + row);
      const f32x16 best = maximum(own, other);
      alignas(64) float keep[kLanes], take[kLanes];
      store(keep, exp2_of_negative<float>(own - finite(best)));
      store(take, exp2_of_negative<float>(other - finite(best)));
      store(sums_.best + row, best);
      for (int64_t m = 0; m < std::min<int64_t>(kLanes, count_ - row); ++m) {
        add(sums_.total + (row + m) * kLanes, keep[m], part.total + (row + m) * kLanes, take[m], kLanes);
        add(sums_.out + (row + m) * head_dim_, keep[m], part.out + (row + m) * head_dim_, take[m], head_dim_);
      }
    }
  }

  static void add(float* to, float keep, const float* from, float take, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes) {
      store(to + i, load<f32x16>(to + i) * keep + load<f32x16>(from + i) * take);
    }
  }

  void finish() {
    const int64_t width = group_ * head_dim_;
    for (int64_t m = 0; m < count_; ++m) {
      const float share = 1.0f / total(load<f32x16>(sums_.total + m * kLanes));
      const int64_t token = unit_.token + m / group_;
      T* to = task_.out + token * rows_.q_heads * head_dim_ + unit_.head * width + m % group_ * head_dim_;
      for (int64_t d = 0; d < head_dim_; d += kLanes) {
        store_floats(to + d, load<f32x16>(sums_.out + m * head_dim_ + d) * share);
      }
    }
  }

  const Rows& rows_;
  const Plan& plan_;
  const Unit& unit_;
  const Unit* next_;
  const Task<T>& task_;
  const int64_t head_dim_, group_, count_;
  const float scale_;
  Sums sums_, part_;
  float* scores_;
  T* weights_;
  T* queries_;
  int32_t* position_;  // of each query row
  Chunk chunks_[2];
  int turn_ = 0;
};

// q: token t at q + t * q_stride, its query heads contiguous. window: the plan's; 0 for none. out [T, Hq * D].
template <class T>
void attend(const Rows& rows, const Plan& plan, const T* q, int64_t q_stride, const T* k_arena,
            const T* v_arena, int64_t window, T* out) {
  const Task<T> task{q, q_stride, k_arena, v_arena, window, out};
  Threads::shared().run(plan.threads(), int64_t(plan.units().size()), [&](int64_t i) {
    Attention<T>(rows, plan, plan.units()[i], plan.after(i), task).run();
  });
}

// Writes the step's K and V [N, D], N = one for each (token, KV head of its sequence), heads inner.
template <class T>
void write_step(const Rows& rows, const T* k, const T* v, T* k_arena, T* v_arena) {
  std::vector<int64_t> before(rows.sequences + 1, 0);  // vectors of the sequences before
  for (int64_t s = 0; s < rows.sequences; ++s) before[s + 1] = before[s] + rows.tokens(s) * rows.kv_heads(s);
  const int64_t elements = rows.block_size * rows.head_dim;
  Threads::shared().run(rows.threads, rows.sequences, [&](int64_t s) {
    int64_t from = before[s] * rows.head_dim;
    for (int64_t token = rows.query_start[s]; token < rows.query_start[s + 1]; ++token) {
      const int64_t position = rows.position(s, token);
      for (int64_t row = rows.row_start[s]; row < rows.row_start[s + 1]; ++row, from += rows.head_dim) {
        const int64_t at = rows.table(row)[position / rows.block_size] * elements;
        put(k_arena + at, v_arena + at, rows.block_size, rows.head_dim, position % rows.block_size, k + from,
            v + from);
      }
    }
  });
}

}  // namespace headroom
