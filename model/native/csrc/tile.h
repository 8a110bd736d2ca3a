// The inner product at the heart of everything here: M rows of x against panels of 16 columns.
//
// A panel holds 16 columns with P consecutive inputs of each together, P * 4-byte lanes: bfloat16 in pairs,
// floats alone. Weights are packed so (`linear.h`), and so are blocks of the KV cache (`attention.h`).
#pragma once

#include <algorithm>

#include "simd.h"

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
  constexpr int width = Pair<T>::width;
  for (int64_t k = 0; k < steps; ++k) {
    u32x16 column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) column[n] = load<u32x16>(w + n * w_panel + k * w_step);
    if constexpr (Ahead) __builtin_prefetch(ahead + k * kLanes, 0, 2);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) {
      uint32_t lane;
      std::memcpy(&lane, x + m * x_row + k * width, 4);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[m][n] = Pair<T>::dot(acc[m][n], column[n], fill(lane));
    }
  }
}

// Panels that a thread takes at a time: a multiple of the tile's, and enough chunks that threads end together.
inline int64_t panels_a_chunk(int64_t panels, int threads) {
  const int64_t share = panels / (int64_t(threads) * 4);
  return std::max<int64_t>(share / kTilePanels, 1) * kTilePanels;
}

}  // namespace headroom
