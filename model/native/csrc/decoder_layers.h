// A decoder's layers as Python holds them.
#pragma once

#include <ATen/ops/empty.h>

#include <map>
#include <vector>

#include "layers.h"
#include "weight.h"

namespace headroom {

// All layers of a decoder (layers.h) and its last norm.
struct Layers : torch::CustomClassHolder {
  struct Held {
    Tensor input_norm;
    WeightPtr qkv;
    optional<Tensor> q_norm, k_norm;
    WeightPtr o;
    Tensor post_norm;
    WeightPtr gate_up, down;
    int64_t window;
  };

  Layers(int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t inner, double eps, Tensor norm)
      : shape{hidden, heads, kv_heads, head_dim, inner, float(eps)}, norm(std::move(norm)) {
    require(head_dim % kLanes == 0 && head_dim <= kMostHeadDim, "head_dim must be a multiple of 16, at most 256");
    check_norm(this->norm, hidden);
  }

  static void check_norm(const optional<Tensor>& weight, int64_t width) {
    if (!weight.has_value()) return;
    require(is_plain(*weight) && weight->scalar_type() == at::kFloat && weight->numel() == width,
            "a norm's weight must be float32 and as wide as what it norms");
  }

  void add(Tensor input_norm, WeightPtr qkv, optional<Tensor> q_norm, optional<Tensor> k_norm, WeightPtr o,
           Tensor post_norm, WeightPtr gate_up, WeightPtr down, int64_t window) {
    check_norm(input_norm, shape.hidden);
    check_norm(post_norm, shape.hidden);
    check_norm(q_norm, shape.head_dim);
    check_norm(k_norm, shape.head_dim);
    const int64_t attended = shape.heads * shape.head_dim;
    require(qkv->inputs == shape.hidden && qkv->outputs == attended + 2 * shape.kv_heads * shape.head_dim, "qkv");
    require(o->inputs == attended && o->outputs == shape.hidden, "o");
    require(gate_up->inputs == shape.hidden && gate_up->outputs == (shape.inner + 15) / 16 * 32, "gate_up");
    require(down->inputs == shape.inner && down->outputs == shape.hidden, "down");
    for (const WeightPtr& each : {qkv, o, gate_up, down}) {
      require(each->dtype() == (held.empty() ? qkv : held[0].qkv)->dtype(), "all weights must have one dtype");
    }
    held.push_back({std::move(input_norm), std::move(qkv), std::move(q_norm), std::move(k_norm), std::move(o),
                    std::move(post_norm), std::move(gate_up), std::move(down), window});
  }

  // x [T, hidden] fp32, used up -> the normed last state of the wanted tokens, [N, hidden].
  Tensor run(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& row_tables, const Tensor& row_slot,
             const Tensor& row_start, const Tensor& query_start, const Tensor& seq_len,
             const std::vector<Tensor>& k, const std::vector<Tensor>& v, const Tensor& wanted) {
    check_cache(k, v);
    require(is_plain(x) && x.scalar_type() == at::kFloat && x.dim() == 2 && x.size(1) == shape.hidden, "x");
    const int64_t tokens = x.size(0);
    for (const Tensor* each : {&cos, &sin}) {
      require(is_plain(*each) && each->scalar_type() == at::kFloat && each->numel() == tokens * shape.head_dim,
              "cos and sin must be float32 [tokens, head_dim]");
    }
    const Rows rows = rows_of(row_tables, row_slot, row_start, query_start, seq_len, k[0].size(1), shape.heads,
                              shape.head_dim);
    require(rows.query_start[rows.sequences] == tokens, "x must be the step's tokens");
    for (int64_t s = 0; s < rows.sequences; ++s) {
      require(rows.kv_heads(s) % shape.kv_heads == 0, "KV heads must be the checkpoint's, each as often as another");
    }
    check_wanted(wanted, tokens);
    Tensor out = at::empty({wanted.numel(), shape.hidden}, x.options().dtype(k[0].scalar_type()));
    by_dtype(k[0].scalar_type(), [&]<class T>(T) { forward<T>(rows, x, cos, sin, k, v, wanted, out); });
    return out;
  }

 private:
  void check_cache(const std::vector<Tensor>& k, const std::vector<Tensor>& v) const {
    require(!held.empty() && k.size() == held.size() && v.size() == held.size(), "one K and V for each layer");
    for (size_t i = 0; i < held.size(); ++i) {
      check_arena(k[i], v[i]);
      require(k[i].sizes() == k[0].sizes() && k[i].size(2) == shape.head_dim, "the cache must be alike in all layers");
      require(k[i].scalar_type() == held[0].qkv->dtype(), "the cache must have the weights' dtype");
    }
  }

  static void check_wanted(const Tensor& wanted, int64_t tokens) {
    require(is_plain(wanted) && wanted.scalar_type() == at::kLong && wanted.numel() <= tokens,
            "wanted must be int64, and no more than there are tokens");
    const auto* each = data<const int64_t>(wanted);
    for (int64_t i = 0; i < wanted.numel(); ++i) require(0 <= each[i] && each[i] < tokens, "wanted must be tokens");
  }

  template <class T>
  void forward(const Rows& rows, const Tensor& x, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& k,
               const std::vector<Tensor>& v, const Tensor& wanted, const Tensor& out) {
    float* stream = data<float>(x);
    Forward<T> step(shape, rows, x.size(0), data<const float>(cos), data<const float>(sin));
    std::map<int64_t, Plan> plans;  // by window
    for (size_t i = 0; i < held.size(); ++i) {
      const Layer<T> layer = view<T>(held[i]);
      const auto plan = plans.try_emplace(layer.window, rows, layer.window).first;
      const bool last = i + 1 == held.size();
      step.write(layer, data<T>(k[i]), data<T>(v[i]), stream);
      if (last && wanted.numel() == 0) return;  // the cache has what it is to keep
      step.attend_to(layer, plan->second, data<T>(k[i]), data<T>(v[i]));
      if (last) step.keep(data<const int64_t>(wanted), wanted.numel(), stream);
      step.project(layer, stream);
      step.mlp(layer, stream);
    }
    step.finish(data<const float>(norm), stream, data<T>(out));
  }

  template <class T>
  static Layer<T> view(const Held& h) {
    return {data<const float>(h.input_norm), h.qkv->view<T>(), data<float>(h.q_norm), data<float>(h.k_norm),
            h.o->view<T>(), data<const float>(h.post_norm), h.gate_up->view<T>(), h.down->view<T>(), h.window};
  }

  Shape shape;
  Tensor norm;
  std::vector<Held> held;
};

}  // namespace headroom
