// Tensors as the kernels want them: plain memory on the CPU, with its shape checked.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <optional>

#include "attention_plan.h"
#include "simd.h"

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

inline void require(bool holds, const char* what) { TORCH_CHECK(holds, "headroom: ", what); }

inline bool is_plain(const Tensor& tensor) { return tensor.device().is_cpu() && tensor.is_contiguous(); }

// Calls work with a T that stands for the tensor's dtype: bfloat16 or float32.
template <class Work>
auto by_dtype(at::ScalarType dtype, const Work& work) {
  if (dtype == at::kBFloat16) return work(bf16{});
  require(dtype == at::kFloat, "only bfloat16 and float32 have kernels");
  return work(float{});
}

// How many threads the kernels use: those lent to the caller's thread, or as many as PyTorch would.
inline thread_local int64_t lent = 0;
inline void lend_threads(int64_t count) { lent = count; }
inline int threads() { return lent > 0 ? int(lent) : at::get_num_threads(); }

// A layer's arena [N, B, D], whose bytes lie as blocks.h says.
inline void check_arena(const Tensor& k_arena, const Tensor& v_arena) {
  require(is_plain(k_arena) && is_plain(v_arena) && k_arena.dim() == 3 && v_arena.sizes() == k_arena.sizes() &&
              v_arena.scalar_type() == k_arena.scalar_type(),
          "the cache must be [blocks, block size, head_dim], K and V alike");
  require(k_arena.size(1) % kLanes == 0 && k_arena.size(2) % kLanes == 0,
          "block size and head_dim must be multiples of 16");
}

// A step's metadata, read where it lies (all of it on the CPU). Block ids are the cache's own: they are not looked at.
inline Rows rows_of(const Tensor& row_tables, const Tensor& row_slot, const Tensor& row_start,
                    const Tensor& query_start, const Tensor& seq_len, int64_t block_size, int64_t heads,
                    int64_t head_dim) {
  for (const Tensor* narrow : {&row_tables, &row_start, &query_start, &seq_len}) {
    require(is_plain(*narrow) && narrow->scalar_type() == at::kInt, "tables and lengths must be int32 on the CPU");
  }
  require(is_plain(row_slot) && row_slot.scalar_type() == at::kLong, "row_slot must be int64 on the CPU");
  require(row_tables.dim() == 2, "tables must be [rows, blocks]");
  require(row_start.numel() == seq_len.numel() + 1 && query_start.numel() == row_start.numel(), "ranges of sequences");
  const Rows rows{data<const int32_t>(row_tables), row_tables.size(1), data<const int64_t>(row_slot),
                  data<const int32_t>(row_start), data<const int32_t>(query_start), data<const int32_t>(seq_len),
                  seq_len.numel(), block_size, heads, head_dim, threads()};
  require(rows.row_start[0] == 0 && rows.query_start[0] == 0, "ranges must begin at 0");
  require(row_slot.numel() == rows.row_start[rows.sequences], "a slot for each row");
  for (int64_t s = 0; s < rows.sequences; ++s) {
    require(rows.kv_heads(s) > 0 && heads % rows.kv_heads(s) == 0, "KV heads must divide query heads");
    require(0 <= rows.tokens(s) && rows.tokens(s) <= rows.seq_len[s], "a sequence is as long as its query tokens");
    require((rows.seq_len[s] + block_size - 1) / block_size <= rows.table_width, "a sequence is longer than its table");
  }
  for (int64_t r = 0; r < row_slot.numel(); ++r) {
    require(0 <= rows.row_slot[r] && rows.row_slot[r] < row_tables.size(0), "slots must be rows of the tables");
  }
  return rows;
}

}  // namespace headroom
