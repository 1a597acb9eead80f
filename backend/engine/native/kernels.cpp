// Operators for the CPU that compute in float32: linear layers with packed weights, alone and with what stands around
// them (norm, gated MLP, projections for attention), and attention of single tokens over the paged pool, read in place.
// Weights and pool are float32 or bfloat16: half the bytes, widened in registers. Eight floats at a time through the
// compiler's vector extensions, so one source serves AVX2, AVX-512 and NEON. Registered as torch.ops.kvscope.*, which
// needs no Python at compile time.

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <optional>
#include <tuple>
#include <type_traits>
#include <vector>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

typedef float v8 __attribute__((vector_size(32)));
typedef float v8_unaligned __attribute__((vector_size(32), aligned(4), may_alias));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef int32_t v8i_unaligned __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t v8h_unaligned __attribute__((vector_size(16), aligned(2), may_alias));

struct bf16 { uint16_t bits; };  // the upper half of a float32

inline v8 load8(const float* p) { return *(const v8_unaligned*)p; }
inline v8 load8(const bf16* p) {
#ifdef __AVX2__  // two instructions; from the line below GCC makes six
  return (v8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
  return (v8)(__builtin_convertvector(*(const v8h_unaligned*)p, v8i) << 16);
#endif
}
inline void store8(float* p, v8 x) { *(v8_unaligned*)p = x; }
inline v8 splat(float x) { return v8{x, x, x, x, x, x, x, x}; }

inline bf16 rounded(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return {(uint16_t)((bits >> 16) | 0x40)};
  return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline float widened(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof wide);
  return wide;
}
inline float sum8(v8 a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, v8i{__VA_ARGS__})
#endif
#define UNROLL _Pragma("GCC unroll 8")
#define INLINE __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))

// The sums of four vectors, in order.
inline void sum4(v8 a, v8 b, v8 c, v8 d, float* out) {
  const v8 ab = SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
  const v8 cd = SHUFFLE(c, d, 0, 8, 1, 9, 4, 12, 5, 13) + SHUFFLE(c, d, 2, 10, 3, 11, 6, 14, 7, 15);
  const v8 halves = SHUFFLE(ab, cd, 0, 1, 8, 9, 4, 5, 12, 13) + SHUFFLE(ab, cd, 2, 3, 10, 11, 6, 7, 14, 15);
  const v8 sums = halves + SHUFFLE(halves, halves, 4, 5, 6, 7, 0, 1, 2, 3);
  std::memcpy(out, &sums, 4 * sizeof(float));
}

// e^x to about 2 units in the last place; below -87 it stays at e^-87, NaN stays NaN.
inline v8 exp8(v8 x) {
  v8 c = x < splat(-87.f) ? splat(-87.f) : x;
  c = c > splat(88.f) ? splat(88.f) : c;
  const v8 magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  v8 r = c * splat(1.44269504f) + magic;
  v8i exponent = (v8i)r << 23;
  v8 n = r - magic;
  v8 y = c - n * splat(0.693359375f) - n * splat(-2.12194440e-4f);  // ln 2 in two parts
  v8 p = splat(1.9875691500e-4f);
  p = p * y + splat(1.3981999507e-3f);
  p = p * y + splat(8.3334519073e-3f);
  p = p * y + splat(4.1665795894e-2f);
  p = p * y + splat(1.6666665459e-1f);
  p = p * y + splat(5.0000001201e-1f);
  p = p * y * y + y + splat(1.f);
  v8 e = (v8)((v8i)p + exponent);
  return x == x ? e : x;
}

// ---- linear layer -----------------------------------------------------------------------------------------------------
// W [N, K] is packed into panels [ceil(N / 16), K, 16], the last one filled with zeros: a panel is read from front to
// back, whatever the batch, and 16 columns of up to 6 rows are summed in registers. K is cut into blocks: a block of a
// panel stays in the L1 cache for all rows, and sums of short sums round less than one long sum. While one block is
// multiplied, the next one is fetched. In bfloat16, column c and column c + 8 of a panel are one 32-bit word, low and
// high, so that a shift and a mask widen them.

constexpr int64_t PANEL = 16;
constexpr int64_t ROWS = 6;                     // 6 rows x 16 columns: 12 of the 16 vector registers of AVX2
constexpr int64_t BLOCK = 256;                  // of K, at most
constexpr int64_t X_FLOATS = 64 * 1024;         // rows of x that are worked on together: they stay in the L2 cache
constexpr int64_t MULTIPLICATIONS = 64 * 1024;  // fewer than this are not worth waking a thread

inline void load16(const float* p, v8& low, v8& high) { low = load8(p), high = load8(p + 8); }
inline void load16(const bf16* p, v8& low, v8& high) {
  const v8i both = *(const v8i_unaligned*)p;
  low = (v8)(both << 16);
#ifdef __AVX2__  // the mask is read, not kept: with it, 6 rows would take one register more than there are
  alignas(32) static constexpr int32_t UPPER[8] = {-65536, -65536, -65536, -65536, -65536, -65536, -65536, -65536};
  asm("vpand %2, %1, %0" : "=x"(high) : "x"(both), "m"(UPPER));
#else
  high = (v8)(both & (int32_t)0xffff0000);
#endif
}

// sum += a * b. GCC puts half of these sums elsewhere and moves or spills them: an instruction in five of what is below.
inline void add_product(v8& sum, v8 a, v8 b) {
#if defined(__AVX2__) && defined(__FMA__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum += a * b;
#endif
}

// One block of a panel: what is multiplied, and where the sums go.
template <class W>
struct Block {
  const W* w;         // [K, 16]
  const float* bias;  // of the panel's first column, or null; only in a panel's first block
  int64_t K, ldx;     // K: of this block; ldx: floats from a row of x to the next
  int64_t columns;    // 16, or less in the last panel
  int64_t N;          // floats from a row of the output to the next
  bool first;         // else the sums are added to what is there
  const W* ahead;     // [K, 16]: a share of what is read next
  int64_t share;      // of `ahead` that one tile fetches: bytes a row of the block
};

template <class W>
inline void finish(v8 lo, v8 hi, const Block<W>& b, float* out) {
  const float* add = b.first ? b.bias : out;
  if (b.columns == PANEL) {
    if (add) { lo += load8(add); hi += load8(add + 8); }
    store8(out, lo);
    store8(out + 8, hi);
    return;
  }
  float sums[PANEL];
  store8(sums, lo);
  store8(sums + 8, hi);
  for (int64_t n = 0; n < b.columns; ++n) out[n] = sums[n] + (add ? add[n] : 0.f);
}

// Where a core is shared with a hyperthread next to it, every instruction counts: four k at a time, the next block is
// fetched once a line, and rows are found from two pointers.
template <int M, class W>
NOINLINE void rows(const float* x, const Block<W>& b, float* out) {
  constexpr int LINE = 64 / (PANEL * sizeof(W));  // k in a line of a panel
  v8 lo[M], hi[M];
  UNROLL for (int m = 0; m < M; ++m) lo[m] = hi[m] = splat(0.f);
  const W* w = b.w;
  const char* ahead = (const char*)b.ahead;
  const int64_t ldx = b.ldx, share = b.share;
  const float *upper = x, *lower = x + 3 * ldx;
  const auto add = [&](int k) INLINE {
    if (k % LINE == 0) __builtin_prefetch(ahead + k * share, 0, 2);
    v8 w0, w1;
    load16(w + k * PANEL, w0, w1);
    UNROLL for (int m = 0; m < M; ++m) {
      const v8 s = splat((m < 3 ? upper + m * ldx : lower + (m - 3) * ldx)[k]);
      add_product(lo[m], s, w0);
      add_product(hi[m], s, w1);
    }
  };
  const auto forward = [&](int k) INLINE {
    w += k * PANEL, upper += k, lower += k, ahead += k * share;
    asm("" : "+r"(upper), "+r"(lower));  // else the compiler makes a pointer of each row and k, and spills them
  };
  int64_t left = b.K;
  for (; left >= 4; left -= 4) add(0), add(1), add(2), add(3), forward(4);
  for (; left > 0; --left) add(0), forward(1);
  UNROLL for (int m = 0; m < M; ++m) finish(lo[m], hi[m], b, out + m * b.N);
}

// One row alone is bound by memory and by the latency of an addition: four sums in flight, and reading ahead, past the
// caches (0): nothing of these weights is read again before the next step. 1 KB ahead was the best of 0 to 16 KB.
template <class W>
inline void one_row(const float* x, const Block<W>& b, float* out) {
  constexpr int64_t LINE = 64 / sizeof(W), FAR = 1024 / sizeof(W);
  v8 lo[4], hi[4];
  UNROLL for (int i = 0; i < 4; ++i) lo[i] = hi[i] = splat(0.f);
  int64_t k = 0;
  for (; k + 4 <= b.K; k += 4) {
    const W* w = b.w + k * PANEL;
    for (int64_t i = 0; i < 4 * PANEL; i += LINE) __builtin_prefetch(w + FAR + i, 0, 0);
    UNROLL for (int i = 0; i < 4; ++i) {
      v8 w0, w1;
      load16(w + i * PANEL, w0, w1);
      lo[i] += splat(x[k + i]) * w0;
      hi[i] += splat(x[k + i]) * w1;
    }
  }
  for (; k < b.K; ++k) {
    v8 w0, w1;
    load16(b.w + k * PANEL, w0, w1);
    lo[0] += splat(x[k]) * w0;
    hi[0] += splat(x[k]) * w1;
  }
  finish((lo[0] + lo[1]) + (lo[2] + lo[3]), (hi[0] + hi[1]) + (hi[2] + hi[3]), b, out);
}

template <class W>
void some_rows(int64_t M, const float* x, const Block<W>& b, float* out) {
  switch (M) {
    case 6: return rows<6>(x, b, out);
    case 5: return rows<5>(x, b, out);
    case 4: return rows<4>(x, b, out);
    case 3: return rows<3>(x, b, out);
    case 2: return rows<2>(x, b, out);
    default: return one_row(x, b, out);
  }
}

// [N, K] float32 -> [ceil(N / 16), K, 16] in float32, or `half`: rounded to bfloat16
at::Tensor pack(const at::Tensor& weight, bool half) {
  TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == at::kFloat, "pack: a float32 matrix, not ", weight.toString());
  at::Tensor plain = weight.contiguous();
  const int64_t N = plain.size(0), K = plain.size(1), panels = (N + PANEL - 1) / PANEL;
  at::Tensor packed = at::zeros({panels, K, PANEL}, plain.options().dtype(half ? at::kBFloat16 : at::kFloat));
  const float* from = plain.const_data_ptr<float>();
  void* to = packed.mutable_data_ptr();
  at::parallel_for(0, panels, 8, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      for (int64_t n = 0; n < std::min(PANEL, N - p * PANEL); ++n)
        for (int64_t k = 0; k < K; ++k) {
          const float w = from[(p * PANEL + n) * K + k];
          const int64_t row = (p * K + k) * PANEL;
          if (half) ((bf16*)to)[row + n % 8 * 2 + n / 8] = rounded(w);
          else ((float*)to)[row + n] = w;
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
    TORCH_CHECK(packed.dim() == 3 && packed.size(2) == PANEL && packed.size(0) == (N + PANEL - 1) / PANEL &&
                    packed.size(1) == K && packed.is_contiguous() && (half || packed.scalar_type() == at::kFloat),
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
    half ? multiply(from, M, to, (const bf16*)w) : multiply(from, M, to, (const float*)w);
  }

  template <class W>
  void multiply(const float* from, int64_t M, float* to, const W* w) const {
    const int64_t panels = (N + PANEL - 1) / PANEL, blocks = std::max<int64_t>(1, (K + BLOCK - 1) / BLOCK);
    const int64_t together = std::max<int64_t>(ROWS, X_FLOATS / std::max<int64_t>(K, 1) / ROWS * ROWS);
    const int64_t grain = std::max<int64_t>(1, MULTIPLICATIONS / std::max<int64_t>(1, M * K * PANEL));
    at::parallel_for(0, panels, grain, [&](int64_t begin, int64_t end) {
      for (int64_t first = 0; first < M; first += together) {
        const int64_t count = std::min(together, M - first), tiles = (count + ROWS - 1) / ROWS;
        const int64_t share = PANEL * (int64_t)sizeof(W) / tiles;
        for (int64_t p = begin; p < end; ++p)
          for (int64_t i = 0, k = 0; i < blocks; ++i) {
            const int64_t length = (K - k + blocks - i - 1) / (blocks - i);
            const W *block = w + (p * K + k) * PANEL, *next = block + length * PANEL;
            for (int64_t t = 0, m = first; t < tiles; ++t) {  // tiles of like height: 7 rows are 4 and 3, not 6 and 1
              const int64_t height = (first + count - m + tiles - t - 1) / (tiles - t);
              const Block<W> b{block, bias ? bias + p * PANEL : nullptr, length, K, std::min(PANEL, N - p * PANEL), N,
                               i == 0, next + t * length * PANEL / tiles, share};
              some_rows(height, from + m * K + k, b, to + m * N + p * PANEL);
              m += height;
            }
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

// x [..., K], packed [ceil(N / 16), K, 16], bias [N] or none -> [..., N]
at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t N) {
  at::Tensor input = float_rows(x, "linear"), output = like(input, N);
  const Weights weights(packed, bias, input.size(-1), N, "linear");
  if (output.numel() > 0) weights.multiply(input.const_data_ptr<float>(), output.numel() / N, output.mutable_data_ptr<float>());
  return output;
}

// ---- what stands around linear layers ---------------------------------------------------------------------------------

constexpr int64_t ROWS_A_THREAD = 16;  // fewer are not worth waking one

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
  at::parallel_for(0, M, ROWS_A_THREAD, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      for (int64_t j = 0; j < inner; j += 8) {
        const v8 gate = load8(from + m * 2 * inner + j);
        store8(to + m * inner + j, gate / (splat(1.f) + exp8(-gate)) * load8(from + (2 * m + 1) * inner + j));
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
  for (int64_t i = 0; i < count; ++i) to[i] = rounded(row[i]), row[i] = widened(to[i]);
}

inline bool is_pool(const at::Tensor& x) { return x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16; }

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

// ---- attention of single tokens over the paged pool -------------------------------------------------------------------
// K and V rows are read where they stand, once for up to three query heads that share them, with the softmax computed
// on the fly over tiles of tokens. They stand in blocks anywhere in memory: while one tile is worked on, the rows of the
// next one, whole and in order, are fetched into the caches. The tokens of all requests are cut into equal shares for
// the threads, and what they say of a request that was cut is joined at the end.

constexpr int TILE = 64;    // tokens scored before the softmax is updated
constexpr int SHARED = 3;   // query heads worked on together: what the registers hold
constexpr int64_t LEAST = 64;  // tokens that are worth waking a thread for
constexpr int64_t MAX_HEAD_SIZE = 256;

template <class T>
struct Pool {
  const T *k, *v;  // [slots, kv_heads, size]
  int64_t kv_heads, size, block_size, heads;
  int64_t ldq;  // floats from one request's queries to the next one's
  float scale;
};

// Some tokens of one request.
struct Piece {
  int64_t request, begin, end;
  bool whole;  // all of its tokens
};

// Where the K and V rows of n tokens stand, all KV heads of each.
template <class T>
struct Tile {
  const T *k[TILE], *v[TILE];
  int n = 0;
  int64_t piece = 0;
  bool first = false, last = false;  // of its piece
};

// The tiles of some pieces, one after another.
template <class T>
struct Tiles {
  const Pool<T>& pool;
  const int32_t* tables;
  int64_t blocks;
  const std::vector<Piece>& pieces;
  int64_t piece, last_piece, at;

  void next(Tile<T>& tile) {
    tile.n = 0;
    if (piece == last_piece) return;
    const Piece& p = pieces[piece];
    const int64_t stride = pool.kv_heads * pool.size, left = p.end - at;
    // Tiles of like size, in fours: a short one at the end would leave no time to fetch the long one after it.
    const int64_t even = (left / ((left + TILE - 1) / TILE) + 3) / 4 * 4, n = std::min<int64_t>({left, even, TILE});
    const int32_t* table = tables + p.request * blocks;
    for (int64_t i = 0; i < n;) {  // block by block
      const int64_t block = (at + i) / pool.block_size, inside = (at + i) % pool.block_size;
      int64_t row = (table[block] * pool.block_size + inside) * stride;
      for (const int64_t end = std::min(n, i + pool.block_size - inside); i < end; ++i, row += stride)
        tile.k[i] = pool.k + row, tile.v[i] = pool.v + row;
    }
    tile.n = (int)n, tile.piece = piece, tile.first = at == p.begin;
    at += n;
    tile.last = at == p.end;
    if (tile.last && ++piece < last_piece) at = pieces[piece].begin;
  }
};

// Fetches a tile, a little in each of `steps` steps.
template <class T>
struct Ahead {
  const Tile<T>& tile;
  int64_t elements, steps, due = 0;  // elements: of a row
  int token = 0;

  void step() {
    for (due += tile.n; due >= steps; due -= steps, ++token)
      for (int64_t d = 0; d < elements; d += 64 / sizeof(T)) {
        __builtin_prefetch(tile.k[token] + d, 0, 3);
        __builtin_prefetch(tile.v[token] + d, 0, 3);
      }
  }
};

// Of 16 numbers in a row, which one load16 gives as the i-th: of bfloat16 first the even ones, then the odd ones. Queries
// and sums stand in its order; `factor`: what they are multiplied with on the way there and back.
template <class T>
constexpr int given(int i) { return std::is_same_v<T, bf16> ? i % 8 * 2 + i / 8 : i; }
template <class T>
inline void arrange(const float* from, int64_t count, float factor, float* to) {
  for (int64_t d = 0; d < count; d += 16)
    for (int i = 0; i < 16; ++i) to[d + i] = from[d + given<T>(i)] * factor;
}
template <class T>
inline void rearranged(const float* from, int64_t count, float factor, float* to) {
  for (int64_t d = 0; d < count; d += 16)
    for (int i = 0; i < 16; ++i) to[d + given<T>(i)] = from[d + i] * factor;
}

// Scores of G query heads (q [G, size]) against the n tokens of a tile, its rows from element `head` on -> out [G, TILE]
template <int G, class T>
NOINLINE void score(const float* q, int64_t size, const Tile<T>& tile, int64_t head, Ahead<T>& ahead, float* out) {
  const T* const* rows = tile.k;
  int t = 0;
  for (; t + 4 <= tile.n; t += 4) {
    ahead.step();
    const T *a = rows[t] + head, *b = rows[t + 1] + head, *c = rows[t + 2] + head, *d = rows[t + 3] + head;
    v8 acc[G][4];
    UNROLL for (int g = 0; g < G; ++g) UNROLL for (int j = 0; j < 4; ++j) acc[g][j] = splat(0.f);
    for (int64_t i = 0; i < size; i += 16) {
      const float* part = q + i;
      const auto add = [&](int j, const T* row) INLINE {
        v8 low, high;
        load16(row + i, low, high);
        UNROLL for (int g = 0; g < G; ++g) acc[g][j] += load8(part + g * size) * low;
        UNROLL for (int g = 0; g < G; ++g) acc[g][j] += load8(part + g * size + 8) * high;
      };
      add(0, a), add(1, b), add(2, c), add(3, d);
    }
    UNROLL for (int g = 0; g < G; ++g) sum4(acc[g][0], acc[g][1], acc[g][2], acc[g][3], out + g * TILE + t);
  }
  for (; t < tile.n; ++t)
    UNROLL for (int g = 0; g < G; ++g) {
      v8 acc = splat(0.f), low, high;
      for (int64_t i = 0; i < size; i += 16) {
        load16(rows[t] + head + i, low, high);
        acc += load8(q + g * size + i) * low + load8(q + g * size + i + 8) * high;
      }
      out[g * TILE + t] = sum8(acc);
    }
}

// Scores of n tokens -> their weights, up to a factor. `out` [size] and `sum`, of what came before, shrink when a larger
// score than `largest` is met.
inline void softmax(float* p, int n, int64_t size, float* out, float& largest, float& sum) {
  const int padded = (n + 7) & ~7;
  for (int i = n; i < padded; ++i) p[i] = -INFINITY;
  v8 most = load8(p);
  for (int i = 8; i < padded; i += 8) { const v8 s = load8(p + i); most = s > most ? s : most; }
  float top = largest;
  for (int i = 0; i < 8; ++i) top = std::max(top, most[i]);
  v8 total = splat(0.f);
  for (int i = 0; i < padded; i += 8) {
    const v8 e = exp8(load8(p + i) - splat(top));
    store8(p + i, e);
    total += e;
  }
  const float shrink = std::exp(largest - top);
  if (shrink != 1.f)
    for (int64_t d = 0; d < size; d += 8) store8(out + d, load8(out + d) * splat(shrink));
  sum = sum * shrink + sum8(total);
  largest = top;
}

// out [G, size] += the values of a tile's tokens, weighted with p [G, TILE]
template <int G, class T>
NOINLINE void weigh(const float* p, int64_t size, const Tile<T>& tile, int64_t head, Ahead<T>& ahead, float* out) {
  const T* const* rows = tile.v;
  int64_t d = 0;
  for (; d + 32 <= size; d += 32) {
    v8 acc[G][4];
    UNROLL for (int g = 0; g < G; ++g) UNROLL for (int j = 0; j < 4; ++j) acc[g][j] = load8(out + g * size + d + 8 * j);
    for (int t = 0; t < tile.n; ++t) {
      if (d == 0 && t % 4 == 0) ahead.step();
      const T* row = rows[t] + head + d;
      const auto add = [&](int j) INLINE {
        v8 low, high;
        load16(row + 8 * j, low, high);
        UNROLL for (int g = 0; g < G; ++g) {
          const v8 weight = splat(p[g * TILE + t]);
          add_product(acc[g][j], weight, low);
          add_product(acc[g][j + 1], weight, high);
        }
      };
      add(0);
      asm("" ::: "memory");  // the weights are read again: kept, they would take registers from the sums
      add(2);
    }
    UNROLL for (int g = 0; g < G; ++g) UNROLL for (int j = 0; j < 4; ++j) store8(out + g * size + d + 8 * j, acc[g][j]);
  }
  if (d < size)  // 16 are left
    UNROLL for (int g = 0; g < G; ++g) {
      v8 a = load8(out + g * size + d), b = load8(out + g * size + d + 8), low, high;
      for (int t = 0; t < tile.n; ++t) {
        load16(rows[t] + head + d, low, high);
        add_product(a, splat(p[g * TILE + t]), low);
        add_product(b, splat(p[g * TILE + t]), high);
      }
      store8(out + g * size + d, a);
      store8(out + g * size + d + 8, b);
    }
}

// Up to SHARED query heads of one KV head, over one tile: sums not yet divided (out [G, size]), divisors (sum [G]).
template <int G, class T>
void attend(const Pool<T>& pool, const Tile<T>& tile, int64_t kv_head, const float* q, Ahead<T>& ahead, float* out,
            float* largest, float* sum) {
  alignas(32) float p[G * TILE];
  score<G, T>(q, pool.size, tile, kv_head * pool.size, ahead, p);
  for (int g = 0; g < G; ++g) softmax(p + g * TILE, tile.n, pool.size, out + g * pool.size, largest[g], sum[g]);
  weigh<G, T>(p, pool.size, tile, kv_head * pool.size, ahead, out);
}

// One thread's share. Of a piece that is a whole request `output` is told, of others sums, largest scores and divisors.
template <class T>
void attend_all(const Pool<T>& pool, Tiles<T> tiles, const float* q, float* sums, float* largest, float* divisors,
                float* output) {
  const int64_t heads = pool.heads, size = pool.size, group = heads / pool.kv_heads;
  const at::Tensor arranged = at::empty({heads, size}, at::kFloat);  // a vector would not begin a cache line
  float* queries = arranged.mutable_data_ptr<float>();
  Tile<T> both[2];
  int now = 0;
  tiles.next(both[0]);
  for (; both[now].n; now ^= 1) {
    const Tile<T>& tile = both[now];
    tiles.next(both[now ^ 1]);
    const Piece& piece = tiles.pieces[tile.piece];
    const int64_t first = tile.piece * heads;
    float *sum = sums + first * size, *top = largest + first, *divisor = divisors + first;
    if (tile.first) {
      arrange<T>(q + piece.request * pool.ldq, heads * size, pool.scale, queries);
      std::fill_n(sum, heads * size, 0.f), std::fill_n(top, heads, -INFINITY), std::fill_n(divisor, heads, 0.f);
    }
    const int64_t rounds = pool.kv_heads * ((group + SHARED - 1) / SHARED);
    Ahead<T> ahead{both[now ^ 1], pool.kv_heads * size, (tile.n / 4 + (tile.n + 3) / 4) * rounds};
    for (int64_t kv_head = 0; kv_head < pool.kv_heads; ++kv_head)
      for (int64_t g = 0; g < group; g += SHARED) {
        const int64_t h = kv_head * group + g, at = h * size;
        switch (std::min<int64_t>(SHARED, group - g)) {
          case 3: attend<3, T>(pool, tile, kv_head, queries + at, ahead, sum + at, top + h, divisor + h); break;
          case 2: attend<2, T>(pool, tile, kv_head, queries + at, ahead, sum + at, top + h, divisor + h); break;
          default: attend<1, T>(pool, tile, kv_head, queries + at, ahead, sum + at, top + h, divisor + h);
        }
      }
    if (tile.last && piece.whole)
      for (int64_t h = 0; h < heads; ++h)
        rearranged<T>(sum + h * size, size, 1.f / divisor[h], output + (piece.request * heads + h) * size);
  }
}

// What was said of the pieces [first, last) of one request, made one.
template <class T>
void join(int64_t first, int64_t last, int64_t heads, int64_t size, const float* sums, const float* largest,
          const float* divisors, float* out) {
  std::vector<float> sum(size);
  for (int64_t h = 0; h < heads; ++h) {
    float top = -INFINITY, divisor = 0.f;
    for (int64_t p = first; p < last; ++p) top = std::max(top, largest[p * heads + h]);
    std::fill(sum.begin(), sum.end(), 0.f);
    for (int64_t p = first; p < last; ++p) {
      const float weight = std::exp(largest[p * heads + h] - top);
      divisor += weight * divisors[p * heads + h];
      for (int64_t d = 0; d < size; ++d) sum[d] += weight * sums[(p * heads + h) * size + d];
    }
    rearranged<T>(sum.data(), size, 1.f / divisor, out + h * size);
  }
}

// q [B, heads, size]: one token a request. k, v [slots, kv_heads, size]: the pool. tables int32 [B, blocks]: block
// numbers. lengths int32 [B]: tokens to attend to, from the first on. -> [B, heads, size]
at::Tensor paged_decode(const at::Tensor& query, const at::Tensor& k, const at::Tensor& v, const at::Tensor& tables,
                        const at::Tensor& lengths, int64_t block_size, double scale) {
  for (const at::Tensor* x : {&query, &k, &v})
    TORCH_CHECK(x->dim() == 3 && (x == &query ? x->scalar_type() == at::kFloat : is_pool(*x)) &&
                    x->size(2) == query.size(2),
                "paged_decode: q must be float32, K and V float32 or bfloat16, with three dimensions and heads of one size");
  TORCH_CHECK(k.sizes() == v.sizes() && k.scalar_type() == v.scalar_type() && k.is_contiguous() && v.is_contiguous(),
              "paged_decode: K and V must be alike");
  TORCH_CHECK(tables.dim() == 2 && lengths.dim() == 1 && tables.size(0) == query.size(0) &&
                  lengths.size(0) == query.size(0) && tables.scalar_type() == at::kInt &&
                  lengths.scalar_type() == at::kInt && tables.is_contiguous() && lengths.is_contiguous(),
              "paged_decode: tables must be int32 [B, blocks], lengths int32 [B]");
  // A request's heads stand together; its keys and values may stand between them and the next one's.
  const at::Tensor q = query.stride(2) == 1 && query.stride(1) == query.size(2) ? query : query.contiguous();
  at::Tensor output = at::empty(q.sizes(), q.options());
  const int64_t batch = q.size(0), heads = q.size(1), size = q.size(2), kv_heads = k.size(1), blocks = tables.size(1);
  TORCH_CHECK(size % 16 == 0 && size <= MAX_HEAD_SIZE, "paged_decode: head size ", size, " is no multiple of 16 up to 256");
  TORCH_CHECK(heads % kv_heads == 0, "paged_decode: ", heads, " heads cannot share ", kv_heads, " KV heads");
  const int32_t *table = tables.const_data_ptr<int32_t>(), *length = lengths.const_data_ptr<int32_t>();
  int64_t tokens = 0;
  for (int64_t b = 0; b < batch; ++b) {
    TORCH_CHECK(length[b] > 0 && length[b] <= blocks * block_size, "paged_decode: ", length[b], " tokens in ", blocks,
                " blocks of ", block_size);
    for (int64_t i = 0; i * block_size < length[b]; ++i)
      TORCH_CHECK(table[b * blocks + i] >= 0 && (table[b * blocks + i] + 1) * block_size <= k.size(0),
                  "paged_decode: block ", table[b * blocks + i], " is not in the pool");
    tokens += length[b];
  }

  if (batch == 0) return output;
  const int64_t shares = std::clamp<int64_t>(tokens / LEAST, 1, at::get_num_threads());
  std::vector<Piece> pieces;
  std::vector<int64_t> first_of_share{0}, first_of_request;
  for (int64_t b = 0, share = 0, before = 0; b < batch; ++b) {  // before: tokens of the requests before
    first_of_request.push_back((int64_t)pieces.size());
    for (int64_t begin = 0; begin < length[b];) {
      const int64_t limit = tokens * (share + 1) / shares - before, end = std::min<int64_t>(length[b], limit);
      pieces.push_back({b, begin, end, end - begin == length[b]});
      begin = end;
      if (end == limit) ++share, first_of_share.push_back((int64_t)pieces.size());
    }
    before += length[b];
  }
  first_of_request.push_back((int64_t)pieces.size());

  const int64_t count = (int64_t)pieces.size();
  at::Tensor kept = at::empty({count * heads * (size + 2)}, q.options());
  float *sums = kept.mutable_data_ptr<float>(), *largest = sums + count * heads * size, *divisors = largest + count * heads;
  const float* from = q.const_data_ptr<float>();
  float* to = output.mutable_data_ptr<float>();
  const auto all = [&]<class T>(const T* keys, const T* values) {
    const Pool<T> pool{keys, values, kv_heads, size, block_size, heads, q.stride(0), (float)scale};
    at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
      const int64_t first = first_of_share[begin], last = first_of_share[end];
      if (first < last)
        attend_all<T>(pool, {pool, table, blocks, pieces, first, last, pieces[first].begin}, from, sums, largest, divisors, to);
    });
    for (int64_t b = 0; b < batch; ++b)
      if (const int64_t first = first_of_request[b]; !pieces[first].whole)
        join<T>(first, first_of_request[b + 1], heads, size, sums, largest, divisors, to + b * heads * size);
  };
  if (k.scalar_type() == at::kFloat) all(k.const_data_ptr<float>(), v.const_data_ptr<float>());
  else all((const bf16*)k.const_data_ptr(), (const bf16*)v.const_data_ptr());
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
}

TORCH_LIBRARY_IMPL(kvscope, CPU, m) {
  m.impl("pack", &pack);
  m.impl("linear", &linear);
  m.impl("rms_norm", &rms_norm);
  m.impl("gated_mlp", &gated_mlp);
  m.impl("project", &project);
  m.impl("decoder_layer", &decoder_layer);
  m.impl("paged_decode", &paged_decode);
}
