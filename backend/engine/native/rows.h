#pragma once
// Attention of many rows over one context: of the new tokens of a prompt, or of requests that share a beginning.
//
// K and V are packed as weights are and multiplied as they are: scores = q Kᵀ, answer = p V, with the softmax computed on
// the fly over pieces of the context. The query heads of one KV head are rows of one matrix.

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

constexpr int64_t MAX_HEAD_SIZE = 256;
constexpr int64_t TOGETHER = 2 * ROWS;  // rows worked on together
constexpr int64_t PIECE = 256;          // tokens of context that are scored before the softmax is updated
static_assert(PIECE % PANEL == 0);

inline bool is_pool(const at::Tensor& x) { return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16; }

// What is multiplied: bfloat16 as pairs where the CPU can, else widened. EACH: numbers a word.
template <class T>
constexpr int64_t EACH = PAIRS && std::is_same_v<T, bf16> ? 2 : 1;
template <class T>
using Word = std::conditional_t<EACH<T> == 2, pair, float>;

inline float number(float x) { return x; }
inline float number(bf16 x) { return widened(x); }

// Tokens whose K and V stand in `slots` of the pool.
template <class T>
struct Context {
  const T *k, *v;        // [slots, kv_heads, size]
  const int64_t* slots;  // [tokens]
  int64_t tokens, kv_heads, size;

  int64_t panels() const { return (tokens + PANEL - 1) / PANEL; }
  int64_t key_words() const { return size / EACH<T>; }
  int64_t value_words() const { return panels() * PANEL / EACH<T>; }
  int64_t value_panels() const { return (size + PANEL - 1) / PANEL; }
  int64_t keys_a_head() const { return panels() * PANEL * key_words(); }
  int64_t values_a_head() const { return value_panels() * value_words() * PANEL; }
};

// The same, packed: for each KV head keys [panels, key_words, PANEL] and values [value_panels, value_words, PANEL]. Beyond
// the last token and the last number of a head there are zeros.
template <class T>
struct Packed {
  Context<T> context;
  at::Tensor room;
  Word<T>*keys, *values;

  explicit Packed(const Context<T>& c)
      : context(c), room(at::empty({c.kv_heads * (c.keys_a_head() + c.values_a_head())}, at::kFloat)),
        keys((Word<T>*)room.mutable_data_ptr<float>()), values(keys + c.kv_heads * c.keys_a_head()) {
    at::parallel_for(0, c.kv_heads * c.panels(), 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) pack(i / c.panels(), i % c.panels());
    });
  }

  void pack(int64_t kv_head, int64_t panel) const {
    static constexpr T nothing[MAX_HEAD_SIZE] = {};
    const Context<T>& c = context;
    const T *k[PANEL], *v[PANEL];
    for (int64_t n = 0; n < PANEL; ++n) {
      const int64_t token = panel * PANEL + n;
      const int64_t row = token < c.tokens ? (c.slots[token] * c.kv_heads + kv_head) * c.size : 0;
      k[n] = token < c.tokens ? c.k + row : nothing, v[n] = token < c.tokens ? c.v + row : nothing;
    }
    Word<T>* to = keys + kv_head * c.keys_a_head() + panel * PANEL * c.key_words();
    for (int64_t i = 0; i < c.key_words(); ++i)
      for (int64_t n = 0; n < PANEL; ++n)
        if constexpr (EACH<T> == 2) std::memcpy(&to[i * PANEL + n], k[n] + 2 * i, sizeof(pair));
        else to[i * PANEL + n] = number(k[n][i]);
    for (int64_t p = 0; p < c.value_panels(); ++p) {
      const int64_t columns = std::min(PANEL, c.size - p * PANEL);
      to = values + kv_head * c.values_a_head() + (p * c.value_words() + panel * PANEL / EACH<T>) * PANEL;
      for (int64_t n = 0; n < PANEL; n += EACH<T>, to += PANEL) {
        for (int64_t d = 0; d < columns; ++d)
          if constexpr (EACH<T> == 2) to[d] = {v[n][p * PANEL + d], v[n + 1][p * PANEL + d]};
          else to[d] = number(v[n][p * PANEL + d]);
        if (columns < PANEL) std::memset((void*)(to + columns), 0, (PANEL - columns) * sizeof *to);
      }
    }
  }
};

// Scores of which the first n count, of `used` -> their weights up to a factor, the others 0. `out` [size] and `sum`, of
// what came before, shrink when a larger score than `largest` is met; nothing came before a largest of -infinity.
inline void soften(float* s, int64_t n, int64_t used, int64_t size, float* out, float& largest, float& sum) {
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
  if (largest != -INFINITY && shrink != 1.f)
    for (int64_t d = 0; d < size; ++d) out[d] *= shrink;
  sum = sum * shrink + added;
  largest = top;
}

// Rows [begin, end) of one KV head. `asking` tells what row j asks and sees, the first sees(j) tokens, never fewer than
// the row before; and is told the sum of values, not yet divided, the largest score and the divisor.
template <class T, class Asking>
void attend_rows(const Packed<T>& packed, const Asking& asking, int64_t kv_head, int64_t begin, int64_t end, float scale) {
  using W = Word<T>;
  const Context<T>& c = packed.context;
  const int64_t size = c.size, count = end - begin, words = c.key_words(), seen = asking.sees(end - 1);
  const W *keys = packed.keys + kv_head * c.keys_a_head(), *values = packed.values + kv_head * c.values_a_head();
  alignas(64) float x[TOGETHER * MAX_HEAD_SIZE], out[TOGETHER * MAX_HEAD_SIZE], s[TOGETHER * PIECE];
  alignas(64) float p[EACH<T> == 2 ? TOGETHER * PIECE / 2 : 1];  // the weights, rounded
  float largest[TOGETHER], sum[TOGETHER];
  for (int64_t r = 0; r < count; ++r) {
    const float* from = asking.query(kv_head, begin + r);
    float* to = EACH<T> == 2 ? out : x + r * size;
    for (int64_t d = 0; d < size; ++d) to[d] = from[d] * scale;
    if constexpr (EACH<T> == 2) round_pairs(to, size, x + r * words);
    largest[r] = -INFINITY, sum[r] = 0.f;
  }
  for (int64_t from = 0; from < seen; from += PIECE) {
    const int64_t panels = (std::min(PIECE, seen - from) + PANEL - 1) / PANEL, used = panels * PANEL;
    for (int64_t i = 0; i < panels; ++i) {
      const W* panel = keys + (from + i * PANEL) * words;
      all_rows(count, x, Block<W>{panel, nullptr, words, words, PANEL, PIECE, true, panel + words * PANEL}, s + i * PANEL);
    }
    for (int64_t r = 0; r < count; ++r) {
      const int64_t n = std::clamp<int64_t>(asking.sees(begin + r) - from, 0, used);
      soften(s + r * PIECE, n, used, size, out + r * size, largest[r], sum[r]);
      if constexpr (EACH<T> == 2) round_pairs(s + r * PIECE, used, p + r * PIECE / 2);
    }
    for (int64_t i = 0; i < c.value_panels(); ++i) {
      const W* panel = values + (i * c.value_words() + from / EACH<T>) * PANEL;
      const int64_t length = used / EACH<T>;
      all_rows(count, EACH<T> == 2 ? p : s,
               Block<W>{panel, nullptr, length, PIECE / EACH<T>, std::min(PANEL, size - i * PANEL), size, from == 0,
                        panel + length * PANEL},
               out + i * PANEL);
    }
  }
  for (int64_t r = 0; r < count; ++r) asking.say(kv_head, begin + r, out + r * size, largest[r], sum[r]);
}

// All rows of all KV heads. Threads take turns: what comes later may see more.
template <class T, class Asking>
void attend_all_rows(const Packed<T>& packed, const Asking& asking, int64_t rows, float scale) {
  const int64_t shares = (rows + TOGETHER - 1) / TOGETHER, threads = at::get_num_threads();
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread)
      for (int64_t i = thread; i < packed.context.kv_heads * shares; i += threads) {
        const int64_t first = i % shares * TOGETHER;
        attend_rows(packed, asking, i / shares, first, std::min(rows, first + TOGETHER), scale);
      }
  });
}

}  // namespace
