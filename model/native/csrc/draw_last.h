// Which token is the last that top_k and top_p keep of a row.
//
// A bound says how low that token's logit can be; few reach it. These candidates are counted into buckets by
// logit, so that running sums over the buckets tell in which of them the token is, and only that one is sorted.
#pragma once

#include <algorithm>
#include <array>
#include <functional>
#include <span>

#include "draw_weights.h"

namespace headroom {

constexpr int64_t kColumns = 768;
constexpr int kBuckets = 2048;

// No more than the `count`-th best logit: the vocabulary lies in lines of kColumns, and each of the `count` best
// columns has a logit that is as good. Nothing is known of more than there are columns.
inline float bound_of_best(const Row& row, int64_t count) {
  if (count > kColumns) return kNothing;
  float best[kColumns];
  std::fill_n(best, kColumns, kNothing);
  for (int64_t line = 0; line < row.vocab; line += kColumns) {
    for (int64_t i = 0; i < kColumns; i += kWide) store(best + i, maximum(row.at(line + i), load<f32xw>(best + i)));
  }
  std::nth_element(best, best + count - 1, best + kColumns, std::greater<float>());
  return best[count - 1];
}

// No more than the logit of any token that weighs so many units: what rounding can do to a weight is less than
// the slack.
inline float bound_of_weight(const Row& row, double units) {
  const double depth = std::log(std::max(units, 1.0) / row.unit()) - 1e-4;
  return float(std::max(row.peak + row.temperature * depth, double(std::numeric_limits<float>::lowest())));
}

// Memory for what is known of a row's candidates, each [vocab + kWide].
struct Tokens {
  static constexpr int64_t kBytes = 3 * sizeof(int32_t) + sizeof(int64_t);
  int32_t* id;
  int32_t* bucket;
  int32_t* members;  // of one bucket
  int64_t* units;
};

class Candidates {
 public:
  // Tokens of no less than `bound`, which the peak is not below; they are counted only if somebody asks how many.
  Candidates(const Row& row, const float* weight, float bound, bool counted, const Tokens& tokens)
      : row_(row), tokens_(tokens) {
    collect(bound);
    fill(weight);
    for (int64_t i = 0; counted && i < found_; ++i) ++count_[tokens_.bucket[i]];
  }

  // The first of them, from high to low, with which there are enough (units, tokens). If all of them are not enough,
  // nothing is cut.
  template <class Enough>
  Last first(const Enough& enough) const {
    int64_t units = 0, tokens = 0;
    int bucket = 0;
    for (; bucket < kBuckets - 1 && !enough(units + units_[bucket], tokens + count_[bucket]); ++bucket) {
      units += units_[bucket];
      tokens += count_[bucket];
    }
    for (const int32_t i : sorted(bucket)) {
      units += tokens_.units[i];
      ++tokens;
      const int32_t id = tokens_.id[i];
      if (enough(units, tokens)) return {row_.logits[id], id, units};
    }
    return {.units = units};
  }

 private:
  void collect(float bound) {
    for (int64_t i = 0; i < row_.vocab; i += kWide) {
      const f32xw logit = row_.at(i);
#if defined(__AVX512F__)
      const __mmask16 good = _mm512_cmp_ps_mask((__m512)logit, _mm512_set1_ps(bound), _CMP_GE_OQ);
      const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
      const __m512i ids = _mm512_add_epi32(_mm512_set1_epi32(int32_t(i)), lanes);
      _mm512_storeu_si512(tokens_.id + found_, _mm512_maskz_compress_epi32(good, ids));
      found_ += __builtin_popcount(good);
#else
      for (int lane = 0; lane < kWide; ++lane) {
        tokens_.id[found_] = int32_t(i) + lane;
        found_ += logit[lane] >= bound;
      }
#endif
    }
  }

  // Buckets of equal steps from the peak to the lowest; rounding is monotone, and halves do not overflow.
  void fill(const float* weight) {
    const float half = row_.peak / 2, unit = row_.unit();
    float lowest = row_.peak;
    for (int64_t i = 0; i < found_; ++i) lowest = std::min(lowest, row_.logits[tokens_.id[i]]);
    const float steps = kBuckets / std::max(half - lowest / 2, 1e-30f);
    for (int64_t i = 0; i < found_; ++i) {
      tokens_.bucket[i] = std::min(int((half - row_.logits[tokens_.id[i]] / 2) * steps), kBuckets - 1);
    }
    for (int64_t i = 0; i < found_; ++i) tokens_.units[i] = units_of(weight[tokens_.id[i]], unit);
    for (int64_t i = 0; i < found_; ++i) units_[tokens_.bucket[i]] += tokens_.units[i];
  }

  // The bucket's tokens, from high to low: where they stand among the candidates.
  std::span<const int32_t> sorted(int bucket) const {
    int32_t* members = tokens_.members;
    int64_t count = 0;
    for (int64_t i = 0; i < found_; ++i) {
      members[count] = int32_t(i);
      count += tokens_.bucket[i] == bucket;
    }
    const auto logit = [&](int32_t i) { return row_.logits[tokens_.id[i]]; };
    std::sort(members, members + count,
              [&](int32_t a, int32_t b) { return logit(a) != logit(b) ? logit(a) > logit(b) : a < b; });
    return {members, size_t(count)};
  }

  const Row& row_;
  const Tokens& tokens_;
  int64_t found_ = 0;
  std::array<int64_t, kBuckets> units_ = {};
  std::array<int32_t, kBuckets> count_ = {};
};

// What a row keeps of its tokens.
struct Filters {
  int64_t top_k;
  double top_p;
  float min_p;

  bool limits(int64_t vocab) const { return top_k < vocab; }
  bool cut(int64_t vocab) const { return limits(vocab) || top_p < 1; }
  // The units that a running sum must exceed for its token to be the last that top_p keeps of `mass`.
  int64_t above(int64_t mass) const { return std::min(int64_t(std::ceil(top_p * double(mass))), mass) - 1; }
};

// The last token that top_k, and top_p of what that leaves, keep of a row.
inline Last find_last(const Row& row, const Filters& filters, const float* weight, const Blocks& blocks,
                      const Tokens& tokens) {
  const bool limited = filters.limits(row.vocab);
  int64_t mass = 0;
  for (int64_t block = 0; block < row.blocks(); ++block) mass += blocks.units[block];
  // The last token and all after it weigh mass - above or more, together: so it is not light.
  const double least = limited ? 1.0 : double(mass - filters.above(mass)) / double(row.vocab);
  const float bound = std::max(bound_of_weight(row, least), limited ? bound_of_best(row, filters.top_k) : kNothing);
  const Candidates candidates(row, weight, bound, limited, tokens);
  Last last;
  if (limited) {
    last = candidates.first([&](int64_t, int64_t count) { return count >= filters.top_k; });
    mass = last.units;
  }
  if (filters.top_p < 1) {
    const int64_t above = filters.above(mass);
    last = candidates.first([above](int64_t units, int64_t) { return units > above; });
  }
  return last;
}

}  // namespace headroom
