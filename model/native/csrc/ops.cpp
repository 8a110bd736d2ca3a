// What Python sees of the kernels: operators and two classes that hold weights. Shapes are checked here, once;
// the headers beside this file work on plain memory.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <map>
#include <optional>
#include <vector>

#ifndef HEADROOM_NAMESPACE
#define HEADROOM_NAMESPACE headroom
#endif
// Classes are known to PyTorch by their C++ names too, so those of another build must not be the same.
#define headroom HEADROOM_NAMESPACE

#include "layers.h"
#include "linear.h"
#include "memory.h"

namespace headroom {

using at::Tensor;
using std::optional;

template <class T>
T* data(const Tensor& tensor) {
  return static_cast<T*>(tensor.data_ptr());
}

template <class T>
const T* data(const optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

void require(bool holds, const char* what) { TORCH_CHECK(holds, "headroom: ", what); }

bool is_plain(const Tensor& tensor) { return tensor.device().is_cpu() && tensor.is_contiguous(); }

// Calls work with a T that stands for the tensor's dtype: bfloat16 or float32.
template <class Work>
auto by_dtype(at::ScalarType dtype, const Work& work) {
  if (dtype == at::kBFloat16) return work(bf16{});
  require(dtype == at::kFloat, "only bfloat16 and float32 have kernels");
  return work(float{});
}

// How many threads the kernels use: those lent to the caller's thread, or as many as PyTorch would.
thread_local int64_t lent = 0;
void lend_threads(int64_t count) { lent = count; }
int threads() { return lent > 0 ? int(lent) : at::get_num_threads(); }

// A weight in panels (linear.h), with its bias in fp32, padded as the panels are. With scales, the panels are
// int32 lanes of codes (quantised.h), and it takes bfloat16 inputs.
struct Weight : torch::CustomClassHolder {
  Weight(Tensor panels, optional<Tensor> bias, int64_t outputs, int64_t inputs, optional<Tensor> scales)
      : panels(std::move(panels)), bias(std::move(bias)), outputs(outputs), inputs(inputs), scales(std::move(scales)) {
    const int64_t padded = (outputs + kLanes - 1) / kLanes * kLanes;
    if (this->scales.has_value()) {
      check_codes(padded);
    } else {
      require(is_plain(this->panels) && this->panels.numel() == padded * inputs, "panels of the wrong size");
      require(inputs * this->panels.itemsize() % 4 == 0, "inputs must be a multiple of a lane's");
    }
    if (this->bias.has_value()) {
      require(is_plain(*this->bias) && this->bias->scalar_type() == at::kFloat && this->bias->numel() == padded,
              "a bias must be padded float32");
    }
  }

  void check_codes(int64_t padded) const {
    require(is_plain(panels) && panels.scalar_type() == at::kInt && is_plain(*scales) &&
                scales->scalar_type() == at::kBFloat16 && inputs % kGroup == 0,
            "codes must be int32 lanes with bfloat16 scales, in whole groups");
    const int64_t groups = padded * (inputs / kGroup);
    require(panels.numel() == groups * (four_bits() ? 4 : 8), "codes of the wrong size");
    require(scales->numel() == groups * (four_bits() ? 2 : 1), "scales of the wrong size");
  }

  bool four_bits() const { return scales->numel() == padded_groups() * 2; }
  int64_t padded_groups() const { return (outputs + kLanes - 1) / kLanes * kLanes * (inputs / kGroup); }

  template <class T>
  Projection<T> view() const {
    const uint32_t* lanes = data<const uint32_t>(panels);
    if constexpr (std::is_same_v<T, bf16>) {
      const bf16* factors = data<bf16>(scales);
      if (factors != nullptr && four_bits()) {
        return {QuantisedPanels<Codes4>{lanes, factors, outputs, inputs}, data<float>(bias)};
      }
      if (factors != nullptr) return {QuantisedPanels<Codes8>{lanes, factors, outputs, inputs}, data<float>(bias)};
    }
    return {Panels<T>{lanes, outputs, inputs}, data<float>(bias)};
  }

  at::ScalarType dtype() const { return scales.has_value() ? at::kBFloat16 : panels.scalar_type(); }

  Tensor panels;
  optional<Tensor> bias;
  int64_t outputs, inputs;
  optional<Tensor> scales;
};

// A step's metadata, read where it lies (all of it on the CPU).
Rows rows_of(const Tensor& row_tables, const Tensor& row_slot, const Tensor& row_start, const Tensor& query_start,
             const Tensor& seq_len, int64_t block_size, int64_t heads, int64_t head_dim) {
  for (const Tensor* narrow : {&row_tables, &row_start, &query_start, &seq_len}) {
    require(is_plain(*narrow) && narrow->scalar_type() == at::kInt, "tables and lengths must be int32 on the CPU");
  }
  require(is_plain(row_slot) && row_slot.scalar_type() == at::kLong, "row_slot must be int64 on the CPU");
  require(row_start.numel() == seq_len.numel() + 1 && query_start.numel() == row_start.numel(), "ranges of sequences");
  return {data<const int32_t>(row_tables), row_tables.size(1), data<const int64_t>(row_slot),
          data<const int32_t>(row_start), data<const int32_t>(query_start), data<const int32_t>(seq_len),
          seq_len.numel(), block_size, heads, head_dim, threads()};
}

using WeightPtr = c10::intrusive_ptr<Weight>;

void check_input(const Tensor& x, const WeightPtr& weight) {
  require(is_plain(x) && x.dim() == 2 && x.size(1) == weight->inputs, "x must be [tokens, inputs]");
  require(x.scalar_type() == weight->dtype(), "x must have the weight's dtype");
}

// weight [N, K] -> panels [ceil(N / 16), K / P, 16, P] (linear.h).
Tensor to_panels_op(const Tensor& weight) {
  require(is_plain(weight) && weight.dim() == 2 && weight.itemsize() <= 4, "weight must be a matrix on the CPU");
  const int64_t outputs = weight.size(0), pair = 4 / weight.itemsize(), steps = weight.size(1) / pair;
  require(weight.size(1) % pair == 0, "inputs must be a multiple of a lane's");
  const int64_t panels = (outputs + kLanes - 1) / kLanes;
  Tensor out = at::empty({panels, steps, kLanes, pair}, weight.options());
  const auto* from = data<const uint32_t>(weight);
  auto* to = data<uint32_t>(out);
  Threads::shared().run(threads(), panels, [&](int64_t panel) {
    uint32_t* lanes = to + panel * steps * kLanes;
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      const int64_t row = panel * kLanes + lane;
      for (int64_t k = 0; k < steps; ++k) lanes[k * kLanes + lane] = row < outputs ? from[row * steps + k] : 0;
    }
  });
  return out;
}

// A copy of a packed weight where it stays (memory.h).
Tensor settle_op(const Tensor& packed) {
  require(is_plain(packed), "what settles must be contiguous and on the CPU");
  std::shared_ptr<char> memory = WeightMemory::shared().take(packed.nbytes());
  std::memcpy(memory.get(), packed.const_data_ptr(), packed.nbytes());
  char* start = memory.get();
  return at::from_blob(start, packed.sizes(), [memory = std::move(memory)](void*) {}, packed.options());
}

// x [M, inputs] -> [M, outputs] in x's dtype, or in fp32 if `wide`.
Tensor linear_op(const Tensor& x, const WeightPtr& weight, bool wide) {
  check_input(x, weight);
  Tensor out = at::empty({x.size(0), weight->outputs}, wide ? x.options().dtype(at::kFloat) : x.options());
  by_dtype(x.scalar_type(), [&]<class T>(T) {
    by_dtype(out.scalar_type(), [&]<class Out>(Out) {
      linear(weight->view<T>(), data<const T>(x), x.size(0), threads(), data<Out>(out));
    });
  });
  return out;
}

// x [M, inputs] -> silu(gate x) * (up x), [M, inner].
Tensor gated_linear_op(const Tensor& x, const WeightPtr& weight, int64_t inner) {
  check_input(x, weight);
  require(weight->outputs == (inner + kLanes - 1) / kLanes * kLanes * 2, "gate and up must be whole panels");
  Tensor out = at::empty({x.size(0), inner}, x.options());
  by_dtype(x.scalar_type(), [&]<class T>(T) {
    gated_linear(weight->view<T>(), inner, data<const T>(x), x.size(0), threads(), data<T>(out));
  });
  return out;
}

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
    held.push_back({std::move(input_norm), std::move(qkv), std::move(q_norm), std::move(k_norm), std::move(o),
                    std::move(post_norm), std::move(gate_up), std::move(down), window});
  }

  // x [T, hidden] fp32, used up -> the normed last state of the wanted tokens, [N, hidden].
  Tensor run(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor& row_tables, const Tensor& row_slot,
             const Tensor& row_start, const Tensor& query_start, const Tensor& seq_len, int64_t block_size,
             const std::vector<Tensor>& k, const std::vector<Tensor>& v, const Tensor& wanted) {
    require(k.size() == held.size() && v.size() == held.size() && !held.empty(), "one K and V for each layer");
    require(is_plain(x) && x.scalar_type() == at::kFloat && x.dim() == 2 && x.size(1) == shape.hidden, "x");
    const int64_t tokens = x.size(0);
    require(is_plain(cos) && is_plain(sin) && cos.numel() == tokens * shape.head_dim && sin.sizes() == cos.sizes(),
            "cos and sin must be [tokens, head_dim]");
    const Rows rows = rows_of(row_tables, row_slot, row_start, query_start, seq_len, block_size, shape.heads,
                              shape.head_dim);
    Tensor out = at::empty({wanted.numel(), shape.hidden}, x.options().dtype(k[0].scalar_type()));
    by_dtype(k[0].scalar_type(), [&]<class T>(T) { forward<T>(rows, x, cos, sin, k, v, wanted, out); });
    return out;
  }

 private:
  template <class T>
  void forward(const Rows& rows, const Tensor& x, const Tensor& cos, const Tensor& sin, const std::vector<Tensor>& k,
               const std::vector<Tensor>& v, const Tensor& wanted, const Tensor& out) {
    float* stream = data<float>(x);
    Forward<T> step(shape, rows, x.size(0), data<const float>(cos), data<const float>(sin));
    std::map<int64_t, Plan> plans;  // by window
    for (size_t i = 0; i < held.size(); ++i) {
      const Layer<T> layer = view<T>(held[i]);
      const auto plan = plans.try_emplace(layer.window, rows, layer.window).first;
      step.attention(layer, plan->second, data<T>(k[i]), data<T>(v[i]), stream);
      if (i + 1 == held.size()) step.keep(data<const int64_t>(wanted), wanted.numel(), stream);
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

// A layer's arena [N, B, D], whose bytes lie as blocks.h says.
void check_arena(const Tensor& k_arena, const Tensor& v_arena) {
  require(is_plain(k_arena) && is_plain(v_arena) && k_arena.dim() == 3 && v_arena.sizes() == k_arena.sizes() &&
              v_arena.scalar_type() == k_arena.scalar_type(),
          "the cache must be [blocks, block size, head_dim], K and V alike");
  require(k_arena.size(1) % kLanes == 0 && k_arena.size(2) % kLanes == 0,
          "block size and head_dim must be multiples of 16");
}

// k, v [N, D] must be vectors for that arena.
void check_vectors(const Tensor& k, const Tensor& v, const Tensor& arena) {
  for (const Tensor* each : {&k, &v}) {
    require(is_plain(*each) && each->dim() == 2 && each->size(1) == arena.size(2) && each->size(0) == k.size(0) &&
                each->scalar_type() == arena.scalar_type(),
            "k and v must be [vectors, head_dim] in the cache's dtype");
  }
}

// Writes k, v [N, D] into slots [N] (block id * B + offset).
void write_op(const Tensor& k, const Tensor& v, const Tensor& k_arena, const Tensor& v_arena, const Tensor& slots) {
  check_arena(k_arena, v_arena);
  check_vectors(k, v, k_arena);
  require(is_plain(slots) && slots.scalar_type() == at::kLong && slots.numel() == k.size(0), "a slot for each vector");
  by_dtype(k.scalar_type(), [&]<class T>(T) {
    write(data<const T>(k), data<const T>(v), data<const int64_t>(slots), slots.numel(), k_arena.size(1),
          k_arena.size(2), data<T>(k_arena), data<T>(v_arena));
  });
}

// Writes the step's k, v [N, D] and attends: q [T, Hq, D] -> [T, Hq, D]. window: 0 for none.
Tensor attend_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& k_arena, const Tensor& v_arena,
                 const Tensor& row_tables, const Tensor& row_slot, const Tensor& row_start, const Tensor& query_start,
                 const Tensor& seq_len, int64_t window) {
  check_arena(k_arena, v_arena);
  check_vectors(k, v, k_arena);
  require(q.dim() == 3 && q.size(2) == k_arena.size(2) && q.scalar_type() == k_arena.scalar_type(),
          "q must be [tokens, heads, head_dim] in the cache's dtype");
  require(q.stride(2) == 1 && q.stride(1) == q.size(2), "the heads of a token's q must be contiguous");
  const Rows rows = rows_of(row_tables, row_slot, row_start, query_start, seq_len, k_arena.size(1), q.size(1),
                            q.size(2));
  int64_t vectors = 0;
  for (int64_t s = 0; s < rows.sequences; ++s) vectors += rows.tokens(s) * rows.kv_heads(s);
  require(vectors == k.size(0) && rows.query_start[rows.sequences] == q.size(0), "q, k and v must be the step's");
  Tensor out = at::empty(q.sizes(), q.options());
  by_dtype(q.scalar_type(), [&]<class T>(T) {
    write_step(rows, data<const T>(k), data<const T>(v), data<T>(k_arena), data<T>(v_arena));
    attend(rows, plan_of(rows, window), data<const T>(q), q.stride(0), data<const T>(k_arena),
           data<const T>(v_arena), window, data<T>(out));
  });
  return out;
}

}  // namespace headroom

#undef headroom
namespace kernels = HEADROOM_NAMESPACE;

TORCH_LIBRARY(HEADROOM_NAMESPACE, m) {
  using kernels::Layers;
  using kernels::Weight;
  using std::optional;
  m.class_<Weight>("Weight").def(torch::init<at::Tensor, optional<at::Tensor>, int64_t, int64_t, optional<at::Tensor>>(), "",
                                 {torch::arg("panels"), torch::arg("bias"), torch::arg("outputs"),
                                  torch::arg("inputs"), torch::arg("scales") = torch::arg::none()});
  m.class_<Layers>("Layers")
      .def(torch::init<int64_t, int64_t, int64_t, int64_t, int64_t, double, at::Tensor>())
      .def("add", &Layers::add)
      .def("run", &Layers::run);
  m.def("lend_threads", &kernels::lend_threads);
  m.def("to_panels", &kernels::to_panels_op);
  m.def("settle", &kernels::settle_op);
  m.def("linear", &kernels::linear_op);
  m.def("gated_linear", &kernels::gated_linear_op);
  m.def("write", &kernels::write_op);
  m.def("attend", &kernels::attend_op);
}
