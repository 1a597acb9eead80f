// Operators for the CPU: linear layers with packed weights, alone and with what stands around them (norm, gated MLP,
// projections for attention), whole layers, and attention over the paged pool, read in place. Inputs and sums are float32;
// weights and pool are float32 or bfloat16, half the bytes, widened in registers or multiplied in pairs where the CPU can.
// Registered as torch.ops.kvscope.*, which needs no Python at compile time.

#include "attention.h"
#include "linear.h"
#include "spans.h"
#include "vectors.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <optional>
#include <tuple>

namespace {

// ---- what stands around linear layers ---------------------------------------------------------------------------------

constexpr int64_t ROWS_A_THREAD = 16, GATES_A_THREAD = 4096;  // fewer are not worth waking one

// x [..., D], weight [D] -> x / sqrt(mean(x^2) + eps) * weight
at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  at::Tensor input = float_rows(x, "rms_norm"), output = at::empty_like(input);
  const int64_t D = input.size(-1);
  TORCH_CHECK(weight.dim() == 1 && weight.size(0) == D && weight.scalar_type() == at::kFloat && weight.is_contiguous() &&
                  D % 8 == 0, "rms_norm: weight must be float32 [", D, "], a multiple of 8");
  const float *from = input.const_data_ptr<float>(), *w = weight.const_data_ptr<float>();
  float* to = output.mutable_data_ptr<float>();
  at::parallel_for(0, input.numel() / D, ROWS_A_THREAD, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const float* row = from + m * D;
      v8 squares = splat(0.f);
      for (int64_t d = 0; d < D; d += 8) squares += load8(row + d) * load8(row + d);
      const v8 factor = splat(1.f / std::sqrt(sum8(squares) / D + (float)eps));
      for (int64_t d = 0; d < D; d += 8) store8(to + m * D + d, load8(w + d) * (load8(row + d) * factor));
    }
  });
  return output;
}

// down(silu(gate(x)) * up(x)). gate_up: both packed as one, gate first; inner: outputs of each.
at::Tensor gated_mlp(const at::Tensor& x, const at::Tensor& gate_up, const at::Tensor& down, int64_t inner) {
  at::Tensor input = float_rows(x, "gated_mlp"), output = at::empty_like(input);
  const int64_t D = input.size(-1), M = input.numel() / D;
  TORCH_CHECK(inner % 8 == 0, "gated_mlp: ", inner, " is no multiple of 8");
  const Weights first(gate_up, std::nullopt, D, 2 * inner, "gated_mlp"), second(down, std::nullopt, inner, D, "gated_mlp");
  at::Tensor both = at::empty({M, 2 * inner}, input.options()), product = at::empty({M, inner}, input.options());
  first.multiply(input.const_data_ptr<float>(), M, both.mutable_data_ptr<float>());
  const float* from = both.const_data_ptr<float>();
  float* to = product.mutable_data_ptr<float>();
  at::parallel_for(0, M, std::max<int64_t>(1, GATES_A_THREAD / inner), [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      int64_t j = 0;
      const auto gated = [&]<class V>(V gate) {
        store<V>(to + m * inner + j, gate / (all<V>(1.f) + exponential(-gate)) * load<V>(from + (2 * m + 1) * inner + j));
        j += sizeof(V) / sizeof(float);
      };
      while (j + LANES <= inner) gated(load<wide>(from + m * 2 * inner + j));
      while (j < inner) gated(load<v8>(from + m * 2 * inner + j));
    }
  });
  second.multiply(to, M, output.mutable_data_ptr<float>());
  return output;
}

// Rotary embedding of one head in place, its first half against its second.
inline void rotate(float* head, int64_t size, const float* cos, const float* sin) {
  const int64_t half = size / 2;
  for (int64_t d = 0; d < half; d += 8) {
    const v8 a = load8(head + d), b = load8(head + half + d);
    store8(head + d, a * load8(cos + d) - b * load8(sin + d));
    store8(head + half + d, b * load8(cos + half + d) + a * load8(sin + half + d));
  }
}

// One token's K or V into its slot of the pool. What is rounded there is rounded in the row as well: attention sees the
// same numbers, whether it reads the pool or not.
inline void keep(float* row, int64_t count, void* pool, int64_t slot, bool half) {
  if (!half) {
    std::memcpy((float*)pool + slot * count, row, sizeof(float) * count);
    return;
  }
  bf16* to = (bf16*)pool + slot * count;
  round_pairs(row, count, (float*)to);
  for (int64_t i = 0; i < count; ++i) row[i] = widened(to[i]);
}

// x [T, K], packed: the projections to queries, keys and values as one. Queries and keys are rotated (cos, sin [T, size]);
// keys and values go to their slots of the pool (k, v [slots, kv_heads, size]) -> [T, heads + 2 kv_heads, size]
at::Tensor project(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias,
                   const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& slots, at::Tensor k, at::Tensor v) {
  at::Tensor input = float_rows(x, "project");
  const int64_t T = input.size(0), kv_heads = k.size(1), size = k.size(2);
  TORCH_CHECK(input.dim() == 2 && k.dim() == 3 && k.sizes() == v.sizes() && k.is_contiguous() && v.is_contiguous() &&
                  is_pool(k) && k.scalar_type() == v.scalar_type() && size % 16 == 0,
              "project: x must be [T, K], K and V float32 or bfloat16 [slots, kv_heads, size], size a multiple of 16");
  TORCH_CHECK(slots.dim() == 1 && slots.size(0) == T && slots.scalar_type() == at::kLong && slots.is_contiguous(),
              "project: slots must be int64 [T]");
  for (const at::Tensor* angle : {&cos, &sin})
    TORCH_CHECK(angle->dim() == 2 && angle->size(0) == T && angle->size(1) == size && angle->is_contiguous() &&
                    angle->scalar_type() == at::kFloat, "project: cos and sin must be float32 [T, ", size, "]");
  const int64_t heads = packed.size(0) * PANEL / size - 2 * kv_heads, width = (heads + 2 * kv_heads) * size;
  TORCH_CHECK(heads > 0, "project: no room for queries");
  const Weights weights(packed, bias, input.size(1), width, "project");
  at::Tensor output = at::empty({T, heads + 2 * kv_heads, size}, input.options());
  float* rows = output.mutable_data_ptr<float>();
  weights.multiply(input.const_data_ptr<float>(), T, rows);
  const bool half = k.scalar_type() == at::kBFloat16;
  void *keys = k.mutable_data_ptr(), *values = v.mutable_data_ptr();
  const float *c = cos.const_data_ptr<float>(), *s = sin.const_data_ptr<float>();
  const int64_t *slot = slots.const_data_ptr<int64_t>(), pool = k.size(0), one = kv_heads * size;
  for (int64_t t = 0; t < T; ++t) TORCH_CHECK(slot[t] >= 0 && slot[t] < pool, "project: slot ", slot[t], " is not in the pool");
  at::parallel_for(0, T, ROWS_A_THREAD, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* row = rows + t * width;
      for (int64_t h = 0; h < heads + kv_heads; ++h) rotate(row + h * size, size, c + t * size, s + t * size);
      keep(row + heads * size, one, keys, slot[t], half);
      keep(row + (heads + kv_heads) * size, one, values, slot[t], half);
    }
  });
  return output;
}

// ---- a whole layer ----------------------------------------------------------------------------------------------------

// One decoder layer of a step in which every request has one new token, x [1, T, D]: norm, attention and its output
// projection, norm, gated MLP, each half added to what came in. Nothing new is computed here; a step of a small model
// just spends a fifth of its time between operations otherwise. -> (x [1, T, D], seconds that attention took)
std::tuple<at::Tensor, double> decoder_layer(
    const at::Tensor& x, const at::Tensor& norm, double eps, const at::Tensor& qkv,
    const std::optional<at::Tensor>& qkv_bias, const at::Tensor& out, const std::optional<at::Tensor>& out_bias,
    const at::Tensor& mlp_norm, double mlp_eps, const at::Tensor& gate_up, const at::Tensor& down, int64_t inner,
    const at::Tensor& cos, const at::Tensor& sin, const at::Tensor& slots, at::Tensor k, at::Tensor v,
    const at::Tensor& tables, const at::Tensor& lengths, int64_t block_size, double scale) {
  TORCH_CHECK(x.dim() == 3 && x.size(0) == 1 && cos.dim() == 3 && sin.dim() == 3, "decoder_layer: x must be [1, T, D]");
  const at::Tensor rows = project(rms_norm(x, norm, eps)[0], qkv, qkv_bias, cos[0].contiguous(), sin[0].contiguous(),
                                  slots, k, v);
  const auto start = std::chrono::steady_clock::now();
  const at::Tensor seen = paged_decode(rows.narrow(1, 0, rows.size(1) - 2 * k.size(1)), k, v, tables, lengths,
                                       block_size, scale);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  at::Tensor sum = linear(seen.reshape({1, x.size(1), -1}), out, out_bias, x.size(2));
  sum.add_(x);
  at::Tensor result = gated_mlp(rms_norm(sum, mlp_norm, mlp_eps), gate_up, down, inner);
  result.add_(sum);
  return {result, took.count()};
}

}  // namespace

TORCH_LIBRARY(kvscope, m) {
  m.def("multiplies_bfloat16() -> bool", [] { return PAIRS; });
  m.def("pack(Tensor weight, bool half=False) -> Tensor");
  m.def("linear(Tensor x, Tensor packed, Tensor? bias, int outputs) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("gated_mlp(Tensor x, Tensor gate_up, Tensor down, int inner) -> Tensor");
  m.def("project(Tensor x, Tensor packed, Tensor? bias, Tensor cos, Tensor sin, Tensor slots, Tensor(a!) k, "
        "Tensor(b!) v) -> Tensor");
  m.def("decoder_layer(Tensor x, Tensor norm, float eps, Tensor qkv, Tensor? qkv_bias, Tensor out, Tensor? out_bias, "
        "Tensor mlp_norm, float mlp_eps, Tensor gate_up, Tensor down, int inner, Tensor cos, Tensor sin, Tensor slots, "
        "Tensor(a!) k, Tensor(b!) v, Tensor tables, Tensor lengths, int block_size, float scale) -> (Tensor, float)");
  m.def("paged_decode(Tensor q, Tensor k, Tensor v, Tensor tables, Tensor lengths, int block_size, float scale) -> Tensor");
  m.def("span_attention(Tensor q, Tensor k, Tensor v, Tensor slots, float scale) -> Tensor");
}

TORCH_LIBRARY_IMPL(kvscope, CPU, m) {
  m.impl("pack", &pack);
  m.impl("linear", &linear);
  m.impl("rms_norm", &rms_norm);
  m.impl("gated_mlp", &gated_mlp);
  m.impl("project", &project);
  m.impl("decoder_layer", &decoder_layer);
  m.impl("paged_decode", &paged_decode);
  m.impl("span_attention", &span_attention);
}
