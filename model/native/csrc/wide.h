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

typedef float f32xw __attribute__((vector_size(4 * kWide)));
typedef uint32_t u32xw __attribute__((vector_size(4 * kWide)));
typedef uint16_t u16xw __attribute__((vector_size(2 * kWide)));

#if !defined(__AVX512F__)
inline void store_floats(float* to, f32xw values) { store(to, values); }
inline void store_floats(bf16* to, f32xw values) {
  const u32xw bits = (u32xw)values, quiet = (bits >> 16) | 0x40u;
  const u32xw rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  store(to, __builtin_convertvector(values == values ? rounded : quiet, u16xw));
}
inline f32xw maximum(f32xw a, f32xw b) { return a > b ? a : b; }
inline float largest(f32xw v) {
  float best = v[0];
  for (int i = 1; i < kWide; ++i) best = v[i] > best ? v[i] : best;
  return best;
}
#endif

inline f32xw dot(f32xw sum, u32xw a, u32xw b, bf16) {
#if defined(__AVX512BF16__)
  return Pair<bf16>::dot(sum, a, b);
#else
  const uint32_t high = 0xffff0000u;
  sum += (f32xw)(a << 16) * (f32xw)(b << 16);
  return sum + (f32xw)(a & high) * (f32xw)(b & high);
#endif
}
inline f32xw dot(f32xw sum, u32xw a, u32xw b, float) { return sum + (f32xw)a * (f32xw)b; }

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
