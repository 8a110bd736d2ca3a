// The inner product at the heart of everything here: M rows of x against panels of 16 columns.
//
// A panel holds 16 columns, and a 4-byte lane of it P consecutive inputs of one: bfloat16 in pairs, floats alone.
// Weights are packed so (`linear.h`), and so are blocks of the KV cache (`blocks.h`).
#pragma once

#include <algorithm>

#include "wide.h"

namespace headroom {

// Rows and panels of the largest tile whose sums stay in registers.
#if defined(__AVX512F__)
constexpr int kTileRows = 6;
constexpr int kTilePanels = 4;
#else
constexpr int kTileRows = 2;
constexpr int kTilePanels = 2;
#endif

// acc[m][n] += x[m] . column of panel n, over `steps` lanes of input.
// x: row m at x + m * x_row (elements), its inputs contiguous.
// w: panel n at w + n * w_panel, the next lane of input at + w_step (both in 4-byte lanes).
// ahead: with Ahead, 16 lanes of it a step are brought nearer to the core while the sums are made.
template <int M, int N, class T, bool Ahead = false>
inline void tile(const T* x, int64_t x_row, const uint32_t* w, int64_t w_panel, int64_t w_step, int64_t steps,
                 f32x16 (&acc)[M][N], const uint32_t* ahead = nullptr) {
  constexpr int parts = N * kParts;
  f32xw sums[M][parts];
  std::memcpy(sums, acc, sizeof(acc));
  for (int64_t k = 0; k < steps; ++k) {
    u32xw column[parts];
#pragma GCC unroll 16
    for (int p = 0; p < parts; ++p) {
      column[p] = load<u32xw>(w + p / kParts * w_panel + k * w_step + p % kParts * kWide);
    }
    if constexpr (Ahead) __builtin_prefetch(ahead + k * kLanes, 0, 2);
    multiply(x + k * Pair<T>::width, x_row, column, sums);
  }
  std::memcpy(acc, sums, sizeof(acc));
}

// Panels that a thread takes at a time: a multiple of the tile's, and enough chunks that threads end together.
inline int64_t panels_a_chunk(int64_t panels, int threads) {
  const int64_t share = panels / (int64_t(threads) * 4);
  return std::max<int64_t>(share / kTilePanels, 1) * kTilePanels;
}

}  // namespace headroom
