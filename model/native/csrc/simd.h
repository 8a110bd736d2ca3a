// Sixteen lanes at a time, on the vector extensions of GCC and Clang: the compiler splits them into what the
// CPU has (one AVX-512 register, two of AVX2, four of NEON). The one instruction that it cannot find by
// itself, the dot product of bfloat16 pairs, is named where the CPU has it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace headroom {

constexpr int kLanes = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

struct bf16 {
  uint16_t bits;
};

template <class V>
inline V load(const void* from) {
  V value;
  std::memcpy(&value, from, sizeof(V));
  return value;
}

template <class V>
inline void store(void* to, V value) {
  std::memcpy(to, &value, sizeof(V));
}

inline f32x16 fill(float value) { return f32x16{} + value; }
inline u32x16 fill(uint32_t value) { return u32x16{} + value; }

inline f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

inline float largest(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (int i = 1; i < kLanes; ++i) best = v[i] > best ? v[i] : best;
  return best;
#endif
}

inline float total(f32x16 v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += v[i];
  return sum;
#endif
}

// ---- bfloat16: the upper half of a float ----

inline float widen(bf16 value) {
  uint32_t bits = uint32_t(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

inline f32x16 widen(u16x16 values) { return (f32x16)(__builtin_convertvector(values, u32x16) << 16); }

// To the nearest, ties to even; NaN stays NaN.
inline u16x16 narrow(f32x16 values) {
#if defined(__AVX512BF16__)
  return (u16x16)_mm512_cvtneps_pbh((__m512)values);
#else
  u32x16 bits = (u32x16)values;
  u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  u32x16 quiet = (bits >> 16) | 0x40u;
  return __builtin_convertvector(values == values ? rounded : quiet, u16x16);
#endif
}

inline bf16 narrow(float value) { return bf16{narrow(fill(value))[0]}; }

// ---- sixteen numbers of either kind in memory, as floats ----

inline f32x16 load_floats(const float* from) { return load<f32x16>(from); }
inline f32x16 load_floats(const bf16* from) { return widen(load<u16x16>(from)); }
inline void store_floats(float* to, f32x16 values) { store(to, values); }
inline void store_floats(bf16* to, f32x16 values) { store(to, narrow(values)); }

inline float float_of(float value) { return value; }
inline float float_of(bf16 value) { return widen(value); }
inline void put_float(float* to, float value) { *to = value; }
inline void put_float(bf16* to, float value) { *to = narrow(value); }

// ---- what a dot product takes at a time: a pair of bfloat16, or one float, in each 4-byte lane ----

template <class T>
struct Pair;

template <>
struct Pair<bf16> {
  static constexpr int width = 2;
  // sum[i] += a[i].low * b[i].low + a[i].high * b[i].high
  static inline f32x16 dot(f32x16 sum, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
    return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    const uint32_t high = 0xffff0000u;
    sum += (f32x16)(a << 16) * (f32x16)(b << 16);
    return sum + (f32x16)(a & high) * (f32x16)(b & high);
#endif
  }
};

template <>
struct Pair<float> {
  static constexpr int width = 1;
  static inline f32x16 dot(f32x16 sum, u32x16 a, u32x16 b) { return sum + (f32x16)a * (f32x16)b; }
};

// e^x for x <= 0, to 2 ulp; what is below -87 becomes 0. Cephes' split: e^x = 2^n * e^r, |r| <= ln 2 / 2.
inline f32x16 exp_of_negative(f32x16 x) {
  const f32x16 lowest = fill(-87.0f);
  f32x16 within = x > lowest ? x : lowest;
  i32x16 n = __builtin_convertvector(within * 1.44269504f - 0.5f, i32x16);  // truncates upwards: x <= 0
  f32x16 whole = __builtin_convertvector(n, f32x16);
  f32x16 r = within - whole * 0.693359375f + whole * 2.12194440e-4f;
  f32x16 p = fill(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  f32x16 power = (f32x16)((n + 127) << 23);
  return x > lowest ? p * power : f32x16{};
}

}  // namespace headroom
