#pragma once
// Attention of several new tokens of one request, a span, over its K and V in the paged pool, its own included. A panel of
// tokens that are all later than the rows worked on is not computed.

#include "rows.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

namespace {

// Row j is query head j % group of new token j / group, which sees what stands before it, and itself.
struct Causal {
  const float* q;  // rows of `size`, so many floats apart:
  int64_t a_token, a_head;
  int64_t context, group, heads, size;
  float* output;  // [T, heads, size]

  const float* query(int64_t kv_head, int64_t j) const {
    return q + j / group * a_token + (kv_head * group + j % group) * a_head;
  }
  int64_t sees(int64_t j) const { return context + j / group + 1; }
  void say(int64_t kv_head, int64_t j, const float* out, float, float sum) const {
    float* to = output + (j / group * heads + kv_head * group + j % group) * size;
    for (int64_t d = 0; d < size; ++d) to[d] = out[d] / sum;
  }
};

// q [T, heads, size]: new tokens of one request, the last T of those whose K and V stand in `slots` [tokens] of the pool,
// k and v [slots, kv_heads, size]. Each sees what stands before it, and itself. -> [T, heads, size]
at::Tensor span_attention(const at::Tensor& query, const at::Tensor& k, const at::Tensor& v, const at::Tensor& slots,
                          double scale) {
  TORCH_CHECK(query.dim() == 3 && query.scalar_type() == at::kFloat && k.dim() == 3 && k.sizes() == v.sizes() &&
                  k.scalar_type() == v.scalar_type() && is_pool(k) && k.is_contiguous() && v.is_contiguous() &&
                  k.size(2) == query.size(2),
              "span_attention: q must be float32, K and V alike in float32 or bfloat16, with heads of one size");
  TORCH_CHECK(slots.dim() == 1 && slots.scalar_type() == at::kLong && slots.is_contiguous() &&
                  slots.size(0) >= query.size(0), "span_attention: slots must be int64, one for each token");
  const at::Tensor q = query.stride(2) == 1 ? query : query.contiguous();
  const int64_t length = q.size(0), heads = q.size(1), size = q.size(2), kv_heads = k.size(1), tokens = slots.size(0);
  TORCH_CHECK(size % 16 == 0 && size <= MAX_HEAD_SIZE, "span_attention: head size ", size, " is no multiple of 16 up to 256");
  TORCH_CHECK(heads % kv_heads == 0, "span_attention: ", heads, " heads cannot share ", kv_heads, " KV heads");
  const int64_t* slot = slots.const_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t)
    TORCH_CHECK(slot[t] >= 0 && slot[t] < k.size(0), "span_attention: slot ", slot[t], " is not in the pool");
  at::Tensor output = at::empty({length, heads, size}, q.options());
  if (length == 0) return output;
  const auto whole = [&]<class T>(const T* key_pool, const T* value_pool) {
    const Causal asking{q.const_data_ptr<float>(), q.stride(0), q.stride(1), tokens - length, heads / kv_heads, heads, size,
                        output.mutable_data_ptr<float>()};
    attend_all_rows(Packed<T>({key_pool, value_pool, slot, tokens, kv_heads, size}), asking, length * asking.group, (float)scale);
  };
  if (k.scalar_type() == at::kFloat) whole(k.const_data_ptr<float>(), v.const_data_ptr<float>());
  else whole((const bf16*)k.const_data_ptr(), (const bf16*)v.const_data_ptr());
  return output;
}

}  // namespace
