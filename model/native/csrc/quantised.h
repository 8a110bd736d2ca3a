// Products with weights of 4 or 8 bits (model/quantise.py says what the codes mean).
//
// Codes lie in panels of 16 outputs, in the order in which a register takes them apart: a 64-byte load holds
// one 4-byte lane for each output, with the codes of several pairs of inputs. They become bfloat16, which
// holds them exactly, and go through the dot product of pairs; at the end of a group of 32 inputs its scale
// comes in, in fp32. So a weight is never rounded again, and a row's result is the same in any batch.
#pragma once

#include <algorithm>
#include <array>
#include <utility>
#include <vector>

#include "threads.h"
#include "tile.h"

namespace headroom {

constexpr int kGroup = 32;  // inputs that share a scale
constexpr int kGroupPairs = kGroup / 2;

// The sums of 32 neighbours each of x [groups * 32].
inline std::vector<float> group_sums(const bf16* x, int64_t groups) {
  std::vector<float> sums(groups);
  for (int64_t g = 0; g < groups; ++g, x += kGroup) sums[g] = total(load_floats(x) + load_floats(x + kLanes));
  return sums;
}

// 4 bits: of pair p in a lane, the first input at bits 4p..4p+3 and the second 16 higher. 256 bytes a group.
struct Codes4 {
  static constexpr int pairs = 4;         // in a 64-byte load
  static constexpr bool has_middle = true;
  static constexpr float unit = 1.0f;     // what a number is multiplied by in `split`

  static inline void split(u32x16 lanes, u32x16 (&column)[pairs]) {
#if defined(__AVX512BW__)
    // The 16 numbers twice, so that whatever the next code puts in the fifth bit does not matter.
    const __m512i numbers = (__m512i)load<u32x16>(kNumbers);
    column[0] = (u32x16)_mm512_permutexvar_epi16((__m512i)lanes, numbers);
    column[1] = (u32x16)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)lanes, 4), numbers);
    column[2] = (u32x16)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)lanes, 8), numbers);
    column[3] = (u32x16)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)lanes, 12), numbers);
#else
#pragma GCC unroll 4
    for (int p = 0; p < pairs; ++p) {
      f32x16 first = __builtin_convertvector((i32x16)((lanes >> (4 * p)) & 15u), f32x16) - 7.5f;
      f32x16 second = __builtin_convertvector((i32x16)((lanes >> (4 * p + 16)) & 15u), f32x16) - 7.5f;
      column[p] = ((u32x16)first >> 16) | (u32x16)second;  // a half needs no more than bfloat16's bits
    }
#endif
  }

  // -7.5, -6.5 .. 7.5 as bfloat16
  alignas(64) static constexpr uint16_t kNumbers[32] = {
      0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020, 0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020,
      0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0, 0xc0f0, 0xc0d0, 0xc0b0, 0xc090, 0xc060, 0xc020,
      0xbfc0, 0xbf00, 0x3f00, 0x3fc0, 0x4020, 0x4060, 0x4090, 0x40b0, 0x40d0, 0x40f0};
};

// 8 bits: of pair p in a lane, the first input at byte 2p and the second at byte 2p + 1. 512 bytes a group.
struct Codes8 {
  static constexpr int pairs = 2;
  static constexpr bool has_middle = false;
  static constexpr float unit = 0x1p-24f;  // codes are read where they lie highest in a lane

  static inline void split(u32x16 lanes, u32x16 (&column)[pairs]) {
    column[0] = (high(lanes << 24) >> 16) | high(lanes << 16);
    column[1] = (high(lanes << 8) >> 16) | high(lanes);
  }

  // The code in the top byte of each lane, times 2^24, as a float whose lower half is 0.
  static inline u32x16 high(u32x16 lanes) {
    return (u32x16)__builtin_convertvector((i32x16)(lanes & 0xff000000u), f32x16);
  }
};

// A weight [outputs, inputs], inputs a multiple of 32, as panels of 16 outputs; those past `outputs` are zero.
// codes [ceil(outputs / 16), groups, loads, 64 bytes]; scales [ceil(outputs / 16), groups, 1 or 2, 16], the
// second line of 16 being the middles of 4-bit codes.
template <class Codes>
struct QuantisedPanels {
  static constexpr int64_t loads = kGroupPairs / Codes::pairs;
  static constexpr int64_t lines = Codes::has_middle ? 2 : 1;

  const uint32_t* codes;
  const bf16* scales;
  int64_t outputs;
  int64_t inputs;

  int64_t groups() const { return inputs / kGroup; }
  int64_t count() const { return (outputs + kLanes - 1) / kLanes; }
  const uint32_t* panel(int64_t index) const { return codes + index * groups() * loads * kLanes; }
  const bf16* scales_of(int64_t index) const { return scales + index * groups() * lines * kLanes; }
};

// M tokens from `token` on against one panel: out[m * step] gets token m's 16 sums.
// sums [tokens, groups]: of each token's inputs, group by group.
template <int M, class Codes>
void quantised_tile(const QuantisedPanels<Codes>& w, const bf16* x, const float* sums, int64_t token, int64_t panel,
                    f32x16* out, int64_t step) {
  using W = QuantisedPanels<Codes>;
  const uint32_t* codes = w.panel(panel);
  const bf16* scales = w.scales_of(panel);
  const int64_t groups = w.groups();
  x += token * w.inputs;
  sums += token * groups;
  f32x16 total[M] = {};
  for (int64_t g = 0; g < groups; ++g) {
    f32x16 sum[M] = {};
    for (int64_t l = 0; l < W::loads; ++l, codes += kLanes, x += 2 * Codes::pairs) {
      u32x16 column[Codes::pairs];
      Codes::split(load<u32x16>(codes), column);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
        for (int p = 0; p < Codes::pairs; ++p) {
          uint32_t pair;
          std::memcpy(&pair, x + m * w.inputs + 2 * p, 4);
          sum[m] = dot(sum[m], column[p], fill(pair), bf16{});
        }
      }
    }
    const f32x16 scale = load_floats(scales);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) total[m] += scale * sum[m];
    if constexpr (Codes::has_middle) {
      const f32x16 middle = load_floats(scales + kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) total[m] += middle * sums[m * groups + g];
    }
    scales += W::lines * kLanes;
  }
#pragma GCC unroll 16
  for (int m = 0; m < M; ++m) out[m * step] = total[m] * Codes::unit;
}

// Most tokens that codes are taken apart for on the way: two sums of each stay in registers, beside the codes.
#if defined(__AVX512F__)
constexpr int kQuantisedRows = 12;
#else
constexpr int kQuantisedRows = 2;
#endif

// All tokens against N panels; for `finish` see `multiply` in linear.h.
template <int N, class Codes, class Finish>
void quantised_panels(const QuantisedPanels<Codes>& w, const bf16* x, const float* sums, int64_t tokens,
                      int64_t first, const Finish& finish) {
  constexpr auto tiles_of = []<int... Less>(std::integer_sequence<int, Less...>) {
    return std::array{&quantised_tile<Less + 1, Codes>...};
  };
  static constexpr auto tile_of_rows = tiles_of(std::make_integer_sequence<int, kQuantisedRows>());
  const int64_t tiles = (tokens + kQuantisedRows - 1) / kQuantisedRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t token = tokens * t / tiles, rows = tokens * (t + 1) / tiles - token;
    f32x16 out[kQuantisedRows][N];
    for (int n = 0; n < N; ++n) tile_of_rows[rows - 1](w, x, sums, token, first + n, &out[0][n], N);
    for (int64_t m = 0; m < rows; ++m) finish(token + m, first, out[m], std::integral_constant<int, N>());
  }
}

// One group of N panels as pairs of bfloat16: out [N, 16 pairs, 16]. That of the next N is brought nearer, as
// long as it takes until it is wanted.
template <int N, class Codes>
inline void expand(const QuantisedPanels<Codes>& w, int64_t first, int64_t group, uint32_t* out) {
  constexpr int64_t loads = QuantisedPanels<Codes>::loads;
  for (int n = 0; n < N; ++n) {
    const uint32_t* codes = w.panel(first + n) + group * loads * kLanes;
    const uint32_t* ahead = codes + w.groups() * loads * kLanes * N;
    __builtin_prefetch(w.scales_of(first + n + N) + group * QuantisedPanels<Codes>::lines * kLanes, 0, 2);
    for (int64_t l = 0; l < loads; ++l, codes += kLanes, ahead += kLanes) {
      __builtin_prefetch(ahead, 0, 2);
      u32x16 column[Codes::pairs];
      Codes::split(load<u32x16>(codes), column);
#pragma GCC unroll 4
      for (int p = 0; p < Codes::pairs; ++p, out += kLanes) store(out, column[p]);
    }
  }
}

// M tokens against one expanded group of N panels: total[m] += scale * sums + middle * inputs' sum.
template <int M, int N, class Codes>
void group_tile(const QuantisedPanels<Codes>& w, const bf16* x, const float* sums, int64_t first, int64_t group,
                const uint32_t* expanded, f32x16 (*total)[N]) {
  f32x16 acc[M][N] = {};
  tile<M, N, bf16>(x + group * kGroup, w.inputs, expanded, kGroupPairs * kLanes, kLanes, kGroupPairs, acc);
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    const bf16* scales = w.scales_of(first + n) + group * QuantisedPanels<Codes>::lines * kLanes;
    const f32x16 scale = load_floats(scales);
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) total[m][n] += scale * acc[m][n];
    if constexpr (Codes::has_middle) {
      const f32x16 middle = load_floats(scales + kLanes);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) total[m][n] += middle * sums[m * w.groups() + group];
    }
  }
}

constexpr int64_t kExpandedTokens = 64;  // whose totals, with one expanded group, stay in the first cache

// As `quantised_panels`, for many tokens: each group is taken apart once for all of them.
template <int N, class Codes, class Finish>
void expanded_panels(const QuantisedPanels<Codes>& w, const bf16* x, const float* sums, int64_t tokens,
                     int64_t first, const Finish& finish) {
  constexpr auto tiles_of = []<int... Less>(std::integer_sequence<int, Less...>) {
    return std::array{&group_tile<Less + 1, N, Codes>...};
  };
  static constexpr auto tile_of_rows = tiles_of(std::make_integer_sequence<int, kTileRows>());
  alignas(64) uint32_t expanded[N * kGroupPairs * kLanes];
  f32x16 total[kExpandedTokens][N];
  const int64_t blocks = (tokens + kExpandedTokens - 1) / kExpandedTokens;
  for (int64_t b = 0; b < blocks; ++b) {
    const int64_t begin = tokens * b / blocks, rows = tokens * (b + 1) / blocks - begin;
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows;
    for (int64_t m = 0; m < rows; ++m) {
      for (int n = 0; n < N; ++n) total[m][n] = f32x16{};
    }
    for (int64_t g = 0; g < w.groups(); ++g) {
      expand<N>(w, first, g, expanded);
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t row = rows * t / tiles, token = begin + row;
        tile_of_rows[rows * (t + 1) / tiles - row - 1](w, x + token * w.inputs, sums + token * w.groups(), first, g,
                                                       expanded, total + row);
      }
    }
    for (int64_t m = 0; m < rows; ++m) {
      for (int n = 0; n < N; ++n) total[m][n] *= Codes::unit;
      finish(begin + m, first, total[m], std::integral_constant<int, N>());
    }
  }
}

// Every token against every panel, as `multiply` of linear.h.
template <class Codes, class Finish>
void multiply(const QuantisedPanels<Codes>& w, const bf16* x, int64_t tokens, int threads, const Finish& finish) {
  std::vector<float> sums;
  if (Codes::has_middle) sums = group_sums(x, tokens * w.groups());
  const int64_t count = w.count(), chunk = panels_a_chunk(count, threads);
  Threads::shared().run(threads, (count + chunk - 1) / chunk, [&](int64_t index) {
    const int64_t end = std::min(count, (index + 1) * chunk);
    int64_t panel = index * chunk;
    if (tokens > kQuantisedRows) {
      for (; panel + kTilePanels <= end; panel += kTilePanels) {
        expanded_panels<kTilePanels>(w, x, sums.data(), tokens, panel, finish);
      }
    }
    for (; panel + 2 <= end; panel += 2) quantised_panels<2>(w, x, sums.data(), tokens, panel, finish);
    if (panel < end) quantised_panels<1>(w, x, sums.data(), tokens, panel, finish);
  });
}

}  // namespace headroom
