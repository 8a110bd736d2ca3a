// Logits to drawn tokens, row by row: what model/sampler.py defines, on plain memory.
#pragma once

#include "draw_last.h"
#include "scratch.h"

namespace headroom {

constexpr int64_t kMostTokens = std::numeric_limits<int32_t>::max() - kColumns;  // ids of 31 bits
constexpr int64_t kGreedy = -1;
constexpr uint64_t kTokens = uint64_t(1) << 32;  // what a token's counter adds to its id (model/race.py)

// How rows are drawn, [D] each.
struct Wishes {
  const float* temperature;
  const double* top_p;
  const float* min_p;
  const int64_t* top_k;  // at least 1
  const int64_t* key;
};

// In (0, 1): the hash that model/randomness.py makes noise of, which is -log(1 - fraction).
inline double fraction_of(uint64_t key, uint64_t counter) {
  uint64_t state = key + (counter + 1) * 0x9E3779B97F4A7C15u;
  state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9u;
  state = (state ^ state >> 27) * 0x94D049BB133111EBu;
  state ^= state >> 31;
  return std::min((double(state >> 11) + 0.5) * 0x1p-53, 1 - 0x1p-53);
}

// The one of `count` runners that arrives first (model/race.py); units(i) is what runner i weighs, `counter` that
// of the first.
template <class Units>
inline int64_t race(uint64_t key, uint64_t counter, int64_t count, const Units& units) {
  double best = std::numeric_limits<double>::infinity();
  int64_t winner = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double weight = double(units(i));
    if (weight == 0) continue;
    const double fraction = fraction_of(key, counter + i);
    if (fraction >= best * weight) continue;  // the noise is no less than that: most need no logarithm
    const double time = -std::log1p(-fraction) / weight;
    if (time < best) {
      best = time;
      winner = i;
    }
  }
  return winner;
}

// The token that a row of finite peak draws.
inline int64_t draw(const Row& row, const Filters& filters, uint64_t key) {
  const int64_t room = row.blocks() * kBlock + kWide;
  Scratch& scratch = Scratch::of_thread();
  scratch.start(room * (sizeof(float) + Tokens::kBytes) + row.blocks() * (sizeof(int64_t) + sizeof(float)));
  float* weight = scratch.take<float>(room);
  const Blocks blocks{scratch.take<int64_t>(row.blocks()), scratch.take<float>(row.blocks())};
  const Tokens tokens{scratch.take<int32_t>(room), scratch.take<int32_t>(room), scratch.take<int32_t>(room),
                      scratch.take<int64_t>(room)};
  weigh(row, weight, blocks);
  if (filters.cut(row.vocab) || filters.min_p > 0) {
    const Last last = filters.cut(row.vocab) ? find_last(row, filters, weight, blocks, tokens) : Last{};
    drop(row, last, filters.min_p, weight, blocks);
  }
  const int64_t first = kBlock * race(key, 0, row.blocks(), [&](int64_t block) { return blocks.units[block]; });
  const auto units = [&](int64_t i) { return units_of(weight[first + i], row.unit()); };
  return first + race(key, kTokens + first, kBlock, units);
}

// The id that a row of logits [vocab] gives by wish `d`, or greedily; -1 if it is broken.
inline int64_t draw_or_flag(const float* logits, int64_t vocab, const Wishes& wishes, int64_t d) {
  Row row{logits, vocab, 0.0f, d == kGreedy ? 1.0f : wishes.temperature[d]};
  row.peak = find_peak(row);
  if (!std::isfinite(row.peak)) return -1;
  if (d == kGreedy || wishes.top_k[d] == 1) return find_first(row);
  return draw(row, {wishes.top_k[d], wishes.top_p[d], wishes.min_p[d]}, uint64_t(wishes.key[d]));
}

}  // namespace headroom
