// A row's logits as weights, and what these weigh: whole units, counted in int64, so that sums are exact
// (model/draw_rows.py says what a unit is).
#pragma once

#include <algorithm>
#include <limits>

#include "wide.h"

namespace headroom {

constexpr int64_t kBlock = 256;  // tokens, as in model/race.py
constexpr float kNothing = -std::numeric_limits<float>::infinity();

typedef Vector<int32_t, kWide>::Type i32xw;
typedef Vector<float, kWide / 2>::Type f32xh;
typedef Vector<int64_t, kWide / 2>::Type i64xh;

struct Row {
  const float* logits;  // [vocab]
  int64_t vocab;
  float peak, temperature;

  int64_t blocks() const { return (vocab + kBlock - 1) / kBlock; }

  // How many units the best token weighs: a whole vocabulary weighs less than 2^62.
  float unit() const { return std::ldexp(1.0f, __builtin_clzll(vocab) - 2); }

  // kWide logits from token `first` on; minus infinity past the end.
  f32xw at(int64_t first) const {
    if (first + kWide <= vocab) return load<f32xw>(logits + first);
    float some[kWide];
    for (int64_t i = 0; i < kWide; ++i) some[i] = first + i < vocab ? logits[first + i] : kNothing;
    return load<f32xw>(some);
  }
};

inline bool any(i32xw mask) {
  int32_t lanes = 0;
  for (int i = 0; i < kWide; ++i) lanes |= mask[i];
  return lanes != 0;
}

// The largest logit; NaN if any is NaN.
inline float find_peak(const Row& row) {
  f32xw best = f32xw{} + kNothing;
  i32xw broken = {};
  for (int64_t i = 0; i < row.vocab; i += kWide) {
    const f32xw logit = row.at(i);
    best = maximum(logit, best);
    broken |= logit != logit;
  }
  return any(broken) ? std::numeric_limits<float>::quiet_NaN() : largest(best);
}

// The first token whose logit is the peak.
inline int64_t find_first(const Row& row) {
  for (int64_t block = 0; block < row.vocab; block += kBlock) {
    i32xw found = {};
    for (int64_t i = block; i < block + kBlock; i += kWide) found |= row.at(i) == row.peak;
    if (any(found)) return std::find(row.logits + block, row.logits + row.vocab, row.peak) - row.logits;
  }
  return 0;
}

inline int64_t units_of(float weight, float unit) { return int64_t(weight * unit); }

// What a block's weights come to.
inline int64_t block_units(const float* weight, float unit) {
  i64xh sum = {};
  for (int64_t i = 0; i < kBlock; i += kWide / 2) {
    sum += __builtin_convertvector(load<f32xh>(weight + i) * unit, i64xh);
  }
  int64_t units = 0;
  for (int i = 0; i < kWide / 2; ++i) units += sum[i];
  return units;
}

// What is known of a row's blocks, [blocks] each.
struct Blocks {
  int64_t* units;  // what their tokens weigh
  float* best;     // their largest logits
};

// weight [blocks * kBlock], where what is past the row's end weighs no unit; and the blocks of it.
inline void weigh(const Row& row, float* weight, const Blocks& blocks) {
  for (int64_t block = 0; block < row.blocks(); ++block) {
    f32xw best = f32xw{} + kNothing;
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kWide) {
      const f32xw logit = row.at(i), depth = (logit - row.peak) / row.temperature;
      best = maximum(logit, best);
      store(weight + i, exp_of_negative(depth));
    }
    blocks.best[block] = largest(best);
    blocks.units[block] = block_units(weight + block * kBlock, row.unit());
  }
}

// A token up to which filters keep a row's tokens, in descending order, equals by ascending id.
struct Last {
  float logit = kNothing;  // of all of them, if nothing else is said
  int32_t token = std::numeric_limits<int32_t>::max();
  int64_t units = 0;  // of the tokens up to it
};

// Takes the weight of tokens that come after `last` or weigh less than `min_p`; of whole blocks only their units.
inline void drop(const Row& row, const Last& last, float min_p, float* weight, const Blocks& blocks) {
  i32xw lanes;
  for (int i = 0; i < kWide; ++i) lanes[i] = i;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    blocks.units[block] = 0;
    if (blocks.best[block] < last.logit) continue;
    for (int64_t i = block * kBlock; i < (block + 1) * kBlock; i += kWide) {
      const f32xw logit = row.at(i), own = load<f32xw>(weight + i);
      const i32xw until = (logit > last.logit) | ((logit == last.logit) & (lanes + int32_t(i) <= last.token));
      store(weight + i, until & (own >= min_p) ? own : f32xw{});
    }
    blocks.units[block] = block_units(weight + block * kBlock, row.unit());
  }
}

}  // namespace headroom
