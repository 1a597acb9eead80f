#pragma once
// W [N, K] is packed into panels [ceil(N / PANEL), K, PANEL], the last one filled with zeros: a panel is read from front
// to back, whatever the batch, and its columns, two registers wide, are summed in registers for several rows. K is cut
// into blocks: a block of a panel stays in the L1 cache for all rows, and sums of short sums round less than one long
// sum. While one block is multiplied, the next one is fetched.
//
// bfloat16 is packed in one of two ways. Where the CPU has no arithmetic for it, a column of a panel's first half and
// one of its second half are one 32-bit word, low and high, so that a shift and a mask widen them. Where it has
// (AVX512-BF16), two numbers of one column that follow on each other along K are one word [K / 2, PANEL, 2], and x is
// rounded to bfloat16 and packed in the same way: one instruction multiplies two pairs and adds them in float32. All else
// is then as with float32, of words instead of floats.

#include "vectors.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

namespace {

constexpr int64_t PANEL = 2 * LANES;
constexpr int64_t ROWS = LANES == 16 ? 12 : 6;  // x 2 registers: 24 of the 32 of AVX-512, 12 of the 16 of AVX2
constexpr int64_t BLOCK_BYTES = 16 * 1024, BLOCK = 256;  // of a panel and of K that are worked on together, at most
constexpr int64_t X_FLOATS = 64 * 1024;         // rows of x that are worked on together: they stay in the L2 cache
constexpr int64_t MULTIPLICATIONS = 64 * 1024;  // fewer than this are not worth waking a thread

template <class W>
inline void load_panel(const W* p, wide& low, wide& high) {
  if constexpr (std::is_same_v<W, pair>) load_two((const float*)p, low, high);
  else load_two(p, low, high);
}

// sum += x * w, all of words
template <class W>
inline void add_words(wide& sum, wide x, wide w) {
  if constexpr (std::is_same_v<W, pair>) add_pairs(sum, x, w);
  else add_product(sum, x, w);
}

// One block of a panel: what is multiplied, and where the sums go. Lengths along K are of words.
template <class W>
struct Block {
  const W* w;         // [K, PANEL]
  const float* bias;  // of the panel's first column, or null; only in a panel's first block
  int64_t K, ldx;     // K: of this block; ldx: floats from a row of x to the next
  int64_t columns;    // PANEL, or less in the last panel
  int64_t N;          // floats from a row of the output to the next
  bool first;         // else the sums are added to what is there
  const W* ahead;     // [K, PANEL]: what is read next, or a tile's share of it
  int64_t share = 0;  // of `ahead` that one tile fetches: bytes a row of the block
};

template <class W>
inline void finish(wide low, wide high, const Block<W>& b, float* out) {
  const float* add = b.first ? b.bias : out;
  if (b.columns == PANEL) {
    if (add) { low += load<wide>(add); high += load<wide>(add + LANES); }
    store(out, low);
    store(out + LANES, high);
    return;
  }
  float sums[PANEL];
  store(sums, low);
  store(sums + LANES, high);
  for (int64_t n = 0; n < b.columns; ++n) out[n] = sums[n] + (add ? add[n] : 0.f);
}

// Where a core is shared with a hyperthread next to it, every instruction counts: four k at a time, the next block is
// fetched once a line, and rows are found from one pointer for each three.
template <int M, class W>
NOINLINE void rows(const float* x, const Block<W>& b, float* out) {
  constexpr int ROW_BYTES = PANEL * sizeof(W), LINE = std::max(1, 64 / ROW_BYTES), POINTERS = (M + 2) / 3;
  wide low[M], high[M];
  UNROLL for (int m = 0; m < M; ++m) low[m] = high[m] = all<wide>(0.f);
  const W* w = b.w;
  const char* ahead = (const char*)b.ahead;
  const int64_t ldx = b.ldx, share = b.share;
  const float* from[POINTERS];
  UNROLL for (int i = 0; i < POINTERS; ++i) from[i] = x + 3 * i * ldx;
  const auto add = [&](int k) INLINE {
    if (k % LINE == 0)
      UNROLL for (int i = 0; i < ROW_BYTES * LINE; i += 64) __builtin_prefetch(ahead + k * share + i, 0, 2);
    wide w0, w1;
    load_panel(w + k * PANEL, w0, w1);
    UNROLL for (int m = 0; m < M; ++m) {
      const wide s = all<wide>((from[m / 3] + m % 3 * ldx)[k]);
      add_words<W>(low[m], s, w0);
      add_words<W>(high[m], s, w1);
    }
  };
  const auto forward = [&](int k) INLINE {
    w += k * PANEL, ahead += k * share;
    UNROLL for (int i = 0; i < POINTERS; ++i) {
      from[i] += k;
      asm("" : "+r"(from[i]));  // else the compiler makes a pointer of each row and k, and spills them
    }
  };
  int64_t left = b.K;
  for (; left >= 4; left -= 4) add(0), add(1), add(2), add(3), forward(4);
  for (; left > 0; --left) add(0), forward(1);
  UNROLL for (int m = 0; m < M; ++m) finish(low[m], high[m], b, out + m * b.N);
}

// One row alone is bound by memory and by the latency of an addition: four sums in flight, and reading ahead, past the
// caches (0): nothing of these weights is read again before the next step. 1 KB ahead was the best of 0 to 16 KB.
template <class W>
inline void one_row(const float* x, const Block<W>& b, float* out) {
  constexpr int64_t LINE = 64 / sizeof(W), FAR = 1024 / sizeof(W);
  wide low[4], high[4];
  UNROLL for (int i = 0; i < 4; ++i) low[i] = high[i] = all<wide>(0.f);
  int64_t k = 0;
  for (; k + 4 <= b.K; k += 4) {
    const W* w = b.w + k * PANEL;
    for (int64_t i = 0; i < 4 * PANEL; i += LINE) __builtin_prefetch(w + FAR + i, 0, 0);
    UNROLL for (int i = 0; i < 4; ++i) {
      wide w0, w1;
      load_panel(w + i * PANEL, w0, w1);
      const wide s = all<wide>(x[k + i]);
      if constexpr (std::is_same_v<W, pair>) add_words<W>(low[i], s, w0), add_words<W>(high[i], s, w1);
      else low[i] += s * w0, high[i] += s * w1;
    }
  }
  for (; k < b.K; ++k) {
    wide w0, w1;
    load_panel(b.w + k * PANEL, w0, w1);
    add_words<W>(low[0], all<wide>(x[k]), w0);
    add_words<W>(high[0], all<wide>(x[k]), w1);
  }
  finish((low[0] + low[1]) + (low[2] + low[3]), (high[0] + high[1]) + (high[2] + high[3]), b, out);
}

// Calls rows<M> for the M that is asked for, up to ROWS.
template <int M = ROWS, class W>
void some_rows(int64_t count, const float* x, const Block<W>& b, float* out) {
  if constexpr (M == 1) one_row(x, b, out);
  else if (count == M) rows<M>(x, b, out);
  else some_rows<M - 1>(count, x, b, out);
}

// All rows, in tiles of like height: 7 rows are 4 and 3, not 6 and 1.
template <class W>
void all_rows(int64_t count, const float* x, const Block<W>& block, float* out) {
  const int64_t tiles = (count + ROWS - 1) / ROWS;
  Block<W> b = block;
  b.share = PANEL * (int64_t)sizeof(W) / tiles;
  for (int64_t t = 0, m = 0; t < tiles; ++t) {
    const int64_t height = (count - m + tiles - t - 1) / (tiles - t);
    b.ahead = block.ahead + t * b.K * PANEL / tiles;
    some_rows(height, x + m * b.ldx, b, out + m * b.N);
    m += height;
  }
}

// Where the number at (n, k) of the panel p stands among packed ones.
template <class W>
inline int64_t place(int64_t p, int64_t k, int64_t n, int64_t K) {
  if constexpr (std::is_same_v<W, pair>) return ((p * ((K + 1) / 2) + k / 2) * PANEL + n) * 2 + k % 2;
  else if constexpr (std::is_same_v<W, bf16>) return (p * K + k) * PANEL + n % LANES * 2 + n / LANES;
  else return (p * K + k) * PANEL + n;
}

using Half = std::conditional_t<PAIRS, pair, bf16>;  // how bfloat16 is packed here

// [N, K] float32 -> [ceil(N / PANEL), K, PANEL] in float32, or `half`: rounded to bfloat16, as pairs
// [ceil(N / PANEL), ceil(K / 2), PANEL, 2] where the CPU multiplies these
at::Tensor pack(const at::Tensor& weight, bool half) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kFloat, "pack: a float32 matrix, not ", weight.toString());
  at::Tensor plain = weight.contiguous();
  const int64_t N = plain.size(0), K = plain.size(1), panels = (N + PANEL - 1) / PANEL;
  std::vector<int64_t> shape{panels, K, PANEL};
  if (half && PAIRS) shape = {panels, (K + 1) / 2, PANEL, 2};
  at::Tensor packed = at::zeros(shape, plain.options().dtype(half ? at::kBFloat16 : at::kFloat));
  const float* from = plain.const_data_ptr<float>();
  void* to = packed.mutable_data_ptr();
  at::parallel_for(0, panels, 8, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      for (int64_t n = 0; n < std::min(PANEL, N - p * PANEL); ++n)
        for (int64_t k = 0; k < K; ++k) {
          const float w = from[(p * PANEL + n) * K + k];
          if (half) ((bf16*)to)[place<Half>(p, k, n, K)] = rounded(w);
          else ((float*)to)[place<float>(p, k, n, K)] = w;
        }
  });
  return packed;
}

// Packed weights and bias of N outputs, checked against the K inputs that they are for.
struct Weights {
  const void* w;
  const float* bias;
  int64_t K, N;
  bool half;

  Weights(const at::Tensor& packed, const std::optional<at::Tensor>& b, int64_t K, int64_t N, const char* who)
      : w(nullptr), bias(nullptr), K(K), N(N), half(packed.scalar_type() == at::kBFloat16) {
    const bool pairs = half && PAIRS;
    TORCH_CHECK(packed.dim() == (pairs ? 4 : 3) && packed.size(2) == PANEL && packed.size(0) == (N + PANEL - 1) / PANEL &&
                    packed.size(1) == (pairs ? (K + 1) / 2 : K) && packed.is_contiguous() &&
                    (half || packed.scalar_type() == at::kFloat),
                who, ": weights packed as ", packed.sizes(), " do not fit ", K, " inputs and ", N, " outputs");
    w = packed.const_data_ptr();
    if (b.has_value() && b->defined()) {
      TORCH_CHECK(b->dim() == 1 && b->size(0) == N && b->is_contiguous() && b->scalar_type() == at::kFloat, who,
                  ": bias must be float32 [", N, "]");
      bias = b->const_data_ptr<float>();
    }
  }

  void multiply(const float* from, int64_t M, float* to) const {  // [M, K] -> [M, N]
    if (M * N == 0) return;
    half ? multiply(from, M, to, (const Half*)w) : multiply(from, M, to, (const float*)w);
  }

  template <class W>
  void multiply(const float* from, int64_t M, float* to, const W* w) const {
    constexpr bool pairs = std::is_same_v<W, pair>;
    constexpr int64_t LONGEST = std::min<int64_t>(BLOCK, BLOCK_BYTES / (PANEL * sizeof(W)));
    const int64_t words = pairs ? (K + 1) / 2 : K;  // of a row of x
    const int64_t panels = (N + PANEL - 1) / PANEL, blocks = std::max<int64_t>(1, (words + LONGEST - 1) / LONGEST);
    const int64_t together = std::max<int64_t>(ROWS, X_FLOATS / std::max<int64_t>(words, 1) / ROWS * ROWS);
    const int64_t grain = std::max<int64_t>(1, MULTIPLICATIONS / std::max<int64_t>(1, M * K * PANEL));
    at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
      thread_local std::vector<float> room;
      if (pairs && (int64_t)room.size() < std::min(M, together) * words) room.resize(std::min(M, together) * words);
      for (int64_t first = 0; first < M; first += together) {
        const int64_t count = std::min(together, M - first);
        const float* x = from + first * K;
        if constexpr (pairs) {  // each thread for itself: a hundredth of the work that follows, and nobody waits
          for (int64_t m = 0; m < count; ++m) round_pairs(x + m * K, K, room.data() + m * words);
          x = room.data();
        }
        for (int64_t p = begin; p < end; ++p)
          for (int64_t i = 0, k = 0; i < blocks; ++i) {
            const int64_t length = (words - k + blocks - i - 1) / (blocks - i);
            const W* block = w + (p * words + k) * PANEL;
            all_rows(count, x + k,
                     Block<W>{block, bias ? bias + p * PANEL : nullptr, length, words, std::min(PANEL, N - p * PANEL), N,
                              i == 0, block + length * PANEL},
                     to + first * N + p * PANEL);
            k += length;
          }
      }
    });
  }
};

at::Tensor float_rows(const at::Tensor& x, const char* who) {
  TORCH_CHECK(x.scalar_type() == at::kFloat && x.dim() >= 1, who, ": x must be float32, not ", x.toString());
  return x.contiguous();
}

at::Tensor like(const at::Tensor& x, int64_t last) {  // [..., K] -> room for [..., last]
  auto shape = x.sizes().vec();
  shape.back() = last;
  return at::empty(shape, x.options());
}

// x [..., K], packed, bias [N] or none -> [..., N]
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t N) {
  at::Tensor input = float_rows(x, "linear"), output = like(input, N);
  const Weights weights(packed, bias, input.size(-1), N, "linear");
  if (output.numel() > 0) weights.multiply(input.const_data_ptr<float>(), output.numel() / N, output.mutable_data_ptr<float>());
  return output;
}

}  // namespace
