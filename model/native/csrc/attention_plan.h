// What a step asks of attention, cut into units of work of like cost.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "simd.h"

namespace headroom {

// A step as attention sees it, in host memory. Sequence s has the rows [row_start[s], row_start[s + 1]), one
// for each of its KV heads in order, and the query tokens [query_start[s], query_start[s + 1]), its last ones.
struct Rows {
  const int32_t* tables;  // [max_rows, table_width] block ids
  int64_t table_width;
  const int64_t* row_slot;     // [R] which row of tables
  const int32_t* row_start;    // [S + 1]
  const int32_t* query_start;  // [S + 1]
  const int32_t* seq_len;      // [S] KV tokens after this step's write
  int64_t sequences;
  int64_t block_size;
  int64_t q_heads;
  int64_t head_dim;
  int threads;

  int64_t kv_heads(int64_t s) const { return row_start[s + 1] - row_start[s]; }
  int64_t tokens(int64_t s) const { return query_start[s + 1] - query_start[s]; }
  int64_t position(int64_t s, int64_t token) const { return seq_len[s] - (query_start[s + 1] - token); }
  const int32_t* table(int64_t row) const { return tables + row_slot[row] * table_width; }
};

// Keys that are summed up by themselves, at multiples of it, before they are added to those before: so a sum is
// the same to the last bit whether one unit makes it or several, and whoever else is in the step.
constexpr int64_t kSegment = 512;

// Keys of which all scores are made before any value is read.
constexpr int64_t kChunk = 64;
static_assert(kSegment % kChunk == 0 && kChunk % kLanes == 0);

// Some query tokens of one KV head of a sequence against some of its keys.
struct Unit {
  int64_t row, sequence, head;
  int64_t token, tokens;  // [token, token + tokens) on the token axis
  int64_t begin, end;     // keys; of a piece of a split, whole segments but for the first and the last one
  int64_t split;          // which of the plan's splits it is a piece of; -1: none
  int64_t cost;

  int64_t first_segment() const { return begin / kSegment; }
  int64_t segments() const { return (end + kSegment - 1) / kSegment - first_segment(); }
};

// Running sums of some query rows over some keys: e^score of each, relative to the best score so far.
struct Sums {
  float* out;    // [rows, D] of e^score * value
  float* total;  // [rows, 16] of e^score, by lane of a register
  float* best;   // [rows rounded up to 16]

  static int64_t rounded(int64_t rows) { return (rows + kLanes - 1) / kLanes * kLanes; }
  static int64_t floats(int64_t rows, int64_t head_dim) {
    return rounded(rows) * (head_dim + kLanes + 1);
  }
  static Sums at(float* memory, int64_t rows, int64_t head_dim) {
    float* total = memory + rounded(rows) * head_dim;
    return Sums{memory, total, total + rounded(rows) * kLanes};
  }
};

// A unit that several threads share: pieces leave the sums of each segment, and the last one adds them up.
struct Split {
  int64_t first, segments;
  int64_t rows, pieces;
  int64_t memory;  // floats before its own in the plan's
};

// The units of a step for layers of one window, costly ones first, so that who is free takes the next and all
// end together. Made once for all layers. One `attend` at a time may use it: it holds their partial sums.
class Plan {
 public:
  Plan(const Rows& rows, int64_t window) : rows_(rows), window_(window) {
    for (int64_t tokens_rows : {192, 96, 48}) {
      units_.clear();
      for (int64_t s = 0; s < rows.sequences; ++s) cut(s, tokens_rows);
      if (int64_t(units_.size()) >= 4 * rows.threads) break;
    }
    share();
    std::stable_sort(units_.begin(), units_.end(),
                     [](const Unit& a, const Unit& b) { return a.cost > b.cost; });
    finished_ = std::make_unique<std::atomic<int64_t>[]>(splits_.size());
    memory_.reset(new float[floats_]);
  }

  const std::vector<Unit>& units() const { return units_; }

  // The unit that a thread probably takes after the i-th.
  const Unit* after(int64_t i) const {
    const int64_t next = i + threads();
    return next < int64_t(units_.size()) ? &units_[next] : nullptr;
  }
  int threads() const { return total_ < kWorthAnother ? 1 : rows_.threads; }
  const Split& split(const Unit& unit) const { return splits_[unit.split]; }

  // Where a piece leaves the sums of a segment.
  Sums sums(const Split& split, int64_t segment) const {
    const int64_t each = Sums::floats(split.rows, rows_.head_dim);
    return Sums::at(memory_.get() + split.memory + (segment - split.first) * each, split.rows,
                    rows_.head_dim);
  }

  // Counts a piece as done; true for the last of its split.
  bool finish(const Unit& unit) const {
    const int64_t before = finished_[unit.split].fetch_add(1, std::memory_order_acq_rel);
    return (before + 1) % splits_[unit.split].pieces == 0;
  }

 private:
  static constexpr int64_t kReadCost = 16;  // reading a key and value costs as much as so many products
  static constexpr int64_t kPieces = 4;     // units a thread should have, so that all end together
  static constexpr int64_t kWorthAnother = 16384;  // less than this is done before another thread has come

  // The units of a sequence: all its rows, in tiles of about `most` query rows.
  void cut(int64_t s, int64_t most) {
    const int64_t group = rows_.q_heads / std::max<int64_t>(1, rows_.kv_heads(s));
    const int64_t tile = std::max<int64_t>(1, most / group);
    const int64_t stop = rows_.query_start[s + 1];
    for (int64_t row = rows_.row_start[s]; row < rows_.row_start[s + 1]; ++row) {
      for (int64_t token = rows_.query_start[s]; token < stop; token += tile) {
        const int64_t tokens = std::min(tile, stop - token);
        const int64_t end = rows_.position(s, token + tokens - 1) + 1;
        const int64_t seen = rows_.position(s, token) - window_ + 1;
        const int64_t start = window_ > 0 ? std::max<int64_t>(0, seen) : 0;
        const int64_t cost = (end - start) * (tokens * group + kReadCost);
        units_.push_back({row, s, row - rows_.row_start[s], token, tokens, start / kChunk * kChunk, end, -1, cost});
      }
    }
  }

  // Splits units that cost more than a thread's fair share.
  void share() {
    total_ = 0;
    for (const Unit& unit : units_) total_ += unit.cost;
    const int64_t fair = total_ / (kPieces * rows_.threads) + 1;
    if (threads() == 1) return;
    std::vector<Unit> whole;
    whole.swap(units_);
    for (const Unit& unit : whole) {
      const int64_t pieces = std::min(unit.segments(), (unit.cost + fair - 1) / fair);
      pieces > 1 ? divide(unit, pieces) : units_.push_back(unit);
    }
  }

  void divide(const Unit& unit, int64_t pieces) {
    const int64_t segments = unit.segments(), first = unit.first_segment();
    const int64_t rows = unit.tokens * (rows_.q_heads / rows_.kv_heads(unit.sequence));
    for (int64_t piece = 0; piece < pieces; ++piece) {
      Unit part = unit;
      part.begin = std::max(unit.begin, (first + segments * piece / pieces) * kSegment);
      part.end = std::min(unit.end, (first + segments * (piece + 1) / pieces) * kSegment);
      part.cost = unit.cost * (part.end - part.begin) / (unit.end - unit.begin);
      part.split = int64_t(splits_.size());
      units_.push_back(part);
    }
    splits_.push_back({first, segments, rows, pieces, floats_});
    floats_ += segments * Sums::floats(rows, rows_.head_dim);
  }

  Rows rows_{};
  int64_t window_ = 0;
  std::vector<Unit> units_;
  std::vector<Split> splits_;
  std::unique_ptr<std::atomic<int64_t>[]> finished_;
  std::unique_ptr<float[]> memory_;
  int64_t floats_ = 0;
  int64_t total_ = 0;
};


}  // namespace headroom
