// What the cores can do when nothing holds them up: dot products of bfloat16 pairs on registers alone, and
// memory read from one end to the other. A program that computes something comes close to it at best.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>
#include <cstdint>
#include <cstring>

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

// What is measured here stands alone: it is compiled anew when this file changes, and no other's.
namespace {

constexpr int kLanes = 16;

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));

// Two products and two sums a lane: sum[i] += a[i].low * b[i].low + a[i].high * b[i].high of bfloat16 pairs in
// one instruction, or two multiply-adds of floats, in a form that no compiler can take out of the loop.
inline f32x16 dot(f32x16 sum, u32x16 a, u32x16 b) {
#if defined(__AVX512BF16__)
  return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum = sum * (f32x16)b + (f32x16)a;
  return sum * (f32x16)b + (f32x16)a;
#endif
}

// As many as there are registers for, and enough that none waits for its last value.
#if defined(__AVX512F__)
constexpr int kSums = 16;
#else
constexpr int kSums = 6;
#endif

// `sum`, of which the compiler must not know what it knows.
inline f32x16 kept(f32x16 sum) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(sum));
#endif
  return sum;
}

// Every loop over the sums is unrolled: indexed by a variable, they would be stored in each step.
double dots(int64_t steps) {
  const u32x16 one = u32x16{} + 0x3f803f80u, half = u32x16{} + 0x3f003f00u;  // pairs of 1.0, of 0.5
  f32x16 sums[kSums] = {};
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) sums[j] = kept(dot(sums[j], one, half));  // each step counts
  }
  f32x16 all = {};
#pragma GCC unroll 16
  for (int j = 0; j < kSums; ++j) all += sums[j];
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += all[i];
  return sum;
}

// Bit patterns added up, so that every line must come; eight sums keep eight loads in flight.
uint32_t read(const uint32_t* from, int64_t lanes) {
  u32x16 sums[8] = {};
  for (int64_t i = 0; i + 8 * kLanes <= lanes; i += 8 * kLanes) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      u32x16 next;
      std::memcpy(&next, from + i + j * kLanes, sizeof next);
      sums[j] += next;
    }
  }
  uint32_t sum = 0;
  for (const u32x16& each : sums) {
    for (int i = 0; i < kLanes; ++i) sum += each[i];
  }
  return sum;
}

// `steps` steps in each thread; returns the operations that all of them did.
int64_t dots_op(int64_t steps) {
  const int64_t threads = at::get_num_threads();
  std::atomic<double> kept = 0;
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) kept = dots(steps);
  });
  return threads * steps * kSums * kLanes * 4;
}

// Goes once through a contiguous buffer, each thread through its part; a number that depends on all of it.
int64_t read_op(const at::Tensor& buffer) {
  const auto* lanes = static_cast<const uint32_t*>(buffer.const_data_ptr());
  std::atomic<uint32_t> kept = 0;
  at::parallel_for(0, buffer.nbytes() / 4, 1 << 20, [&](int64_t begin, int64_t end) {
    kept += read(lanes + begin, end - begin);
  });
  return kept;
}

}  // namespace

TORCH_LIBRARY(HEADROOM_NAMESPACE, m) {
  m.def("dots", &dots_op);
  m.def("read", &read_op);
}
