// y = x W^T over packed weights, and what is done with each sum before it leaves the registers.
#pragma once

#include <algorithm>
#include <utility>
#include <variant>

#include "quantised.h"
#include "threads.h"
#include "tile.h"

namespace headroom {

// A weight [outputs, inputs] as panels [ceil(outputs / 16), inputs / P, 16, P]; rows past `outputs` are zero.
template <class T>
struct Panels {
  const uint32_t* lanes;
  int64_t outputs;
  int64_t inputs;

  int64_t count() const { return (outputs + kLanes - 1) / kLanes; }
  int64_t steps() const { return inputs / Pair<T>::width; }
  const uint32_t* panel(int64_t index) const { return lanes + index * steps() * kLanes; }
};

// A weight of any kind that inputs of dtype T can be multiplied with.
template <class T>
struct Kinds {
  using Any = std::variant<Panels<T>>;
};
template <>
struct Kinds<bf16> {
  using Any = std::variant<Panels<bf16>, QuantisedPanels<Codes4>, QuantisedPanels<Codes8>>;
};

// A projection: its weight and, if it has one, its bias in fp32, padded as the weight is.
template <class T>
struct Projection {
  typename Kinds<T>::Any weight;
  const float* bias;

  int64_t outputs() const {
    return std::visit([](const auto& w) { return w.outputs; }, weight);
  }
};

// M tokens against N panels from `first` on; finish(token, first, sums) gets N vectors of 16 sums for each.
template <int M, int N, bool Ahead, class T, class Finish>
inline void multiply_tile(const Panels<T>& w, const T* x, int64_t token, int64_t first, int64_t ahead,
                          const Finish& finish) {
  f32x16 acc[M][N] = {};
  tile<M, N, T, Ahead>(x + token * w.inputs, w.inputs, w.panel(first), w.steps() * kLanes, kLanes, w.steps(), acc,
                       w.panel(ahead));
  for (int m = 0; m < M; ++m) finish(token + m, first, acc[m], std::integral_constant<int, N>());
}

// Tokens [from, to) against N panels, in tiles of nearly equal height. While the first tiles use these panels,
// the next ones are on their way: one panel a tile.
template <int N, class T, class Finish>
void multiply_panels(const Panels<T>& w, const T* x, int64_t from, int64_t to, int64_t first, const Finish& finish) {
  const int64_t tokens = to - from, tiles = (tokens + kTileRows - 1) / kTileRows;
  for (int64_t t = 0; t < tiles; ++t) {
    const int64_t token = from + tokens * t / tiles, rows = from + tokens * (t + 1) / tiles - token;
    const int64_t ahead = first + N + t;
    const bool prefetch = tiles > 1 && t < N && ahead < w.count();
    auto run = [&]<int M>(std::integral_constant<int, M>) {
      if (prefetch) {
        multiply_tile<M, N, true>(w, x, token, first, ahead, finish);
      } else {
        multiply_tile<M, N, false>(w, x, token, first, first, finish);
      }
    };
    [&]<int... Less>(std::integer_sequence<int, Less...>) {
      ((rows == Less + 1 ? run(std::integral_constant<int, Less + 1>()) : void()), ...);
    }(std::make_integer_sequence<int, kTileRows>());
  }
}

// So many tokens are shared out as well as the panels: threads end together, and use the same panels at a time.
constexpr int64_t kManyTokens = 8 * kTileRows;

// Every token against every panel. finish(token, panel, sums, N) is called once for each token and group of N
// neighbouring panels, N even wherever two are left; by any of the threads.
template <class T, class Finish>
void multiply(const Panels<T>& w, const T* x, int64_t tokens, int threads, const Finish& finish) {
  const int64_t count = w.count(), chunk = panels_a_chunk(count, threads);
  const int64_t parts = tokens >= kManyTokens ? threads : 1;
  Threads::shared().run(threads, (count + chunk - 1) / chunk * parts, [&](int64_t index) {
    const int64_t from = tokens * (index % parts) / parts, to = tokens * (index % parts + 1) / parts;
    int64_t panel = index / parts * chunk;
    const int64_t end = std::min(count, panel + chunk);
    for (; panel + kTilePanels <= end; panel += kTilePanels) {
      multiply_panels<kTilePanels>(w, x, from, to, panel, finish);
    }
    if (kTilePanels > 2 && panel + 2 <= end) {
      multiply_panels<2>(w, x, from, to, panel, finish);
      panel += 2;
    }
    if (panel < end) multiply_panels<1>(w, x, from, to, panel, finish);
  });
}

// The same for whatever kind of weight it is.
template <class T, class Finish>
void multiply(const Projection<T>& p, const T* x, int64_t tokens, int threads, const Finish& finish) {
  std::visit([&](const auto& w) { multiply(w, x, tokens, threads, finish); }, p.weight);
}

// ---- ends of a product ----

// Calls one(panel, lanes, sum) for each panel of a group; `lanes` is 16 but for the last of a ragged weight.
template <int N, class One>
inline void each_panel(int64_t outputs, int64_t first, const f32x16 (&sums)[N], const One& one) {
  for (int n = 0; n < N; ++n) {
    one((first + n) * kLanes, std::min<int64_t>(kLanes, outputs - (first + n) * kLanes), sums[n]);
  }
}

template <class Out>
inline void store_some(Out* to, int64_t lanes, f32x16 values) {
  if (lanes == kLanes) return store_floats(to, values);
  Out whole[kLanes];
  store_floats(whole, values);
  std::memcpy(to, whole, lanes * sizeof(Out));
}

inline f32x16 load_some(const float* from, int64_t lanes) {
  if (lanes == kLanes) return load_floats(from);
  float whole[kLanes] = {};
  std::memcpy(whole, from, lanes * sizeof(float));
  return load_floats(whole);
}

inline f32x16 silu(f32x16 x) {
  const f32x16 e = exp_of_negative(x < 0.0f ? x : -x);
  return x * (x < 0.0f ? e : fill(1.0f)) / (e + 1.0f);
}

// out [tokens, outputs] = x W^T + bias
template <class T, class Out>
void linear(const Projection<T>& p, const T* x, int64_t tokens, int threads, Out* out) {
  const int64_t outputs = p.outputs();
  multiply(p, x, tokens, threads, [&](int64_t token, int64_t first, const auto& sums, auto) {
    each_panel(outputs, first, sums, [&](int64_t at, int64_t lanes, f32x16 sum) {
      if (p.bias != nullptr) sum += load_floats(p.bias + at);
      store_some(out + token * outputs + at, lanes, sum);
    });
  });
}

// onto [tokens, outputs] += x W^T + bias
template <class T>
void add_linear(const Projection<T>& p, const T* x, int64_t tokens, int threads, float* onto) {
  const int64_t outputs = p.outputs();
  multiply(p, x, tokens, threads, [&](int64_t token, int64_t first, const auto& sums, auto) {
    each_panel(outputs, first, sums, [&](int64_t at, int64_t lanes, f32x16 sum) {
      if (p.bias != nullptr) sum += load_floats(p.bias + at);
      float* to = onto + token * outputs + at;
      store_some(to, lanes, load_some(to, lanes) + sum);
    });
  });
}

// out [tokens, inner] = silu(gate x) * (up x). Panels of gate and up alternate, so that a tile has both; each
// of the two is padded to whole panels, so the weight has 32 outputs for every 16 of `inner`.
template <class T>
void gated_linear(const Projection<T>& p, int64_t inner, const T* x, int64_t tokens, int threads, T* out) {
  multiply(p, x, tokens, threads, [&]<int N>(int64_t token, int64_t first, const f32x16(&sums)[N],
                                             std::integral_constant<int, N>) {
    for (int n = 0; n + 1 < N; n += 2) {
      const int64_t panel = first + n, at = panel / 2 * kLanes;
      f32x16 gate = sums[n], up = sums[n + 1];
      if (p.bias != nullptr) {
        gate += load_floats(p.bias + panel * kLanes);
        up += load_floats(p.bias + (panel + 1) * kLanes);
      }
      store_some(out + token * inner + at, std::min<int64_t>(kLanes, inner - at), silu(gate) * up);
    }
  });
}

}  // namespace headroom
