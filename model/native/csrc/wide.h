// As many lanes as one register of the CPU has. The compiler keeps 16-lane values of a CPU with fewer in memory,
// which costs nothing that matters beside a loop, but all of it inside one.
#pragma once

#include "simd.h"

namespace headroom {

#if defined(__AVX512F__)
constexpr int kWide = 16;
#elif defined(__AVX__)
constexpr int kWide = 8;
#else
constexpr int kWide = 4;
#endif
constexpr int kParts = kLanes / kWide;  // registers of 16 lanes

typedef Vector<float, kWide>::Type f32xw;
typedef Vector<uint32_t, kWide>::Type u32xw;

// acc[m][n] += lane of x's row m (x_row elements apart) * column[n]
template <int M, int N, class T>
inline void multiply(const T* x, int64_t x_row, const u32xw (&column)[N], f32xw (&acc)[M][N]) {
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) {
    uint32_t lane;
    std::memcpy(&lane, x + m * x_row, 4);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = dot(acc[m][n], column[n], u32xw{} + lane, T{});
  }
}

}  // namespace headroom
