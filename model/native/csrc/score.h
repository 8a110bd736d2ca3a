// Log-probabilities of a row's tokens under its raw logits: what model/logprobs.py defines, on plain memory.
#pragma once

#include <numeric>

#include "draw_weights.h"
#include "scratch.h"

namespace headroom {

// A row's scores, and room for the `count` likeliest tokens, at most the vocabulary.
struct Scores {
  double* own;
  int64_t count;
  int64_t* best_ids;  // [count]
  double* best;       // [count]
};

// The `count` likeliest tokens, from high to low, equals by ascending id. That many blocks have a logit no less than
// the least of the `count` best blocks' best, so the tokens that reach it are enough, and few.
inline void find_best(const Row& row, const float* block_best, int64_t count, int64_t* ids) {
  float bound = kNothing;
  if (count <= row.blocks()) {
    std::vector<float> tops(block_best, block_best + row.blocks());
    std::nth_element(tops.begin(), tops.begin() + count - 1, tops.end(), std::greater<float>());
    bound = tops[count - 1];
  }
  std::vector<int64_t> found;
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (block_best[block] < bound) continue;
    for (int64_t id = block * kBlock; id < std::min(row.vocab, (block + 1) * kBlock); ++id) {
      if (row.logits[id] >= bound) found.push_back(id);
    }
  }
  std::partial_sort_copy(found.begin(), found.end(), ids, ids + count, [&](int64_t a, int64_t b) {
    return row.logits[a] != row.logits[b] ? row.logits[a] > row.logits[b] : a < b;
  });
}

// Of token `id`, and of the likeliest; NaN if the row is broken.
inline void score(const float* logits, int64_t vocab, int64_t id, const Scores& scores) {
  Row row{logits, vocab, 0.0f, 1.0f};
  row.peak = find_peak(row);
  if (!std::isfinite(row.peak)) {
    *scores.own = std::numeric_limits<double>::quiet_NaN();
    std::fill_n(scores.best, scores.count, *scores.own);
    return std::iota(scores.best_ids, scores.best_ids + scores.count, 0);
  }
  Scratch& scratch = Scratch::of_thread();
  scratch.start(row.blocks() * (kBlock * sizeof(float) + sizeof(int64_t) + sizeof(float)));
  float* weight = scratch.take<float>(row.blocks() * kBlock);
  const Blocks blocks{scratch.take<int64_t>(row.blocks()), scratch.take<float>(row.blocks())};
  weigh(row, weight, blocks);
  const int64_t units = std::accumulate(blocks.units, blocks.units + row.blocks(), int64_t(0));
  const double total = std::log(double(units) / row.unit()) + row.peak;
  *scores.own = logits[id] - total;
  if (scores.count == 0) return;
  find_best(row, blocks.best, scores.count, scores.best_ids);
  for (int64_t i = 0; i < scores.count; ++i) scores.best[i] = logits[scores.best_ids[i]] - total;
}

}  // namespace headroom
