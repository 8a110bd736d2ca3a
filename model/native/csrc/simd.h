// Sixteen lanes at a time, on the vector extensions of GCC and Clang: the compiler splits them into what the
// CPU has (one AVX-512 register, two of AVX2, four of NEON). What is generic takes any number of lanes (`wide.h`).
// The one instruction that it cannot find by itself, the dot product of bfloat16 pairs, is named where the CPU
// has it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace headroom {

constexpr int kLanes = 16;

template <class T, int Lanes>
struct Vector {
  typedef T Type __attribute__((vector_size(Lanes * sizeof(T))));
};

typedef Vector<float, kLanes>::Type f32x16;
typedef Vector<uint32_t, kLanes>::Type u32x16;
typedef Vector<int32_t, kLanes>::Type i32x16;
typedef Vector<uint16_t, kLanes>::Type u16x16;

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

inline auto maximum(auto a, auto b) { return a > b ? a : b; }

inline float largest(auto v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float best = v[0];
  for (size_t i = 1; i < sizeof(v) / 4; ++i) best = v[i] > best ? v[i] : best;
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
inline auto narrow(auto values) {
  typedef typename Vector<uint16_t, sizeof(values) / 4>::Type Half;
#if defined(__AVX512BF16__)
  return (Half)_mm512_cvtneps_pbh((__m512)values);
#else
  const auto bits = (typename Vector<uint32_t, sizeof(values) / 4>::Type)values, quiet = (bits >> 16) | 0x40u;
  const auto rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return __builtin_convertvector(values == values ? rounded : quiet, Half);
#endif
}

inline bf16 narrow(float value) { return bf16{narrow(fill(value))[0]}; }

// ---- sixteen numbers of either kind in memory, as floats ----

inline f32x16 load_floats(const float* from) { return load<f32x16>(from); }
inline f32x16 load_floats(const bf16* from) { return widen(load<u16x16>(from)); }
inline void store_floats(float* to, auto values) { store(to, values); }
inline void store_floats(bf16* to, auto values) { store(to, narrow(values)); }

inline float float_of(float value) { return value; }
inline float float_of(bf16 value) { return widen(value); }
inline void put_float(float* to, float value) { *to = value; }
inline void put_float(bf16* to, float value) { *to = narrow(value); }

// ---- what a dot product takes at a time: a pair of bfloat16, or one float, in each 4-byte lane ----

template <class T>
struct Pair {
  static constexpr int width = 4 / sizeof(T);
};

// sum[i] += a[i].low * b[i].low + a[i].high * b[i].high
template <class V>
inline V dot(V sum, auto a, auto b, bf16) {
#if defined(__AVX512BF16__)
  return (V)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  const uint32_t high = 0xffff0000u;
  sum += (V)(a << 16) * (V)(b << 16);
  return sum + (V)(a & high) * (V)(b & high);
#endif
}
template <class V>
inline V dot(V sum, auto a, auto b, float) { return sum + (V)a * (V)b; }

// e^x for x <= 0, to 2 ulp; what is below -87 becomes 0. Cephes' split: e^x = 2^n * e^r, |r| <= ln 2 / 2.
template <class V>
inline V exp_of_negative(V x) {
  using Whole = typename Vector<int32_t, sizeof(V) / 4>::Type;
  const V lowest = V{} - 87.0f;
  const V within = maximum(x, lowest);
  const Whole n = __builtin_convertvector(within * 1.44269504f - 0.5f, Whole);  // truncates upwards: x <= 0
  const V whole = __builtin_convertvector(n, V);
  const V r = within - whole * 0.693359375f + whole * 2.12194440e-4f;
  V p = V{} + 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return x > lowest ? p * (V)((n + 127) << 23) : V{};
}

}  // namespace headroom
