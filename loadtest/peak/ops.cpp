// What the cores can do when nothing holds them up: dot products of bfloat16 pairs on registers alone, and
// memory read from one end to the other. A program that computes something comes close to it at best.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <atomic>

#include "../../model/native/csrc/simd.h"

namespace {

using namespace headroom;

constexpr int kSums = 16;  // enough that none waits for its last value

// Whatever the compiler knows of `sum`, it must forget.
inline void keep(f32x16& sum) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(sum));
#else
  asm volatile("" : "+m"(sum));
#endif
}

double dots(int64_t steps) {
  const u32x16 one = fill(uint32_t(0x3f803f80u)), half = fill(uint32_t(0x3f003f00u));
  f32x16 sums[kSums] = {};
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) sums[j] = Pair<bf16>::dot(sums[j], one, half);
#pragma GCC unroll 16
    for (int j = 0; j < kSums; ++j) keep(sums[j]);  // each step counts
  }
  double sum = 0;
  for (const f32x16& each : sums) sum += total(each);
  return sum;
}

// Bit patterns added up, so that every line must come; eight sums keep eight loads in flight.
uint32_t read(const uint32_t* from, int64_t lanes) {
  u32x16 sums[8] = {};
  for (int64_t i = 0; i + 8 * kLanes <= lanes; i += 8 * kLanes) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) sums[j] += load<u32x16>(from + i + j * kLanes);
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
