// A decoder's layers over one step: the residual stream goes in and comes out, without a return to Python
// between. Each phase is shared out among the threads; the next begins when all of it is done.
#pragma once

#include <vector>

#include "attention.h"
#include "linear.h"

namespace headroom {

constexpr int64_t kMostHeadDim = 256;

// RMSNorm of one vector of `width` numbers (arXiv 1910.07467), in fp32.
template <class In, class Out>
inline void rms_norm(const In* x, const float* weight, int64_t width, float eps, Out* out) {
  const int64_t whole = width / kLanes * kLanes;
  f32x16 squares = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const f32x16 v = load_floats(x + i);
    squares += v * v;
  }
  float sum = total(squares);
  for (int64_t i = whole; i < width; ++i) sum += float_of(x[i]) * float_of(x[i]);
  const float scale = 1.0f / std::sqrt(sum / float(width) + eps);
  for (int64_t i = 0; i < whole; i += kLanes) {
    store_floats(out + i, load_floats(x + i) * scale * load_floats(weight + i));
  }
  for (int64_t i = whole; i < width; ++i) put_float(out + i, float_of(x[i]) * scale * weight[i]);
}

// What is the same in all layers.
struct Shape {
  int64_t hidden, heads, kv_heads, head_dim, inner;
  float eps;
};

// One layer's weights; norms in fp32, those of heads null where the checkpoint has none.
template <class T>
struct Layer {
  const float* input_norm;
  Projection<T> qkv;  // outputs q | k | v
  const float* q_norm;
  const float* k_norm;
  Projection<T> o;
  const float* post_norm;
  Projection<T> gate_up;
  Projection<T> down;
  int64_t window;  // keys that a query sees, 0 = all
};

// One step of `tokens` tokens over all layers.
template <class T>
class Forward {
 public:
  // cos and the signed sin [tokens, head_dim] turn each token by its position; `rows` say where its K and V go.
  Forward(const Shape& shape, const Rows& rows, int64_t tokens, const float* cos, const float* sin)
      : shape_(shape), rows_(rows), tokens_(tokens), cos_(cos), sin_(sin),
        width_((shape.heads + 2 * shape.kv_heads) * shape.head_dim),
        normed_(tokens * shape.hidden), qkv_(tokens * width_), attended_(tokens * shape.heads * shape.head_dim),
        gated_(tokens * shape.inner), sequence_(tokens) {
    for (int64_t s = 0; s < rows.sequences; ++s) {
      for (int64_t t = rows.query_start[s]; t < rows.query_start[s + 1]; ++t) sequence_[t] = int32_t(s);
    }
  }

  // q, k and v of x [tokens, hidden]; k and v go to the layer's arena.
  void write(const Layer<T>& layer, T* k, T* v, const float* x) {
    norm(layer.input_norm, x, tokens_);
    linear(layer.qkv, normed_.data(), tokens_, rows_.threads, qkv_.data());
    in_chunks(tokens_, 4, [&](int64_t token) { place(layer, token, k, v); });
  }

  // What the tokens attend to, which `project` adds to x.
  void attend_to(const Layer<T>& layer, const Plan& plan, const T* k, const T* v) {
    attend(rows_, plan, qkv_.data(), width_, k, v, layer.window, attended_.data());
  }

  // x [tokens, hidden] += W_O of what attention gave.
  void project(const Layer<T>& layer, float* x) {
    add_linear(layer.o, attended_.data(), tokens_, rows_.threads, x);
  }

  // x [tokens, hidden] += what the gated MLP adds (SwiGLU, arXiv 2002.05202).
  void mlp(const Layer<T>& layer, float* x) {
    norm(layer.post_norm, x, tokens_);
    gated_linear(layer.gate_up, shape_.inner, normed_.data(), tokens_, rows_.threads, gated_.data());
    add_linear(layer.down, gated_.data(), tokens_, rows_.threads, x);
  }

  // The last norm: out [tokens, hidden].
  void finish(const float* weight, const float* x, T* out) {
    norm(weight, x, tokens_);
    std::copy_n(normed_.data(), tokens_ * shape_.hidden, out);
  }

  // From here on only these tokens count: nothing after the last attention mixes tokens.
  void keep(const int64_t* wanted, int64_t count, float* x) {
    const int64_t width = shape_.heads * shape_.head_dim;
    std::vector<T> attended(count * width);
    std::vector<float> stream(count * shape_.hidden);
    for (int64_t i = 0; i < count; ++i) {
      std::copy_n(attended_.data() + wanted[i] * width, width, attended.data() + i * width);
      std::copy_n(x + wanted[i] * shape_.hidden, shape_.hidden, stream.data() + i * shape_.hidden);
    }
    attended_ = std::move(attended);
    std::copy(stream.begin(), stream.end(), x);
    tokens_ = count;
  }

 private:
  template <class Work>
  void in_chunks(int64_t total, int64_t each, const Work& work) {
    Threads::shared().run(rows_.threads, (total + each - 1) / each, [&](int64_t chunk) {
      for (int64_t i = chunk * each; i < std::min(total, (chunk + 1) * each); ++i) work(i);
    });
  }

  void norm(const float* weight, const float* x, int64_t tokens) {
    const int64_t hidden = shape_.hidden;
    in_chunks(tokens, 8, [&](int64_t token) {
      rms_norm(x + token * hidden, weight, hidden, shape_.eps, normed_.data() + token * hidden);
    });
  }

  // A token's q is normed and turned where it is; its k, too, and goes to the cache with its v.
  void place(const Layer<T>& layer, int64_t token, T* k_arena, T* v_arena) {
    const int64_t dim = shape_.head_dim, s = sequence_[token];
    T* q = qkv_.data() + token * width_;
    T* k = q + shape_.heads * dim;
    T* v = k + shape_.kv_heads * dim;
    for (int64_t h = 0; h < shape_.heads; ++h) turn(q + h * dim, layer.q_norm, token);
    for (int64_t h = 0; h < shape_.kv_heads; ++h) turn(k + h * dim, layer.k_norm, token);
    const int64_t position = rows_.seq_len[s] - (rows_.query_start[s + 1] - token);
    const int64_t block = position / rows_.block_size, offset = position % rows_.block_size;
    const int64_t first = rows_.row_start[s], heads = rows_.row_start[s + 1] - first;
    const int64_t times = heads / shape_.kv_heads;  // mha of a GQA checkpoint repeats its heads
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t id = rows_.tables[rows_.row_slot[first + h] * rows_.table_width + block];
      const int64_t at = id * rows_.block_size * dim;
      put(k_arena + at, v_arena + at, rows_.block_size, dim, offset, k + h / times * dim, v + h / times * dim);
    }
  }

  // One head's norm, if it has one, and RoPE: x * cos + swap(x) * sin, where swap exchanges the halves.
  void turn(T* head, const float* weight, int64_t token) {
    const int64_t dim = shape_.head_dim;
    float twice[2 * kMostHeadDim];  // the head two times, so that swapped halves are contiguous
    if (weight != nullptr) {
      rms_norm(head, weight, dim, shape_.eps, head);  // rounded, as every norm is
    }
    for (int64_t i = 0; i < dim; i += kLanes) {
      const f32x16 part = load_floats(head + i);
      store_floats(twice + i, part);
      store_floats(twice + dim + i, part);
    }
    const float* cos = cos_ + token * dim;
    const float* sin = sin_ + token * dim;
    for (int64_t i = 0; i < dim; i += kLanes) {
      const f32x16 swapped = load_floats(twice + dim / 2 + i);
      store_floats(head + i, load_floats(twice + i) * load_floats(cos + i) + swapped * load_floats(sin + i));
    }
  }

  Shape shape_;
  const Rows& rows_;
  int64_t tokens_;
  const float* cos_;
  const float* sin_;
  int64_t width_;  // of a token's q | k | v
  std::vector<T> normed_, qkv_, attended_, gated_;
  std::vector<int32_t> sequence_;  // of each token
};

}  // namespace headroom
