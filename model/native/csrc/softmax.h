// Softmax in pieces: what is known of some keys is corrected when better ones come (online softmax,
// arXiv 1805.02867; in attention, arXiv 2205.14135). Scores are kept in units of ln 2, as 2^x is cheaper.
#pragma once

#include <limits>

#include "simd.h"

namespace headroom {

constexpr float kLog2E = 1.44269504f;
constexpr float kHidden = -std::numeric_limits<float>::infinity();

// 2^r for |r| <= 1/2, by the polynomial of least relative error with the constant 1: 1e-7 and 1e-4 (what
// becomes bfloat16 needs no more than that).
template <class V>
inline V exp2_fraction(V r, float) {
  V p = 1.326469880e-3f * r + 9.671508823e-3f;
  p = p * r + 5.550733776e-2f;
  p = p * r + 2.402224215e-1f;
  p = p * r + 6.931469776e-1f;
  return p * r + 1.0f;
}
template <class V>
inline V exp2_fraction(V r, bf16) {
  V p = 5.500858158e-2f * r + 2.422103745e-1f;
  p = p * r + 6.932829005e-1f;
  return p * r + 1.0f;
}

// 2^x for x <= 0, as exactly as a T needs it; 0 below 2^-126, minus infinity included. NaN stays NaN.
template <class T, class V>
inline V exp2_of_negative(V x) {
#if defined(__AVX512F__)
  const V within = (V)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
  const V whole = (V)_mm512_roundscale_ps((__m512)within, 0);
  return (V)_mm512_scalef_ps((__m512)exp2_fraction(within - whole, T{}), (__m512)whole);
#else
  using Whole = decltype(x < x);
  const V lowest = V{} - 126.0f;
  const V within = x < lowest ? lowest : x;
  const Whole n = __builtin_convertvector(within - 0.5f, Whole);  // truncates upwards: x <= 0
  const V fraction = exp2_fraction(within - __builtin_convertvector(n, V), T{});
  return x < lowest ? V{} : fraction * (V)((n + 127) << 23);
#endif
}

// What `best` may be subtracted as: a row that has seen no key yet has minus infinity, and none of its own.
inline f32x16 finite(f32x16 best) { return best == kHidden ? f32x16{} : best; }

}  // namespace headroom
