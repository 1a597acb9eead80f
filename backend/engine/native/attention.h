#pragma once
// Attention of single tokens over the paged pool.
//
// K and V rows are read where they stand, once for up to three query heads that share them, with the softmax computed
// on the fly over tiles of tokens. They stand in blocks anywhere in memory: while one tile is worked on, the rows of the
// next one, whole and in order, are fetched into the caches. The tokens of all requests are cut into equal shares for
// the threads, and what they say of a request that was cut is joined at the end.
//
// What many requests have in common, the blocks of a prefix, is read once for all of them, by rows.h (the idea: Hydragen,
// arXiv 2402.05099); the rest of each is attended to as above.

#include "rows.h"
#include "vectors.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

namespace {

constexpr int TILE = 64;    // tokens scored before the softmax is updated
constexpr int SHARED = 3;   // query heads worked on together: what the registers hold
constexpr int64_t LEAST = 64;  // tokens that are worth waking a thread for

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

// How K and V are multiplied: as vectors V of floats, or, in bfloat16, as pairs. Of STRIDE<How> numbers in a row, sums
// hold the one `given` says at place i; floats of queries do too.
template <class How>
constexpr int STRIDE = std::is_same_v<How, pair> ? 32 : 2 * sizeof(How) / sizeof(float);
template <class How, class T>
constexpr int given(int i) {
  if (std::is_same_v<How, pair>) return i % 16 / 4 * 8 + i / 16 * 4 + i % 4;  // as two rows are woven
  constexpr int half = STRIDE<How> / 2;
  return std::is_same_v<T, bf16> ? i % half * 2 + i / half : i;  // as load_two parts them
}

template <class How, class T>
inline void ordered(const float* from, int64_t size, float factor, float* to) {  // as sums stand; `rearranged` undoes it
  constexpr int stride = STRIDE<How>;
  for (int64_t d = 0; d < size; d += stride)
    for (int i = 0; i < stride; ++i) to[d + i] = from[d + given<How, T>(i)] * factor;
}

// `count` heads of `size`, times `factor`, as they are multiplied with K; each takes `size` floats, whole or in part.
template <class How, class T>
inline void arrange(const float* from, int64_t count, int64_t size, float factor, float* to) {
  float scaled[MAX_HEAD_SIZE];
  for (int64_t h = 0; h < count; ++h, from += size, to += size)
    if constexpr (std::is_same_v<How, pair>) {
      for (int64_t d = 0; d < size; ++d) scaled[d] = from[d] * factor;
      round_pairs(scaled, size, to);
    } else {
      ordered<How, T>(from, size, factor, to);
    }
}
template <class How, class T>
inline void rearranged(const float* from, int64_t size, float factor, float* to) {
  constexpr int stride = STRIDE<How>;
  for (int64_t d = 0; d < size; d += stride)
    for (int i = 0; i < stride; ++i) to[d + given<How, T>(i)] = from[d + i] * factor;
}

// Scores of G query heads (q [G, size]) against the n tokens of a tile, its rows from element `head` on -> out [G, TILE]
template <int G, class How, class T>
NOINLINE void score(const float* q, int64_t size, const Tile<T>& tile, int64_t head, Ahead<T>& ahead, float* out) {
  constexpr int stride = STRIDE<How>;
  for (int t = 0; t < tile.n; t += 4) {
    if (t + 4 <= tile.n) ahead.step();
    const T* rows[4];  // of the last tokens, one more often: what it scores there is not looked at
    UNROLL for (int j = 0; j < 4; ++j) rows[j] = tile.k[std::min(t + j, tile.n - 1)] + head;
    using V = std::conditional_t<std::is_same_v<How, pair>, wide, How>;
    V acc[G][4];
    UNROLL for (int g = 0; g < G; ++g) UNROLL for (int j = 0; j < 4; ++j) acc[g][j] = all<V>(0.f);
    for (int64_t i = 0; i < size; i += stride) {
      const auto add = [&](int j) INLINE {
        if constexpr (std::is_same_v<How, pair>) {
          const wide row = load<wide>((const float*)(rows[j] + i));
          UNROLL for (int g = 0; g < G; ++g) add_pairs(acc[g][j], load<wide>(q + g * size + i / 2), row);
        } else {
          How low, high;
          load_two(rows[j] + i, low, high);
          UNROLL for (int g = 0; g < G; ++g) acc[g][j] += load<How>(q + g * size + i) * low;
          UNROLL for (int g = 0; g < G; ++g) acc[g][j] += load<How>(q + g * size + i + stride / 2) * high;
        }
      };
      add(0), add(1), add(2), add(3);
    }
    UNROLL for (int g = 0; g < G; ++g) sum4(acc[g][0], acc[g][1], acc[g][2], acc[g][3], out + g * TILE + t);
  }
}

// J * STRIDE numbers, from `d` on, of out [G, size] += the values of a tile's tokens, weighted with p [G, TILE], of pairs
// [G, TILE / 2].
template <int G, int J, class How, class T>
inline void weigh_some(const float* p, int64_t size, const Tile<T>& tile, int64_t head, int64_t d, Ahead<T>& ahead,
                       float* out) {
  constexpr int stride = STRIDE<How>, half = stride / 2, together = std::is_same_v<How, pair> ? 2 : 1;
  using V = std::conditional_t<std::is_same_v<How, pair>, wide, How>;
  V acc[G][2 * J];
  UNROLL for (int g = 0; g < G; ++g) UNROLL for (int j = 0; j < 2 * J; ++j) acc[g][j] = load<V>(out + g * size + d + half * j);
  for (int t = 0; t < tile.n; t += together) {
    if (d == 0 && t % 4 == 0) ahead.step();
    const T* row = tile.v[t] + head + d;
    const T* next = tile.v[std::min(t + 1, tile.n - 1)] + head + d;
    const auto add = [&](int j) INLINE {
      V low, high;
      if constexpr (together == 2) weave(load<wide>((const float*)(row + stride * j)), load<wide>((const float*)(next + stride * j)), low, high);
      else load_two(row + stride * j, low, high);
      UNROLL for (int g = 0; g < G; ++g) {
        const V weight = all<V>(p[g * TILE / together + t / together]);
        if constexpr (together == 2) add_pairs(acc[g][2 * j], weight, low), add_pairs(acc[g][2 * j + 1], weight, high);
        else add_product(acc[g][2 * j], weight, low), add_product(acc[g][2 * j + 1], weight, high);
      }
    };
    add(0);
    if constexpr (J == 2) {
      if constexpr (LANES == 8) asm("" ::: "memory");  // the weights are read again: kept, they would take registers
      add(1);
    }
  }
  UNROLL for (int g = 0; g < G; ++g) UNROLL for (int j = 0; j < 2 * J; ++j) store<V>(out + g * size + d + half * j, acc[g][j]);
}
template <int G, class How, class T>
NOINLINE void weigh(const float* p, int64_t size, const Tile<T>& tile, int64_t head, Ahead<T>& ahead, float* out) {
  constexpr int stride = STRIDE<How>;
  int64_t d = 0;
  for (; d + 2 * stride <= size; d += 2 * stride) weigh_some<G, 2, How, T>(p, size, tile, head, d, ahead, out);
  if (d < size) weigh_some<G, 1, How, T>(p, size, tile, head, d, ahead, out);
}

// Up to SHARED query heads of one KV head, over one tile: sums not yet divided (out [G, size]), divisors (sum [G]).
template <int G, class How, class T>
void attend(const Pool<T>& pool, const Tile<T>& tile, int64_t kv_head, const float* q, Ahead<T>& ahead, float* out,
            float* largest, float* sum) {
  alignas(64) float p[G * TILE];
  score<G, How, T>(q, pool.size, tile, kv_head * pool.size, ahead, p);
  const int64_t used = (tile.n + LANES - 1) / LANES * LANES;
  for (int g = 0; g < G; ++g) soften(p + g * TILE, tile.n, used, pool.size, out + g * pool.size, largest[g], sum[g]);
  if constexpr (std::is_same_v<How, pair>)  // in place: what is read lies before what is written
    for (int g = 0; g < G; ++g) round_pairs(p + g * TILE, TILE, p + g * TILE / 2);
  weigh<G, How, T>(p, pool.size, tile, kv_head * pool.size, ahead, out);
}

// One thread's share. Of a piece that is a whole request `output` is told, of others sums, largest scores and divisors.
template <class How, class T>
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
      arrange<How, T>(q + piece.request * pool.ldq, heads, size, pool.scale, queries);
      std::fill_n(sum, heads * size, 0.f), std::fill_n(top, heads, -INFINITY), std::fill_n(divisor, heads, 0.f);
    }
    const int64_t rounds = pool.kv_heads * ((group + SHARED - 1) / SHARED);
    Ahead<T> ahead{both[now ^ 1], pool.kv_heads * size, (tile.n / 4 + (tile.n + 3) / 4) * rounds};
    for (int64_t kv_head = 0; kv_head < pool.kv_heads; ++kv_head)
      for (int64_t g = 0; g < group; g += SHARED) {
        const int64_t h = kv_head * group + g, at = h * size;
        switch (std::min<int64_t>(SHARED, group - g)) {
          case 3: attend<3, How, T>(pool, tile, kv_head, queries + at, ahead, sum + at, top + h, divisor + h); break;
          case 2: attend<2, How, T>(pool, tile, kv_head, queries + at, ahead, sum + at, top + h, divisor + h); break;
          default: attend<1, How, T>(pool, tile, kv_head, queries + at, ahead, sum + at, top + h, divisor + h);
        }
      }
    if (tile.last && piece.whole)
      for (int64_t h = 0; h < heads; ++h)
        rearranged<How, T>(sum + h * size, size, 1.f / divisor[h], output + (piece.request * heads + h) * size);
  }
}

// What was said of the pieces [first, last) of one request, and of its part of a common prefix (-1: none), made one.
template <class How, class T>
void join(int64_t first, int64_t last, int64_t common, int64_t heads, int64_t size, const float* sums,
          const float* largest, const float* divisors, float* out) {
  float sum[MAX_HEAD_SIZE];
  for (int64_t h = 0; h < heads; ++h) {
    float top = common < 0 ? -INFINITY : largest[common * heads + h], divisor = 0.f;
    for (int64_t p = first; p < last; ++p) top = std::max(top, largest[p * heads + h]);
    std::fill_n(sum, size, 0.f);
    const auto add = [&](int64_t p) {
      const float weight = std::exp(largest[p * heads + h] - top);
      divisor += weight * divisors[p * heads + h];
      for (int64_t d = 0; d < size; ++d) sum[d] += weight * sums[(p * heads + h) * size + d];
    };
    for (int64_t p = first; p < last; ++p) add(p);
    if (common >= 0) add(common);
    rearranged<How, T>(sum, size, 1.f / divisor, out + h * size);
  }
}

constexpr int64_t SHARING = 16, WORTH = 128;  // requests and tokens of a prefix that are worth packing its K and V

// Requests whose first tokens stand in the same blocks.
struct Common {
  std::vector<int64_t> requests;
  int64_t blocks;
};

inline std::vector<Common> find_common(const int32_t* tables, const int32_t* lengths, int64_t batch, int64_t blocks,
                                       int64_t block_size) {
  std::vector<Common> found;
  if (batch < SHARING) return found;
  const auto table = [&](int64_t b) { return tables + b * blocks; };
  std::vector<int64_t> order(batch);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return *table(a) < *table(b); });
  for (auto first = order.begin(), last = first; first != order.end(); first = last) {
    last = std::find_if(first, order.end(), [&](int64_t b) { return *table(b) != *table(*first); });
    if (last - first < SHARING) continue;
    int64_t common = blocks;
    for (auto b = first; b != last; ++b) {
      const int64_t most = std::min<int64_t>(common, (lengths[*b] - 1) / block_size);  // a token of its own stays
      common = std::mismatch(table(*b), table(*b) + most, table(*first)).first - table(*b);
    }
    if (common * block_size >= WORTH) found.push_back({{first, last}, common});
  }
  return found;
}

// Row j is query head j % group of the group's request j / group; all see the whole prefix.
template <class How, class T>
struct Sharing {
  const Pool<T>& pool;
  const Common& common;
  const float* q;
  int64_t tokens, first;  // first: where the group's parts stand
  float *sums, *largest, *divisors;

  int64_t group() const { return pool.heads / pool.kv_heads; }
  int64_t head(int64_t kv_head, int64_t j) const { return kv_head * group() + j % group(); }
  const float* query(int64_t kv_head, int64_t j) const {
    return q + common.requests[j / group()] * pool.ldq + head(kv_head, j) * pool.size;
  }
  int64_t sees(int64_t) const { return tokens; }
  void say(int64_t kv_head, int64_t j, const float* out, float top, float sum) const {
    const int64_t at = (first + j / group()) * pool.heads + head(kv_head, j);
    ordered<How, T>(out, pool.size, 1.f, sums + at * pool.size);
    largest[at] = top, divisors[at] = sum;
  }
};

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
  const bool even = size % STRIDE<wide> == 0;  // else heads are too short for the widest vectors
  std::vector<Common> groups;
  if (even) groups = find_common(table, length, batch, blocks, block_size);
  std::vector<int64_t> from_on(batch, 0), common_of(batch, -1);  // what a request has in common, and which part it is
  int64_t parts = 0;
  for (const Common& group : groups)
    for (const int64_t b : group.requests) {
      from_on[b] = group.blocks * block_size, common_of[b] = parts++;
      tokens -= from_on[b];
    }
  const int64_t shares = std::clamp<int64_t>(tokens / LEAST, 1, at::get_num_threads());
  std::vector<Piece> pieces;
  std::vector<int64_t> first_of_share{0}, first_of_request;
  for (int64_t b = 0, share = 0, before = 0; b < batch; ++b) {  // before: tokens of the requests before
    first_of_request.push_back((int64_t)pieces.size());
    for (int64_t begin = from_on[b]; begin < length[b];) {
      const int64_t limit = from_on[b] + tokens * (share + 1) / shares - before, end = std::min<int64_t>(length[b], limit);
      pieces.push_back({b, begin, end, end - begin == length[b]});
      begin = end;
      if (end == limit) ++share, first_of_share.push_back((int64_t)pieces.size());
    }
    before += length[b] - from_on[b];
  }
  first_of_request.push_back((int64_t)pieces.size());

  const int64_t count = (int64_t)pieces.size(), told = count + parts;
  for (int64_t& part : common_of) part += part < 0 ? 0 : count;
  at::Tensor kept = at::empty({told * heads * (size + 2)}, q.options());
  float *sums = kept.mutable_data_ptr<float>(), *largest = sums + told * heads * size, *divisors = largest + told * heads;
  const float* from = q.const_data_ptr<float>();
  float* to = output.mutable_data_ptr<float>();
  const auto whole = [&]<class How, class T>(How, const T* keys, const T* values) {
    const Pool<T> pool{keys, values, kv_heads, size, block_size, heads, q.stride(0), (float)scale};
    at::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
      const int64_t first = first_of_share[begin], last = first_of_share[end];
      if (first < last)
        attend_all<How, T>(pool, {pool, table, blocks, pieces, first, last, pieces[first].begin}, from, sums, largest, divisors, to);
    });
    for (const Common& group : groups) {
      std::vector<int64_t> slots(group.blocks * block_size);
      for (int64_t t = 0; t < (int64_t)slots.size(); ++t)
        slots[t] = table[group.requests[0] * blocks + t / block_size] * block_size + t % block_size;
      const Context<T> prefix{keys, values, slots.data(), (int64_t)slots.size(), kv_heads, size};
      const Sharing<How, T> asking{pool, group, from, prefix.tokens, common_of[group.requests[0]], sums, largest, divisors};
      attend_all_rows(Packed<T>(prefix), asking, (int64_t)group.requests.size() * asking.group(), pool.scale);
    }
    at::parallel_for(0, batch, 8, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; ++b)
        if (const int64_t first = first_of_request[b]; !pieces[first].whole)
          join<How, T>(first, first_of_request[b + 1], common_of[b], heads, size, sums, largest, divisors,
                       to + b * heads * size);
    });
  };
  const auto* keys = k.const_data_ptr();
  const auto* values = v.const_data_ptr();
  if (k.scalar_type() == at::kFloat) {
    even ? whole(wide{}, (const float*)keys, (const float*)values) : whole(v8{}, (const float*)keys, (const float*)values);
  } else if constexpr (PAIRS) {
    even ? whole(pair{}, (const bf16*)keys, (const bf16*)values) : whole(v8{}, (const bf16*)keys, (const bf16*)values);
  } else {
    even ? whole(wide{}, (const bf16*)keys, (const bf16*)values) : whole(v8{}, (const bf16*)keys, (const bf16*)values);
  }
  return output;
}

}  // namespace
