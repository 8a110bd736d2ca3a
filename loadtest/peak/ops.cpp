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

// One register's worth: GCC puts longer vectors on the stack. Sums: as many as there are registers for, and
// enough that none waits for its last value.
#if defined(__AVX512F__)
constexpr int kBytes = 64, kSums = 16;
#else
constexpr int kBytes = 32, kSums = 12;
#endif
constexpr int kLanes = kBytes / 4;

typedef float floats __attribute__((vector_size(kBytes)));
typedef uint32_t words __attribute__((vector_size(kBytes)));

// Two products and two sums a lane: sum[i] += a[i].low * b[i].low + a[i].high * b[i].high of bfloat16 pairs in
// one instruction, or two multiply-adds of floats, in a form that no compiler can take out of the loop.
inline floats dot(floats sum, words a, words b) {
#if defined(__AVX512BF16__)
  return (floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
  sum = sum * (floats)b + (floats)a;
  return sum * (floats)b + (floats)a;
#endif
}

// Every loop over the sums is unrolled: indexed by a variable, they would be stored in each step. Each begins
// with another value, or the compiler would see that they are all the same.
double dots(int64_t steps) {
  const words one = words{} + 0x3f803f80u, half = words{} + 0x3f003f00u;  // pairs of 1.0, of 0.5
  floats sums[kSums];
#pragma GCC unroll 16
  for (int j = 0; j < kSums; ++j) sums[j] = floats{} + float(steps + j);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) sums[j] = dot(sums[j], one, half);
  }
  floats all = {};
#pragma GCC unroll 16
  for (int j = 0; j < kSums; ++j) all += sums[j];
  double sum = 0;
  for (int i = 0; i < kLanes; ++i) sum += all[i];
  return sum;
}

// Bit patterns added up, so that every line must come; eight sums keep eight loads in flight.
uint32_t read(const uint32_t* from, int64_t lanes) {
  words sums[8] = {};
  for (int64_t i = 0; i + 8 * kLanes <= lanes; i += 8 * kLanes) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      words next;
      std::memcpy(&next, from + i + j * kLanes, sizeof next);
      sums[j] += next;
    }
  }
  uint32_t sum = 0;
  for (const words& each : sums) {
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
