#pragma once
// Attention of several new tokens of one request, a span, over its K and V in the paged pool, its own included.
//
// K and V are packed as weights are and multiplied as they are: scores = q Kᵀ, answer = p V, with the softmax computed on
// the fly over pieces of the context. The query heads of one KV head are rows of one matrix, token after token. A panel
// of tokens that are all later than the rows worked on is not computed.

#include "attention.h"
#include "linear.h"
#include "vectors.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

namespace {

constexpr int64_t SPAN_ROWS = 2 * ROWS;  // queries worked on together
constexpr int64_t PIECE = 256;           // tokens of context that are scored before the softmax is updated
static_assert(PIECE % PANEL == 0);

// What is multiplied: bfloat16 as pairs where the CPU can, else widened. EACH: numbers a word.
template <class T>
constexpr int64_t EACH = PAIRS && std::is_same_v<T, bf16> ? 2 : 1;
template <class T>
using Word = std::conditional_t<EACH<T> == 2, pair, float>;

inline float number(float x) { return x; }
inline float number(bf16 x) { return widened(x); }

template <class T>
struct Span {
  const T *k, *v;        // [slots, kv_heads, size]
  const int64_t* slots;  // [tokens]
  int64_t tokens, context, heads, kv_heads, size;
  const float* q;  // rows of `size`, so many floats apart:
  int64_t a_token, a_head;
  float scale;

  int64_t padded() const { return (tokens + PANEL - 1) / PANEL * PANEL; }
  int64_t group() const { return heads / kv_heads; }
  int64_t key_words() const { return size / EACH<T>; }
  int64_t value_words() const { return padded() / EACH<T>; }
  int64_t value_panels() const { return (size + PANEL - 1) / PANEL; }
  int64_t keys_a_head() const { return padded() * key_words(); }
  int64_t values_a_head() const { return value_panels() * value_words() * PANEL; }
};

// A panel of tokens of one KV head: keys [padded / PANEL, key_words, PANEL], values [value_panels, value_words, PANEL].
// Beyond the last token and the last number of a head there are zeros.
template <class T>
void pack_tokens(const Span<T>& span, int64_t kv_head, int64_t panel, Word<T>* keys, Word<T>* values) {
  static constexpr T nothing[MAX_HEAD_SIZE] = {};
  const T *k[PANEL], *v[PANEL];
  for (int64_t n = 0; n < PANEL; ++n) {
    const int64_t token = panel * PANEL + n;
    const int64_t row = token < span.tokens ? (span.slots[token] * span.kv_heads + kv_head) * span.size : 0;
    k[n] = token < span.tokens ? span.k + row : nothing, v[n] = token < span.tokens ? span.v + row : nothing;
  }
  Word<T>* to = keys + panel * PANEL * span.key_words();
  for (int64_t i = 0; i < span.key_words(); ++i)
    for (int64_t n = 0; n < PANEL; ++n)
      if constexpr (EACH<T> == 2) std::memcpy(&to[i * PANEL + n], k[n] + 2 * i, sizeof(pair));
      else to[i * PANEL + n] = number(k[n][i]);
  for (int64_t p = 0; p < span.value_panels(); ++p) {
    const int64_t columns = std::min(PANEL, span.size - p * PANEL);
    to = values + (p * span.value_words() + panel * PANEL / EACH<T>) * PANEL;
    for (int64_t n = 0; n < PANEL; n += EACH<T>, to += PANEL) {
      for (int64_t d = 0; d < columns; ++d)
        if constexpr (EACH<T> == 2) to[d] = {v[n][p * PANEL + d], v[n + 1][p * PANEL + d]};
        else to[d] = number(v[n][p * PANEL + d]);
      if (columns < PANEL) std::memset((void*)(to + columns), 0, (PANEL - columns) * sizeof *to);
    }
  }
}

// Scores of which the first n count, of `used` -> their weights up to a factor, the others 0. `out` [size] and `sum`, of
// what came before, shrink when a larger score than `largest` is met.
inline void soften(float* s, int64_t n, int64_t used, bool first, int64_t size, float* out, float& largest, float& sum) {
  const int64_t last = (n + LANES - 1) / LANES * LANES;
  for (int64_t i = n; i < last; ++i) s[i] = -INFINITY;
  float top = largest, added = 0.f;
  if (n > 0) {
    wide most = load<wide>(s), total = all<wide>(0.f);
    for (int64_t i = LANES; i < last; i += LANES) most = larger(load<wide>(s + i), most);
    for (int i = 0; i < LANES; ++i) top = std::max(top, most[i]);
    for (int64_t i = 0; i < last; i += LANES) {
      const wide e = exponential(load<wide>(s + i) - all<wide>(top));
      store(s + i, e);
      total += e;
    }
    for (int i = 0; i < LANES; ++i) added += total[i];
  }
  std::fill(s + n, s + used, 0.f);
  const float shrink = std::exp(largest - top);
  if (!first && shrink != 1.f)
    for (int64_t d = 0; d < size; ++d) out[d] *= shrink;
  sum = sum * shrink + added;
  largest = top;
}

// Rows [begin, end) of one KV head, of which row j is query head j % group of new token j / group.
template <class T>
void attend_rows(const Span<T>& span, int64_t kv_head, int64_t begin, int64_t end, const Word<T>* keys,
                 const Word<T>* values, float* output) {
  using W = Word<T>;
  const int64_t group = span.group(), size = span.size, count = end - begin, words = span.key_words();
  alignas(64) float x[SPAN_ROWS * MAX_HEAD_SIZE], out[SPAN_ROWS * MAX_HEAD_SIZE], s[SPAN_ROWS * PIECE];
  alignas(64) float p[EACH<T> == 2 ? SPAN_ROWS * PIECE / 2 : 1];  // the weights, rounded
  float largest[SPAN_ROWS], sum[SPAN_ROWS];
  for (int64_t r = 0; r < count; ++r) {
    const int64_t token = (begin + r) / group, head = kv_head * group + (begin + r) % group;
    const float* from = span.q + token * span.a_token + head * span.a_head;
    float* to = EACH<T> == 2 ? out : x + r * size;
    for (int64_t d = 0; d < size; ++d) to[d] = from[d] * span.scale;
    if constexpr (EACH<T> == 2) round_pairs(to, size, x + r * words);
    largest[r] = -INFINITY, sum[r] = 0.f;
  }
  const int64_t seen = span.context + (end - 1) / group + 1;  // by the last row
  for (int64_t from = 0; from < seen; from += PIECE) {
    const int64_t panels = (std::min(PIECE, seen - from) + PANEL - 1) / PANEL, used = panels * PANEL;
    for (int64_t i = 0; i < panels; ++i) {
      const W* panel = keys + (from + i * PANEL) * words;
      all_rows(count, x, Block<W>{panel, nullptr, words, words, PANEL, PIECE, true, panel + words * PANEL}, s + i * PANEL);
    }
    for (int64_t r = 0; r < count; ++r) {
      const int64_t n = std::clamp<int64_t>(span.context + (begin + r) / group + 1 - from, 0, used);
      soften(s + r * PIECE, n, used, from == 0, size, out + r * size, largest[r], sum[r]);
      if constexpr (EACH<T> == 2) round_pairs(s + r * PIECE, used, p + r * PIECE / 2);
    }
    for (int64_t i = 0; i < span.value_panels(); ++i) {
      const W* panel = values + (i * span.value_words() + from / EACH<T>) * PANEL;
      const int64_t length = used / EACH<T>;
      all_rows(count, EACH<T> == 2 ? p : s,
               Block<W>{panel, nullptr, length, PIECE / EACH<T>, std::min(PANEL, size - i * PANEL), size, from == 0,
                        panel + length * PANEL},
               out + i * PANEL);
    }
  }
  for (int64_t r = 0; r < count; ++r) {
    const int64_t token = (begin + r) / group, head = kv_head * group + (begin + r) % group;
    for (int64_t d = 0; d < size; ++d) output[(token * span.heads + head) * size + d] = out[r * size + d] / sum[r];
  }
}

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
    const Span<T> span{key_pool, value_pool, slot, tokens, tokens - length, heads, kv_heads, size,
                       q.const_data_ptr<float>(), q.stride(0), q.stride(1), (float)scale};
    at::Tensor room = at::empty({kv_heads * (span.keys_a_head() + span.values_a_head())}, q.options());
    auto* keys = (Word<T>*)room.mutable_data_ptr<float>();
    Word<T>* values = keys + kv_heads * span.keys_a_head();
    const int64_t panels = span.padded() / PANEL;
    at::parallel_for(0, kv_heads * panels, 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        pack_tokens<T>(span, i / panels, i % panels, keys + i / panels * span.keys_a_head(),
                       values + i / panels * span.values_a_head());
    });
    // In turn: what comes later sees more.
    const int64_t rows = length * span.group(), shares = (rows + SPAN_ROWS - 1) / SPAN_ROWS, threads = at::get_num_threads();
    float* to = output.mutable_data_ptr<float>();
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
      for (int64_t thread = begin; thread < end; ++thread)
        for (int64_t i = thread; i < kv_heads * shares; i += threads) {
          const int64_t kv_head = i / shares, first = i % shares * SPAN_ROWS;
          attend_rows<T>(span, kv_head, first, std::min(rows, first + SPAN_ROWS), keys + kv_head * span.keys_a_head(),
                         values + kv_head * span.values_a_head(), to);
        }
    });
  };
  if (k.scalar_type() == at::kFloat) whole(k.const_data_ptr<float>(), v.const_data_ptr<float>());
  else whole((const bf16*)k.const_data_ptr(), (const bf16*)v.const_data_ptr());
  return output;
}

}  // namespace
