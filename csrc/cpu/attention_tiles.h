// A block of keys in bfloat16 by matrix tiles: the scores of 16 keys and a group of up to 16 rows
// are one product, with the keys as stored in the cache as its left factor; the weights times 16
// columns of values are another. So a group of rows costs little more than a single row.
//
// A row's sums depend only on its own queries, keys and weights, whatever the neighbouring rows: a
// value that the row does not see has a weight of 0, and a non-finite one is left out of its
// product.
#pragma once

#include "attention_pairs.h"
#include "tile_unit.h"

#if defined(__AVX512BF16__)

namespace eecore::cpu::EECORE_CAPABILITY {

// Tiles by use: sums of scores of 16 keys each, and of 16 columns of values each; the keys or the
// weights on the left; the queries or the values on the right.
constexpr int kScores0 = 0, kScores1 = 1, kValues0 = 2, kValues1 = 3;
constexpr int kKeyTile = 4, kWeightTile = 5, kQueryTile = 6, kValueTile = 7;
constexpr int kSecondKeyTile = kValueTile;

// Bytes from one of 16 rows to the next if all are equally far apart, else 0.
inline int64_t even_stride(const BFloat16* const* rows) {
  const auto* at = reinterpret_cast<const char* const*>(rows);
  const __m512i low = _mm512_loadu_si512(at), high = _mm512_loadu_si512(at + 7);
  const __m512i after_low = _mm512_loadu_si512(at + 1), after_high = _mm512_loadu_si512(at + 8);
  const int64_t stride = at[1] - at[0];
  const __m512i expected = _mm512_set1_epi64(stride);
  const __mmask8 is_even = _mm512_cmpeq_epi64_mask(_mm512_sub_epi64(after_low, low), expected) &
                           _mm512_cmpeq_epi64_mask(_mm512_sub_epi64(after_high, high), expected);
  return is_even == 0xff ? stride : 0;
}

// 16 keys as a left factor: in place, or copied to `room`, with zeros for missing columns.
struct KeyTiles {
  const BFloat16* keys;
  int64_t stride;  // bytes
};
inline KeyTiles key_tiles(const HeadRows<BFloat16>& rows, int64_t first, int64_t head_dim,
                          BFloat16* room) {
  const int64_t stride = even_stride(rows.rows + first);
  if (stride != 0 && head_dim % kTileColumns == 0) return {rows[first], stride};
  const int64_t width = row_width(head_dim);
  for (int64_t i = 0; i < kTileSide; ++i) {
    for (int64_t d = 0; d < head_dim; d += kTileColumns) {
      _mm512_store_si512(room + i * width + d, load_words(rows[first + i] + d, head_dim - d));
    }
  }
  return {room, width * static_cast<int64_t>(sizeof(BFloat16))};
}

// Reads 16 keys, [16 keys, 16 rows], four rows from `first` on.
inline void turn_four(const float* turned, int64_t first, Vec* rows) {
  __m512 keys[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const float* from = turned + kTileSide * j + first;
    keys[j] = _mm512_castps128_ps512(_mm_load_ps(from));
    keys[j] = _mm512_mask_broadcast_f32x4(keys[j], 0x00f0, _mm_load_ps(from + kTileSide * 4));
    keys[j] = _mm512_mask_broadcast_f32x4(keys[j], 0x0f00, _mm_load_ps(from + kTileSide * 8));
    keys[j] = _mm512_mask_broadcast_f32x4(keys[j], 0xf000, _mm_load_ps(from + kTileSide * 12));
  }
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(keys[0], keys[1]));
  const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(keys[0], keys[1]));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(keys[2], keys[3]));
  const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(keys[2], keys[3]));
  rows[0] = {_mm512_castpd_ps(_mm512_unpacklo_pd(a, c))};
  rows[1] = {_mm512_castpd_ps(_mm512_unpackhi_pd(a, c))};
  rows[2] = {_mm512_castpd_ps(_mm512_unpacklo_pd(b, d))};
  rows[3] = {_mm512_castpd_ps(_mm512_unpackhi_pd(b, d))};
}

// The largest element of each of four vectors.
inline __m128 largest_of_four(const Vec* v) {
  const __m512 ab =
      _mm512_max_ps(_mm512_unpacklo_ps(v[0].v, v[1].v), _mm512_unpackhi_ps(v[0].v, v[1].v));
  const __m512 cd =
      _mm512_max_ps(_mm512_unpacklo_ps(v[2].v, v[3].v), _mm512_unpackhi_ps(v[2].v, v[3].v));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 abcd = _mm512_max_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  return _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

// The keys of a block, one bit each, with a value that is infinite or NaN.
inline uint32_t infinite_keys(const uint32_t* v_pairs, int64_t num_keys, int64_t width) {
  const __m512i exponent = _mm512_set1_epi16(0x7f80);
  uint32_t keys = 0;
  for (int64_t first = 0; first < num_keys; first += 2, v_pairs += width) {
    __mmask32 found = 0;
    for (int64_t d = 0; d < width; d += kWidth) {
      const __m512i words = _mm512_load_si512(v_pairs + d);
      found |= _mm512_cmpeq_epi16_mask(_mm512_and_si512(words, exponent), exponent);
    }
    const uint32_t low = (found & 0x55555555u) != 0, high = (found & 0xaaaaaaaau) != 0;
    keys |= (low | high << 1) << first;
  }
  return keys;
}

template <typename U>
struct InTiles {
  static constexpr bool kHasTiles = true;
  static constexpr float kUnit = 1.0f;
  using Wide = BFloat16;

  // A thread's tiles while it multiplies, for groups of the same number of rows.
  class Unit {
   public:
    Unit() = default;
    Unit(const Unit&) = delete;
    Unit& operator=(const Unit&) = delete;
    ~Unit() {
      if (num_rows_ != 0) U::end();
    }
    void take(int64_t num_rows) {
      if (num_rows == num_rows_) return;
      num_rows_ = num_rows;
      TileSizes sizes = whole_tiles();
      sizes.set(kScores0, kTileSide, 4 * num_rows);
      sizes.set(kScores1, kTileSide, 4 * num_rows);
      sizes.set(kQueryTile, kTileSide, 4 * num_rows);
      sizes.set(kValues0, num_rows, kTileRowBytes);
      sizes.set(kValues1, num_rows, kTileRowBytes);
      sizes.set(kWeightTile, num_rows, kTileRowBytes);
      U::begin(sizes);
    }

   private:
    int64_t num_rows_ = 0;
  };

  template <typename T>
  static void take_query(const T* q, int64_t head_dim, float, int64_t at, int64_t group_rows,
                         TileScratch& scratch) {
    const int64_t width = row_width(head_dim);
    const __m512i places = _mm512_slli_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4);
    auto* out = reinterpret_cast<int32_t*>(scratch.q_turned) +
                at / group_rows * (width / 2) * kTileSide + at % group_rows;
    for (int64_t d = 0; d < head_dim; d += 32) {
      _mm512_i32scatter_epi32(out + d / 2 * kTileSide, places, query_words(q + d, head_dim - d), 4);
    }
  }

  template <typename C, typename Scale>
  static void attend(TileScratch& scratch, const AttentionTile& tile, int64_t head_dim,
                     const Scale& scale_of_head, Range keys, const CachedBlock<C>& block) {
    const int64_t num_keys = keys.end - keys.begin, width = row_width(head_dim);
    for (int64_t row = 0; row < tile.groups.rows(); ++row) {
      const Range seen = row < tile.num_rows ? intersect(scratch.visible[row], keys) : Range{0, 0};
      const uint64_t below = seen.empty() ? 0 : (uint64_t{1} << (seen.end - keys.begin)) - 1;
      scratch.seen[row] = static_cast<uint32_t>(
          seen.empty() ? 0 : below >> (seen.begin - keys.begin) << (seen.begin - keys.begin));
    }
    // Tiles multiply the next head's keys and the last head's values while vectors weigh a head's
    // scores.
    score_head(scratch, tile, 0, head_dim, num_keys, block);
    for (int64_t head = 0; head < tile.num_heads; ++head) {
      if (head + 1 < tile.num_heads) {
        score_head(scratch, tile, head + 1, head_dim, num_keys, block);
      }
      const Vec scale = broadcast(scale_of_head(head));
      for (int64_t first = 0; first < tile.groups.rows(); first += tile.groups.size) {
        for (int64_t row = first; row < first + tile.groups.size; row += 4) {
          weigh(scratch, tile, head, row, keys, width, scale);
        }
      }
      if (head > 0) add_head(scratch, tile, head - 1, head_dim, num_keys, block);
    }
    add_head(scratch, tile, tile.num_heads - 1, head_dim, num_keys, block);
  }

 private:
  static float* turned_of(TileScratch& scratch, int64_t group) {
    return scratch.turned_scores + group * kMaxBlock * kTileSide;
  }

  // Scores of all rows of a head.
  template <typename C>
  static void score_head(TileScratch& scratch, const AttentionTile& tile, int64_t head,
                         int64_t head_dim, int64_t num_keys, const CachedBlock<C>& block) {
    const int64_t width = row_width(head_dim);
    const BFloat16* wide[kMaxBlock];
    const HeadRows<BFloat16> rows =
        rows_as(block.of_head(head).k, num_keys, head_dim, scratch.k_widened, wide);
    auto* room = reinterpret_cast<BFloat16*>(scratch.k_pairs);
    const bool has_second = num_keys > kTileSide;
    const KeyTiles first = key_tiles(rows, 0, head_dim, room);
    KeyTiles second = first;
    if (has_second) second = key_tiles(rows, kTileSide, head_dim, room + kTileSide * width);
    for (int64_t i = 0; i < tile.groups.count; ++i) {
      const int64_t group = head * tile.groups.count + i;
      const uint32_t* q = scratch.q_turned + group * (width / 2) * kTileSide;
      U::template zero<kScores0>();
      if (has_second) U::template zero<kScores1>();
      for (int64_t d = 0; d < width; d += kTileColumns) {
        U::template load<kQueryTile>(q + d / 2 * kTileSide, kTileRowBytes);
        U::template load<kKeyTile>(first.keys + d, first.stride);
        U::template multiply<kScores0, kKeyTile, kQueryTile>();
        if (!has_second) continue;
        U::template load<kSecondKeyTile>(second.keys + d, second.stride);
        U::template multiply<kScores1, kSecondKeyTile, kQueryTile>();
      }
      U::template store<kScores0>(turned_of(scratch, group));
      if (has_second) {
        U::template store<kScores1>(turned_of(scratch, group) + kTileSide * kTileSide);
      }
    }
  }

  // Turns the scores of up to four rows of a group, from `row` on, into pairs of weights, and
  // corrects the sums so far: softmax_row, for all of them at a time.
  static void weigh(TileScratch& scratch, const AttentionTile& tile, int64_t head, int64_t row,
                    Range keys, int64_t width, Vec scale) {
    const int64_t in_group = row % tile.groups.size;
    const int64_t group = head * tile.groups.count + row / tile.groups.size;
    const int64_t at = tile.held(head, row);
    const int64_t count = min_of(4, tile.groups.size - in_group);
    const float* turned = turned_of(scratch, group);
    Vec low[4], high[4], largest[4];
    turn_four(turned, in_group, low);
    turn_four(turned + kTileSide * kTileSide, in_group, high);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const uint32_t seen = r < count ? scratch.seen[row + r] : 0;
      low[r] = low[r] * scale;
      high[r] = high[r] * scale;
      if (scratch.bias.data != nullptr && seen != 0) {
        add_bias(scratch, at + r, keys.begin - scratch.position[row + r], &low[r], &high[r]);
      }
      if (scratch.soft_cap > 0.0f) {
        low[r] = soft_capped(low[r], scratch.soft_cap);
        high[r] = soft_capped(high[r], scratch.soft_cap);
      }
      const __m512 hidden = broadcast(-kInfinity).v;
      low[r].v = _mm512_mask_mov_ps(hidden, static_cast<__mmask16>(seen), low[r].v);
      high[r].v = _mm512_mask_mov_ps(hidden, static_cast<__mmask16>(seen >> 16), high[r].v);
      largest[r] = max(low[r], high[r]);
    }
    const __mmask8 rows = static_cast<__mmask8>((1u << count) - 1);
    const __m128 before = _mm_maskz_loadu_ps(rows, scratch.maximum + at);
    const __m128 of_block = largest_of_four(largest);
    const __mmask8 is_larger = rows & _mm_cmp_ps_mask(of_block, before, _CMP_GT_OQ);
    const __m128 now = _mm_mask_mov_ps(before, is_larger, of_block);
    _mm_mask_storeu_ps(scratch.maximum + at, rows, now);
    alignas(16) float bases[4], corrections[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    const __mmask8 is_none = _mm_cmp_ps_mask(now, _mm_set1_ps(-kInfinity), _CMP_EQ_OQ);
    _mm_store_ps(bases, _mm_maskz_mov_ps(static_cast<__mmask8>(~is_none), now));
    if (is_larger != 0) {
      const Vec all = exp(Vec{_mm512_castps128_ps512(_mm_sub_ps(before, now))});
      _mm_mask_storeu_ps(corrections, is_larger, _mm512_castps512_ps128(all.v));
    }
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      if (r >= count) break;
      const Vec base = broadcast(bases[r]);
      const Vec first = exp(low[r] - base), second = exp(high[r] - base);
      float* sums = scratch.weight_sum + (at + r) * kWidth;
      store(sums, load(sums) * broadcast(corrections[r]) + first + second);
      const auto rounded = _mm512_cvtne2ps_pbh(second.v, first.v);
      _mm512_store_si512(weights_of(scratch, at + r), reinterpret_cast<__m512i>(rounded));
    }
    for (int r = 0; is_larger != 0 && r < count; ++r) {
      float* acc = scratch.acc + (at + r) * width;
      const Vec correction = broadcast(corrections[r]);
      for (int64_t d = 0; d < width; d += kWidth) store(acc + d, load(acc + d) * correction);
    }
  }

  static uint32_t* weights_of(TileScratch& scratch, int64_t at) {
    return scratch.tile_weights + at * kMaxBlock / 2;
  }

  static void add_bias(TileScratch& scratch, int64_t at, int64_t distance, Vec* low, Vec* high) {
    alignas(64) float scores[kMaxBlock];
    store(scores, *low);
    store(scores + kWidth, *high);
    scratch.bias.add(scratch.bias_row[at], distance, 0, kMaxBlock, scores);
    *low = load(scores);
    *high = load(scores + kWidth);
  }

  // acc += weights times values, for all rows of a head.
  template <typename C>
  static void add_head(TileScratch& scratch, const AttentionTile& tile, int64_t head,
                       int64_t head_dim, int64_t num_keys, const CachedBlock<C>& block) {
    const int64_t width = row_width(head_dim);
    const BFloat16* wide[kMaxBlock];
    const HeadBlock<C> next = block.next_of_head(head);
    pack_values(
        rows_as(block.of_head(head).v, num_keys, head_dim, scratch.v_widened, wide), num_keys,
        head_dim,
        [&](int64_t j, int64_t n) {
          prefetch_rows(next.k, j, n, head_dim);
          prefetch_rows(next.v, j, n, head_dim);
        },
        scratch);
    clear_values(num_keys, width, scratch);
    const uint32_t every = ~0u >> (kMaxBlock - num_keys);
    uint32_t infinite = 0;
    bool is_known = false;  // whether `infinite` has been looked for
    for (int64_t row = 0; row < tile.groups.rows(); row += tile.groups.size) {
      uint32_t all = every, any = 0;
      for (int64_t r = row; r < min_of(row + tile.groups.size, tile.num_rows); ++r) {
        all &= scratch.seen[r];
        any |= scratch.seen[r];
      }
      if (any == 0) continue;
      if (all != every && !is_known) {
        infinite = infinite_keys(scratch.v_pairs, num_keys, width);
        is_known = true;
      }
      const int64_t at = tile.held(head, row);
      float* acc = scratch.acc + at * width;
      if ((infinite & ~all) == 0) [[likely]] {
        add_values(weights_of(scratch, at), scratch.v_pairs, width, acc);
      } else {
        add_apart(scratch, tile, row, at, width, acc);
      }
    }
  }

  // Zeros the values after the last key: the old contents may be NaN.
  static void clear_values(int64_t num_keys, int64_t width, TileScratch& scratch) {
    if (num_keys == kMaxBlock) return;
    const __m512i low = _mm512_set1_epi32(0x0000ffff);
    uint32_t* last = scratch.v_pairs + num_keys / 2 * width;
    for (int64_t d = 0; num_keys % 2 != 0 && d < width; d += kWidth) {
      _mm512_store_si512(last + d, _mm512_and_si512(_mm512_load_si512(last + d), low));
    }
    for (int64_t pair = ceil_div(num_keys, 2); pair < kMaxBlock / 2; ++pair) {
      uint32_t* none = scratch.v_pairs + pair * width;
      for (int64_t d = 0; d < width; d += kWidth) {
        _mm512_store_si512(none + d, _mm512_setzero_si512());
      }
    }
  }

  template <int kSums, int kValues>
  static void add_columns(const uint32_t* v_pairs, int64_t width, float* acc) {
    const int64_t stride = width * static_cast<int64_t>(sizeof(float));
    U::template load<kSums>(acc, stride);
    U::template load<kValues>(v_pairs, stride);
    U::template multiply<kSums, kWeightTile, kValues>();
    U::template store<kSums>(acc, stride);
  }
  static void add_values(const uint32_t* weights, const uint32_t* v_pairs, int64_t width,
                         float* acc) {
    U::template load<kWeightTile>(weights, kTileRowBytes);
    for (int64_t d = 0; d < width; d += 2 * kTileSide) {
      add_columns<kValues0, kValueTile>(v_pairs + d, width, acc + d);
      add_columns<kValues1, kKeyTile>(v_pairs + d + kTileSide, width, acc + d + kTileSide);
    }
  }

  // The same where rows see different values and one of these is not finite: rows that see the same
  // values go together, with zeros for the values that they do not see, and only their own sums are
  // kept.
  static void add_apart(TileScratch& scratch, const AttentionTile& tile, int64_t row, int64_t at,
                        int64_t width, float* acc) {
    const int64_t end_row = min_of(row + tile.groups.size, tile.num_rows);
    auto* own_values = reinterpret_cast<uint32_t*>(scratch.v_block);
    alignas(64) uint32_t weights[16 * kMaxBlock / 2];
    for (int64_t first = row, end; first < end_row; first = end) {
      uint32_t seen = scratch.seen[first];
      for (end = first + 1; end < end_row && scratch.seen[end] == seen;) ++end;
      for (int64_t pair = 0; pair < kMaxBlock / 2; ++pair, seen >>= 2) {
        const uint32_t halves = (seen & 1 ? 0x0000ffffu : 0u) | (seen & 2 ? 0xffff0000u : 0u);
        const __m512i mask = _mm512_set1_epi32(static_cast<int32_t>(halves));
        for (int64_t i = pair * width; i < (pair + 1) * width; i += kWidth) {
          const __m512i values = _mm512_load_si512(scratch.v_pairs + i);
          _mm512_store_si512(own_values + i, _mm512_and_si512(values, mask));
        }
      }
      const int64_t count = end - first, from = first - row;
      __builtin_memset(weights, 0, sizeof(weights));
      __builtin_memset(scratch.part, 0, sizeof(scratch.part));
      copy_bytes(weights, weights_of(scratch, at + from), count * kTileRowBytes);
      copy_bytes(scratch.part, acc + from * width, count * width * int64_t{sizeof(float)});
      add_values(weights, own_values, width, scratch.part);
      copy_bytes(acc + from * width, scratch.part, count * width * int64_t{sizeof(float)});
    }
  }
};

}  // namespace eecore::cpu::EECORE_CAPABILITY

#endif
