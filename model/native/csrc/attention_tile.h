// The kernel of attention: a tile of query rows against a chunk of keys, whose scores become weights and these
// a sum of values. Rows and columns are all it knows; which keys and why is `attention.h`.
#pragma once

#include <array>
#include <utility>

#include "attention_plan.h"
#include "softmax.h"
#include "wide.h"

namespace headroom {

#if defined(__AVX512F__)
constexpr int kQueryRows = 14;  // query rows of the largest tile
constexpr int kSums = 28;       // 16-lane sums that stay in registers
constexpr int kBeside = 4;      // panels of the widest one
#else
constexpr int kQueryRows = 4;
constexpr int kSums = 4;
constexpr int kBeside = 2;
#endif
constexpr int kPanels = int(kChunk / kLanes);

// Panels side by side for M query rows.
constexpr int panels_beside(int m) { return kSums / m > kBeside ? kBeside : kSums / m; }

// Keys [first, first + kChunk) of a row, as far as it goes.
struct Chunk {
  int64_t first;
  const uint32_t* k[kPanels];
  const uint32_t* v[kPanels];
  int panels;
};

// Query rows of one KV head, and room for one tile's scores and weights.
template <class T>
class Tiles {
 public:
  const T* queries;         // [rows, D]
  const int32_t* position;  // [rows], ascending
  float* scores;            // [kQueryRows, kChunk]
  T* weights;               // [kQueryRows, kChunk]
  int64_t block_size, head_dim;
  int64_t window;  // 0: none
  float scale;     // of scores, in units of ln 2

  // All `count` rows, a tile at a time; the first brings the next chunk nearer.
  void add(const Chunk& chunk, const Chunk& next, int64_t count, const Sums& sums) {
    static constexpr std::array<Step, kQueryRows> steps = all_steps(std::make_integer_sequence<int, kQueryRows>());
    for (int64_t row = 0; row < count; row += kQueryRows) {
      const int64_t rows = std::min<int64_t>(kQueryRows, count - row);
      (this->*steps[rows - 1])(chunk, row == 0 ? next : chunk, row, sums);
    }
  }

 private:
  using Step = void (Tiles::*)(const Chunk&, const Chunk&, int64_t, const Sums&);

  template <int... I>
  static constexpr std::array<Step, sizeof...(I)> all_steps(std::integer_sequence<int, I...>) {
    return {&Tiles::template add_tile<I + 1>...};
  }

  // M rows from `row` on against the keys of a chunk that any of them sees.
  template <int M>
  void add_tile(const Chunk& chunk, const Chunk& next, int64_t row, const Sums& sums) {
    const int64_t earliest = position[row] - chunk.first, latest = position[row + M - 1] - chunk.first;
    const int64_t keys = std::min<int64_t>(chunk.panels * kLanes, latest + 1);
    int from = 0;
    if (window > 0 && earliest >= window) from = int((earliest - window + 1) / kLanes);
    const int to = int((keys + kLanes - 1) / kLanes);
    if (from >= to) return;
    score<M>(chunk, next, queries + row * head_dim, from, to);
    const bool hide = to * kLanes > earliest + 1 || (window > 0 && latest >= window);
    if (hide) hide_unseen<M>(chunk, row, from, to);
    alignas(64) float correction[kLanes];
    weigh<M>(row, from, to, sums, correction);
    combine<M>(chunk, next, row, from, keys, sums, correction);
  }

  // scores[m][key of the chunk] = q . k
  template <int M>
  void score(const Chunk& chunk, const Chunk& next, const T* q, int from, int to) {
    constexpr int beside = panels_beside(M);
    int p = from;
    for (; p + beside <= to; p += beside) score_panels<M, beside>(chunk, next, q, p);
    for (; p < to; ++p) score_panels<M, 1>(chunk, next, q, p);
  }

  template <int M, int N>
  inline void score_panels(const Chunk& chunk, const Chunk& next, const T* q, int p) {
    constexpr int width = Pair<T>::width;
    f32xw acc[M][N * kParts] = {};
    const int64_t step = block_size, row = head_dim;
    for (int64_t k = 0; k < row / width; ++k) {
      u32xw column[N * kParts];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        take_panel(chunk.k[p + n] + k * step, column + n * kParts);
        __builtin_prefetch(next.k[p + n] + k * step);
      }
      multiply(q + k * width, row, column, acc);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N * kParts; ++n) store(scores + m * kChunk + p * kLanes + n * kWide, acc[m][n]);
    }
  }

  static inline void take_panel(const uint32_t* from, u32xw* to) {
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part) to[part] = load<u32xw>(from + part * kWide);
  }

  // Key j is visible to query i iff 0 <= i - j, and < window where there is one.
  template <int M>
  void hide_unseen(const Chunk& chunk, int64_t row, int from, int to) {
    const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int32_t reach = window > 0 ? int32_t(std::min<int64_t>(window, INT32_MAX)) : INT32_MAX;
    for (int m = 0; m < M; ++m) {
      for (int p = from; p < to; ++p) {
        const i32x16 behind = position[row + m] - int32_t(chunk.first + p * kLanes) - lane;
        float* at = scores + m * kChunk + p * kLanes;
        const f32x16 score = load<f32x16>(at);
        store(at, (behind >= 0) & (behind < reach) ? score : fill(kHidden));
      }
    }
  }

  // Scores become weights 2^(score - best), 0 for what is hidden; totals and bests go on.
  template <int M>
  void weigh(int64_t row, int from, int to, const Sums& sums, float* correction) {
    alignas(64) float best[kLanes] = {};
    for (int m = 0; m < M; ++m) {
      const float* own = scores + m * kChunk;
      f32xw most = load<f32xw>(own + from * kLanes);
      for (int i = from * kLanes + kWide; i < to * kLanes; i += kWide) most = maximum(most, load<f32xw>(own + i));
      best[m] = largest(most);
    }
    // `best` is by row of the tile, whose sums need not lie at a multiple of 16.
    alignas(64) float before[kLanes];
    std::memset(before, 0, sizeof before);
    std::memcpy(before, sums.best + row, M * sizeof(float));
    const f32x16 old = load<f32x16>(before), now = maximum(load<f32x16>(best) * scale, old);
    const f32x16 base = finite(now);
    store(correction, exp2_of_negative<float>(old - base));
    store(best, base);
    store(before, now);
    std::memcpy(sums.best + row, before, M * sizeof(float));
    for (int m = 0; m < M; ++m) {
      float* total = sums.total + (row + m) * kLanes;
      f32xw sum = load<f32xw>(total) * correction[m];
      for (int i = from * kLanes; i < to * kLanes; i += kWide) {
        const f32xw weight = exp2_of_negative<T>(load<f32xw>(scores + m * kChunk + i) * scale - best[m]);
        sum += weight;
        store_floats(weights + m * kChunk + i, weight);
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
    for (; d + beside * kLanes <= head_dim; d += beside * kLanes) {
      combine_panels<M, beside>(chunk, next, row, from, keys, sums, correction, d);
    }
    for (; d < head_dim; d += kLanes) combine_panels<M, 1>(chunk, next, row, from, keys, sums, correction, d);
  }

  template <int M, int N>
  inline void combine_panels(const Chunk& chunk, const Chunk& next, int64_t row, int from, int64_t keys,
                             const Sums& sums, const float* correction, int64_t d) {
    constexpr int width = Pair<T>::width;
    f32xw acc[M][N * kParts];
    float* out = sums.out + row * head_dim + d;
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N * kParts; ++n) {
        acc[m][n] = load<f32xw>(out + m * head_dim + n * kWide) * correction[m];
      }
    }
    for (int p = from; p * kLanes < keys; ++p) {
      const int64_t own = std::min<int64_t>(kLanes, keys - p * kLanes);
      const T* lanes = weights + p * kLanes;
      const uint32_t *values = chunk.v[p] + d, *ahead = next.v[p] + d;
      u32xw column[N * kParts];
      for (int64_t k = 0; k < own / width; ++k) {
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          take_panel(values + k * head_dim + n * kLanes, column + n * kParts);
          __builtin_prefetch(ahead + k * head_dim + n * kLanes);
        }
        multiply(lanes + k * width, kChunk, column, acc);
      }
      if (width == 2 && own % 2 != 0) {
        // Of a pair only the first is the row's: the other may be NaN, which a weight of 0 does not silence.
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) {
          take_panel(values + own / 2 * head_dim + n * kLanes, column + n * kParts);
        }
#pragma GCC unroll 8
        for (int n = 0; n < N * kParts; ++n) column[n] &= 0xffffu;
        multiply(lanes + own - 1, kChunk, column, acc);
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N * kParts; ++n) store(out + m * head_dim + n * kWide, acc[m][n]);
    }
  }
};

}  // namespace headroom
