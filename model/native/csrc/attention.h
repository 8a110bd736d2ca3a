// Causal attention of a step's query tokens over the blocks of their rows, where they lie: prefill and decode
// are the same work, tiles of (tokens x query heads of a KV head) against chunks of keys.
#pragma once

#include "attention_tile.h"
#include "blocks.h"
#include "scratch.h"
#include "threads.h"

namespace headroom {

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

// One unit, by one thread.
template <class T>
class Attention {
 public:
  // next: the unit that this thread probably takes after it, or null.
  Attention(const Rows& rows, const Plan& plan, const Unit& unit, const Unit* next, const Task<T>& task)
      : rows_(rows), plan_(plan), unit_(unit), next_(next), task_(task), head_dim_(rows.head_dim),
        group_(rows.q_heads / rows.kv_heads(unit.sequence)), count_(unit.tokens * group_) {
    const int64_t padded = Sums::rounded(count_);
    Scratch& scratch = Scratch::of_thread();
    scratch.start(2 * Sums::floats(count_, head_dim_) * sizeof(float) + padded * head_dim_ * sizeof(T) +
                  padded * sizeof(int32_t) + kQueryRows * kChunk * (sizeof(float) + sizeof(T)));
    sums_ = Sums::at(scratch.take<float>(Sums::floats(count_, head_dim_)), count_, head_dim_);
    part_ = Sums::at(scratch.take<float>(Sums::floats(count_, head_dim_)), count_, head_dim_);
    queries_ = scratch.take<T>(padded * head_dim_);
    position_ = scratch.take<int32_t>(padded);
    tiles_ = {queries_, position_, scratch.take<float>(kQueryRows * kChunk), scratch.take<T>(kQueryRows * kChunk),
              rows.block_size, head_dim_, task.window, kLog2E / std::sqrt(float(head_dim_))};
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
      tiles_.add(now, then, count_, sums);
    }
  }

  // Where the keys and values of a chunk lie.
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
    for (int64_t i = 0; i < count; i += kWide) {
      store(to + i, load<f32xw>(to + i) * keep + load<f32xw>(from + i) * take);
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
  Sums sums_, part_;  // of the unit, of a later segment
  T* queries_;
  int32_t* position_;
  Tiles<T> tiles_;
  Chunk chunks_[2];  // this one and the one after
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
