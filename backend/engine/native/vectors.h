#pragma once
// Eight floats at a time, and as many as a register of this CPU holds, through the compiler's vector extensions: one
// source serves AVX2, AVX-512 and NEON.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__) && defined(__AVX512VL__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define AVX512
#endif
#if defined(AVX512) && defined(__AVX512BF16__)
#define AVX512_PAIRS
#endif

#ifdef AVX512
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
typedef float v8 __attribute__((vector_size(32)));
typedef int32_t v8i __attribute__((vector_size(32)));
typedef float wide __attribute__((vector_size(4 * LANES)));

struct bf16 { uint16_t bits; };  // the upper half of a float32
struct pair { bf16 first, second; };  // in place of a float

#ifdef AVX512_PAIRS
constexpr bool PAIRS = true;  // one instruction multiplies pairs and adds both products in float32
#else
constexpr bool PAIRS = false;
#endif

template <class V>
inline V load(const float* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
inline void store(float* p, V v) { std::memcpy(p, &v, sizeof v); }
template <class V>
inline V all(float x) {  // x everywhere, bit for bit
  if constexpr (sizeof(V) == 64) return V{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
  else return V{x, x, x, x, x, x, x, x};
}

inline v8 load8(const float* p) { return load<v8>(p); }
inline void store8(float* p, v8 x) { store<v8>(p, x); }
inline v8 splat(float x) { return all<v8>(x); }

// Two vectors from what stands together. Of bfloat16 the first holds what stands at even places, the second the others.
template <class V>
inline void load_two(const float* p, V& first, V& second) { first = load<V>(p), second = load<V>(p + sizeof(V) / 4); }
template <class V>
inline void load_two(const bf16* p, V& first, V& second) {
  using Words = decltype(V{} < V{});
  Words both;
  std::memcpy(&both, p, sizeof both);
  first = (V)(both << 16);
#if defined(__AVX2__) && !defined(AVX512)  // the mask is read, not kept: there are few registers
  alignas(32) static constexpr int32_t UPPER[8] = {-65536, -65536, -65536, -65536, -65536, -65536, -65536, -65536};
  asm("vpand %2, %1, %0" : "=x"(second) : "x"(both), "m"(UPPER));
#else
  second = (V)(both & (int32_t)0xffff0000);
#endif
}

// sum += a * b. GCC puts half of such sums elsewhere and moves or spills them: an instruction in five.
template <class V>
inline void add_product(V& sum, V a, V b) {
#ifdef AVX512
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
#elif defined(__AVX2__) && defined(__FMA__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
#else
  sum += a * b;
#endif
}

inline bf16 rounded(float x) {  // to nearest, ties to even; NaN stays NaN
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  if (x != x) return {(uint16_t)((bits >> 16) | 0x40)};
  return {(uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

inline float widened(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float number;
  std::memcpy(&number, &bits, sizeof number);
  return number;
}
inline float sum8(v8 a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, v8i{__VA_ARGS__})
#endif
#define UNROLL _Pragma("GCC unroll 16")
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
#ifdef AVX512
inline void sum4(wide a, wide b, wide c, wide d, float* out) {
  const auto fold = [](wide x, wide y) { return (wide)_mm512_unpacklo_ps(x, y) + (wide)_mm512_unpackhi_ps(x, y); };
  const wide ab = fold(a, b), cd = fold(c, d);
  const wide four = (wide)_mm512_shuffle_ps(ab, cd, 0x44) + (wide)_mm512_shuffle_ps(ab, cd, 0xee);
  const v8 two = (v8)_mm512_castps512_ps256(four) + (v8)_mm512_extractf32x8_ps(four, 1);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(two), _mm256_extractf128_ps(two, 1)));
}
#endif

#ifdef AVX512_PAIRS
inline void add_pairs(wide& sum, wide a, wide b) { asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b)); }
// Two rows of bfloat16 -> pairs of what stands below each other
inline void weave(wide a, wide b, wide& low, wide& high) {
  low = (wide)_mm512_unpacklo_epi16((__m512i)a, (__m512i)b), high = (wide)_mm512_unpackhi_epi16((__m512i)a, (__m512i)b);
}
#else  // nobody asks for these
inline void add_pairs(wide&, wide, wide) {}
inline void weave(wide, wide, wide&, wide&) {}
#endif

// A row of numbers, rounded to bfloat16; after an odd count there is a zero.
inline void round_pairs(const float* row, int64_t count, float* to) {
  bf16* out = (bf16*)to;
  int64_t i = 0;
#ifdef AVX512_PAIRS
  for (; i + 32 <= count; i += 32)
    _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(row + i + 16), _mm512_loadu_ps(row + i)));
#endif
  for (; i < count; ++i) out[i] = rounded(row[i]);
  if (count % 2) out[count] = {0};
}

// a and b, lane by lane: the larger, the smaller; b where one is not a number.
template <class V>
inline V larger(V a, V b) {
#ifdef AVX512  // of the line below GCC makes two instructions
  if constexpr (sizeof(V) == 64) return (V)_mm512_max_ps((__m512)a, (__m512)b);
#endif
  return a > b ? a : b;
}
template <class V>
inline V smaller(V a, V b) {
#ifdef AVX512
  if constexpr (sizeof(V) == 64) return (V)_mm512_min_ps((__m512)a, (__m512)b);
#endif
  return a < b ? a : b;
}

// e^x to about 2 units in the last place; below -87 it stays at e^-87, NaN stays NaN.
template <class V>
inline V exponential(V x) {
  using Words = decltype(V{} < V{});
  const V c = smaller(all<V>(88.f), larger(all<V>(-87.f), x));
  const V magic = all<V>(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer, in the low bits
  const V r = c * all<V>(1.44269504f) + magic, n = r - magic;
  const V y = c - n * all<V>(0.693359375f) - n * all<V>(-2.12194440e-4f);  // ln 2 in two parts
  V p = all<V>(1.9875691500e-4f);
  p = p * y + all<V>(1.3981999507e-3f);
  p = p * y + all<V>(8.3334519073e-3f);
  p = p * y + all<V>(4.1665795894e-2f);
  p = p * y + all<V>(1.6666665459e-1f);
  p = p * y + all<V>(5.0000001201e-1f);
  p = p * y * y + y + all<V>(1.f);
#ifdef AVX512
  if constexpr (sizeof(V) == 64) return (V)_mm512_scalef_ps((__m512)p, (__m512)n);
#endif
  const V e = (V)((Words)p + ((Words)r << 23));
  return x == x ? e : x;
}

}  // namespace
