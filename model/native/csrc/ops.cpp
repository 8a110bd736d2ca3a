// What Python sees of the kernels: operators and two classes that hold weights. Shapes are checked here, once;
// the headers beside this file work on plain memory.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#ifndef HEADROOM_NAMESPACE
#define HEADROOM_NAMESPACE headroom
#endif
// Classes are known to PyTorch by their C++ names too, so those of another build must not be the same.
#define headroom HEADROOM_NAMESPACE

#include "decoder_layers.h"
#include "draw.h"
#include "memory.h"
#include "score.h"

namespace headroom {

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
  if (packed.nbytes() > 0) std::memcpy(memory.get(), packed.const_data_ptr(), packed.nbytes());
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
    attend(rows, Plan(rows, window), data<const T>(q), q.stride(0), data<const T>(k_arena),
           data<const T>(v_arena), window, data<T>(out));
  });
  return out;
}

void check_logits(const Tensor& logits) {
  require(logits.device().is_cpu() && logits.dim() == 2 && logits.scalar_type() == at::kFloat && logits.stride(1) == 1,
          "logits must be [rows, vocabulary] in fp32 on the CPU");
  require(0 < logits.size(1) && logits.size(1) <= kMostTokens, "a vocabulary has one token at least, and ids of 31 bits");
}

// logits [S, V] fp32 -> ids [S] int64, -1 of a broken row. `rows` [D] race, by parameters [D, 1]; others are greedy.
Tensor draw_op(const Tensor& logits, const optional<Tensor>& rows, const Tensor& temperature, const Tensor& top_p,
               const Tensor& min_p, const Tensor& top_k, const Tensor& key) {
  check_logits(logits);
  const int64_t count = logits.size(0), vocab = logits.size(1), racing = rows.has_value() ? rows->numel() : 0;
  const auto column = [&]<class T>(const Tensor& tensor, at::ScalarType dtype, const T*& start) {
    require(is_plain(tensor) && tensor.scalar_type() == dtype && tensor.numel() == racing, "a parameter for each row");
    start = data<const T>(tensor);
  };
  require(!rows.has_value() || (is_plain(*rows) && rows->scalar_type() == at::kLong), "rows must be int64 on the CPU");
  Wishes wishes;
  column(temperature, at::kFloat, wishes.temperature);
  column(top_p, at::kDouble, wishes.top_p);
  column(min_p, at::kFloat, wishes.min_p);
  column(top_k, at::kLong, wishes.top_k);
  column(key, at::kLong, wishes.key);
  std::vector<int64_t> wish(count, kGreedy);
  for (int64_t d = 0; d < racing; ++d) {
    const int64_t row = data<const int64_t>(rows)[d];
    require(0 <= row && row < count, "rows must be rows of the logits");
    require(wishes.top_k[d] > 0, "top_k keeps one token at least");
    wish[row] = d;
  }
  Tensor ids = at::empty({count}, logits.options().dtype(at::kLong));
  Threads::shared().run(threads(), count, [&](int64_t row) {
    const float* start = data<const float>(logits) + row * logits.stride(0);
    data<int64_t>(ids)[row] = draw_or_flag(start, vocab, wishes, wish[row]);
  });
  return ids;
}

// logits [M, V] fp32, ids [M] -> log-probabilities [M] fp64 of the ids, and the likeliest: ids [M, best], fp64 [M, best].
std::tuple<Tensor, Tensor, Tensor> score_op(const Tensor& logits, const Tensor& ids, int64_t best) {
  check_logits(logits);
  const int64_t count = logits.size(0), vocab = logits.size(1);
  require(is_plain(ids) && ids.scalar_type() == at::kLong && ids.numel() == count, "an id for each row");
  require(0 <= best && best <= vocab, "no more of the likeliest than there are tokens");
  for (int64_t row = 0; row < count; ++row) {
    require(0 <= data<const int64_t>(ids)[row] && data<const int64_t>(ids)[row] < vocab, "ids must be tokens");
  }
  const auto doubles = logits.options().dtype(at::kDouble);
  const Tensor own = at::empty({count}, doubles), likeliest = at::empty({count, best}, doubles);
  const Tensor best_ids = at::empty({count, best}, ids.options());
  Threads::shared().run(threads(), count, [&](int64_t row) {
    score(data<const float>(logits) + row * logits.stride(0), vocab, data<const int64_t>(ids)[row],
          {data<double>(own) + row, best, data<int64_t>(best_ids) + row * best, data<double>(likeliest) + row * best});
  });
  return {own, best_ids, likeliest};
}

}  // namespace headroom

#undef headroom
namespace kernels = HEADROOM_NAMESPACE;

TORCH_LIBRARY(HEADROOM_NAMESPACE, m) {
  using kernels::Layers;
  using kernels::Weight;
  using std::optional;
  using torch::arg;
  m.class_<Weight>("Weight").def(
      torch::init<at::Tensor, optional<at::Tensor>, int64_t, int64_t, optional<at::Tensor>>(), "",
      {arg("panels"), arg("bias"), arg("outputs"), arg("inputs"), arg("scales") = arg::none()});
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
  m.def("draw", &kernels::draw_op);
  m.def("score", &kernels::score_op);
}
