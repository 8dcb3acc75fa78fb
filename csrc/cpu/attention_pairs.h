// A block of keys in bfloat16, on CPUs that multiply pairs of bfloat16: a score is summed over
// pairs of columns, a value over pairs of keys, and weights are rounded to bfloat16 as for tensor
// cores. Pairs begin at the block's first key, and a key of a pair that a row does not see has a
// weight of 0.
#pragma once

#include "attention_block.h"
#include "transpose.h"

#if defined(__AVX512BF16__)

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int kColumnPairs = 2;  // pairs of vectors of sums in registers
// Lines of the next block to prefetch at each 16 rows and 32 columns of keys. Together with the
// lines at each pair of columns of a score and at each pair of vectors of values, the prefetches
// are spread evenly over the work.
constexpr int kLinesOfKeys = 8;

// Two bfloat16 in each of 16 lanes.
inline Vec add_products(Vec sum, __m512i x, __m512i y) {
  return {_mm512_dpbf16_ps(sum.v, reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(y))};
}

// The first n elements of a row as 16 pairs; n may be more than 32.
inline __m512i load_words(const BFloat16* p, int64_t n) {
  return n >= 32 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi16(first_of_pair(n), p);
}

// scores[r][j] of the keys [0, 16 * kVectors) from k on: [pairs of columns, block]. `ahead` may be
// null.
template <int kRows, int kVectors>
void score_pairs(const uint32_t* q, int64_t q_stride, const uint32_t* k, int64_t num_pairs,
                 Vec scale, ReadAhead* ahead, float* scores) {
  Vec dots[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) dots[r][i] = zero();
  }
  for (int64_t pair = 0; pair < num_pairs; ++pair) {
    if (ahead != nullptr) ahead->ask(1);
    __m512i keys[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      keys[i] = _mm512_load_si512(k + pair * kMaxBlock + i * kWidth);
    }
    for (int r = 0; r < kRows; ++r) {
      const __m512i query = _mm512_set1_epi32(static_cast<int32_t>(q[r * q_stride + pair]));
      for (int i = 0; i < kVectors; ++i) dots[r][i] = add_products(dots[r][i], query, keys[i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) {
      store(scores + r * kMaxBlock + i * kWidth, dots[r][i] * scale);
    }
  }
}

// 32 columns of two keys' values as pairs of keys: the even columns, and the odd ones.
struct KeyPairs {
  __m512i even, odd;
};
inline KeyPairs pair_values(__m512i low, __m512i high) {
  return {_mm512_mask_blend_epi16(0xaaaaaaaau, low, _mm512_slli_epi32(high, 16)),
          _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(low, 16), high)};
}

// acc[r][d..] = acc[r][d..] * correction[r] + weights times values, for kPairs pairs of vectors and
// the pairs of keys [first, last). weights: [rows, pairs of keys]. `ahead` may be null.
template <int kRows, int kPairs, typename Values>
[[gnu::always_inline]] inline void add_pairs(const uint32_t* weights, const Values& values,
                                             int64_t first, int64_t last, const Vec* correction,
                                             ReadAhead* ahead, int64_t d, int64_t width,
                                             float* acc) {
  Pair sums[kRows][kPairs];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kPairs; ++i) {
      sums[r][i] = load_kept(acc + r * width + d + i * kPairWidth) * correction[r];
    }
  }
  for (int64_t pair = first; pair < last; ++pair) {
    if (ahead != nullptr) ahead->ask(kPairs * Values::kLines);
    KeyPairs of[kPairs];
    for (int i = 0; i < kPairs; ++i) of[i] = values.at(pair, d + i * kPairWidth);
    for (int r = 0; r < kRows; ++r) {
      const __m512i weight =
          _mm512_set1_epi32(static_cast<int32_t>(weights[r * kMaxBlock / 2 + pair]));
      for (int i = 0; i < kPairs; ++i) {
        sums[r][i] = {add_products(sums[r][i].a, weight, of[i].even),
                      add_products(sums[r][i].b, weight, of[i].odd)};
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kPairs; ++i) store_kept(acc + r * width + d + i * kPairWidth, sums[r][i]);
  }
}

// Values of which only one key of each pair counts.
template <typename Values>
struct HalfOf {
  static constexpr int kLines = Values::kLines;
  const Values& values;
  __m512i mask;

  KeyPairs at(int64_t pair, int64_t d) const {
    const KeyPairs both = values.at(pair, d);
    return {_mm512_and_si512(both.even, mask), _mm512_and_si512(both.odd, mask)};
  }
};

// The same for some keys of a block. Sums of single keys, if any, are kept in memory between the
// calls: with all of them in one loop the compiler does not keep sums in registers.
template <int kRows, int kPairs, typename Values>
[[gnu::always_inline]] inline void add_columns(const uint32_t* weights, const Values& values,
                                               Range keys, const Vec* correction, ReadAhead* ahead,
                                               int64_t d, int64_t width, float* acc) {
  Vec ones[kRows];
  for (int r = 0; r < kRows; ++r) ones[r] = broadcast(1.0f);
  const auto add_half = [&](int64_t pair, uint32_t mask) {
    const HalfOf<Values> half{values, _mm512_set1_epi32(static_cast<int32_t>(mask))};
    add_pairs<kRows, kPairs>(weights, half, pair, pair + 1, correction, ahead, d, width, acc);
    correction = ones;
  };
  if (keys.begin % 2 != 0) [[unlikely]]
    add_half(keys.begin / 2, 0xffff0000u);
  add_pairs<kRows, kPairs>(weights, values, (keys.begin + 1) / 2, keys.end / 2, correction, ahead,
                           d, width, acc);
  correction = ones;
  if (keys.end % 2 != 0) [[unlikely]]
    add_half(keys.end / 2, 0x0000ffffu);
}

// Values that are packed first: [pairs of keys, width].
struct PackedValues {
  static constexpr int kLines = 1;  // to prefetch at 32 columns of two keys
  const uint32_t* pairs;
  int64_t width;

  KeyPairs at(int64_t pair, int64_t d) const {
    const uint32_t* from = pairs + pair * width + d;
    return {_mm512_load_si512(from), _mm512_load_si512(from + kWidth)};
  }
};
// Values read in place: packing does not pay where only one group of rows reads them.
struct LooseValues {
  static constexpr int kLines = 2;
  HeadRows<BFloat16> rows;
  int64_t head_dim;

  KeyPairs at(int64_t pair, int64_t d) const {
    return pair_values(load_words(rows[2 * pair] + d, head_dim - d),
                       load_words(rows[2 * pair + 1] + d, head_dim - d));
  }
};

// Packed keys, and values of either kind.
template <typename Values>
struct PairBlock {
  static constexpr int64_t kStep = 2;
  Values values;
  float scale;
  ReadAhead* ahead;  // null: nothing is prefetched

  PairBlock quiet() const { return {values, scale, nullptr}; }

  template <int kRows>
  void score(TileScratch& scratch, int64_t at, Range seen, int64_t head_dim) const {
    const int64_t stride = row_width(head_dim) / 2;
    const uint32_t* q = scratch.q_pairs + at * stride;
    const uint32_t* k = scratch.k_pairs + seen.begin;
    const auto run = [&]<int kVectors>() {
      score_pairs<kRows, kVectors>(q, stride, k, head_dim / 2, broadcast(scale), ahead,
                                   scratch.scores + seen.begin);
    };
    static_assert(kMaxBlock == 2 * kWidth);
    if (seen.end - seen.begin > kWidth) return run.template operator()<2>();
    run.template operator()<1>();
  }

  template <int kRows>
  void weigh(TileScratch& scratch) const {
    for (int r = 0; r < kRows; ++r) {
      const float* weights = scratch.scores + r * kMaxBlock;
      const auto rounded = _mm512_cvtne2ps_pbh(load(weights + kWidth).v, load(weights).v);
      _mm512_store_si512(scratch.weight_pairs + r * kMaxBlock / 2,
                         reinterpret_cast<__m512i>(rounded));
    }
  }

  template <int kRows>
  void add(TileScratch& scratch, int64_t r, Range keys, const Vec* correction, int64_t head_dim,
           float* acc) const {
    const int64_t width = row_width(head_dim);
    const uint32_t* weights = scratch.weight_pairs + r * kMaxBlock / 2;
    const auto columns = [&]<int kPairs>(int64_t d) {
      add_columns<kRows, kPairs>(weights, values, keys, correction, ahead, d, width, acc);
    };
    int64_t d = 0;
    for (; d + kColumnPairs * kPairWidth <= width; d += kColumnPairs * kPairWidth) {
      columns.template operator()<kColumnPairs>(d);
    }
    if (d < width) columns.template operator()<1>(d);
  }
};

// The first n elements of a query, rounded, as 16 pairs; n may be more than 32.
inline __m512i query_words(const BFloat16* q, int64_t n) { return load_words(q, n); }
inline __m512i query_words(const float* q, int64_t n) {
  const Vec low = load_partial(q, min_of(n, kWidth));
  const Vec high = n > kWidth ? load_partial(q + kWidth, min_of(n - kWidth, kWidth)) : zero();
  return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high.v, low.v));
}

// Packs keys as [pairs of columns, block]. ahead(): prefetches, at each 16 of their rows and 32 of
// their columns.
template <typename Ahead>
void pack_keys(const HeadRows<BFloat16>& rows, int64_t num_keys, int64_t head_dim,
               const Ahead& ahead, TileScratch& scratch) {
  for (int64_t j = 0; j < num_keys; j += kWidth) {
    for (int64_t d = 0; d < head_dim; d += 32) {
      __m512i keys[16];
      for (int i = 0; i < 16; ++i) keys[i] = load_words(rows[j + i] + d, head_dim - d);
      transpose(keys);
      for (int i = 0; i < 16; ++i) {
        _mm512_store_si512(scratch.k_pairs + (d / 2 + i) * kMaxBlock + j, keys[i]);
      }
      ahead();
    }
  }
}

// Packs the rows of values in pairs: [pairs, width]. ahead(j, n): prefetches, after the n rows from
// j on.
template <typename Ahead>
void pack_values(const HeadRows<BFloat16>& rows, int64_t num_keys, int64_t head_dim,
                 const Ahead& ahead, TileScratch& scratch) {
  const int64_t width = row_width(head_dim);
  for (int64_t j = 0; j < num_keys; j += 2) {
    const BFloat16 *low = rows[j], *high = rows[j + 1];
    uint32_t* out = scratch.v_pairs + j / 2 * width;
    for (int64_t d = 0; d < head_dim; d += 32) {
      const KeyPairs pairs =
          pair_values(load_words(low + d, head_dim - d), load_words(high + d, head_dim - d));
      _mm512_store_si512(out + d, pairs.even);
      _mm512_store_si512(out + d + kWidth, pairs.odd);
    }
    ahead(j, 2);
  }
}

struct InPairs {
  static constexpr bool kHasTiles = false;
  static constexpr float kUnit = 1.0f;
  using Wide = BFloat16;
  struct Unit {
    void take(int64_t) {}
  };

  template <typename T>
  static void take_query(const T* q, int64_t head_dim, float, int64_t at, int64_t,
                         TileScratch& scratch) {
    uint32_t* out = scratch.q_pairs + at * row_width(head_dim) / 2;
    for (int64_t d = 0; d < head_dim; d += 32) {
      _mm512_store_si512(out + d / 2, query_words(q + d, head_dim - d));
    }
  }

  template <typename C, typename Scale>
  static void attend(TileScratch& scratch, const AttentionTile& tile, int64_t head_dim,
                     const Scale& scale_of_head, Range keys, const CachedBlock<C>& block) {
    const int64_t num_keys = keys.end - keys.begin;
    const BFloat16 *wide_k[kMaxBlock], *wide_v[kMaxBlock];
    for (int64_t head = 0; head < tile.num_heads; ++head) {
      const HeadBlock<C> own = block.of_head(head);
      const HeadRows<BFloat16> k = rows_as(own.k, num_keys, head_dim, scratch.k_widened, wide_k);
      const HeadRows<BFloat16> v = rows_as(own.v, num_keys, head_dim, scratch.v_widened, wide_v);
      ReadAhead ahead = block.ahead_of(head, block_size(head_dim), head_dim);
      pack_keys(k, num_keys, head_dim, [&] { ahead.ask(kLinesOfKeys); }, scratch);
      const auto attend_with = [&](const auto& values) {
        attend_head<kGroupRows>(scratch, tile.num_rows, tile.held(head, 0), head_dim, keys,
                                PairBlock{values, scale_of_head(head), &ahead});
      };
      if (tile.num_rows <= kGroupRows && head_dim <= kColumnPairs * kPairWidth) {
        attend_with(LooseValues{v, head_dim});
      } else {
        pack_values(
            v, num_keys, head_dim,
            [&](int64_t, int64_t) { ahead.ask(static_cast<int>(ceil_div(head_dim, 32))); },
            scratch);
        attend_with(PackedValues{scratch.v_pairs, row_width(head_dim)});
      }
      ahead.ask_rest();
    }
  }
};

}  // namespace eecore::cpu::EECORE_CAPABILITY

#endif
