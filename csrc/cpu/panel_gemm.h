// out[b, r] = sum_k x[b, k] * w[r, k] for packed weights (eecore/packed_weight.h): a panel's rows
// are the lanes of a vector, so that no sum runs across a vector.
//
// x is quantised to 8 bits, with a scale for each block of the weight's format: 32 columns, or the
// 256 of a super-block. Products within a block, in a super-block times the sub-scales, are summed
// as exact integers, and blocks in float32 in ascending order: a result depends only on its row of
// x and its row of the weight. A block that holds NaN or infinity makes its whole row NaN.
#pragma once

#include <type_traits>

#include "skinny_gemm.h"
#include "tile_unit.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// The factors to and from whole numbers, for a block whose largest magnitude has these bits.
struct BlockScale {
  float to_q, scale;
};
inline BlockScale block_scale(uint32_t largest) {
  float bound;
  __builtin_memcpy(&bound, &largest, 4);
  if (largest >= 0x7f800000u) return {0.0f, __builtin_nanf("")};
  // Below this the factor could be infinite.
  if (bound < 1.17549435e-36f) return {0.0f, 0.0f};
  return {127.0f / bound, bound / 127.0f};
}

// The sums of the first and the last 16 of 32 whole numbers.
struct HalfSums {
  int32_t low, high;
};

#if defined(__AVX2__)

inline HalfSums sums_of(__m256i q) {
  // As unsigned bytes, with 128 added to each, they are summed eight at a time.
  const __m256i sums =
      _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
  const __m256i pairs = _mm256_add_epi64(sums, _mm256_bsrli_epi128(sums, 8));
  constexpr int32_t kAdded = 128 * kBlockColumns / 2;
  return {_mm_cvtsi128_si32(_mm256_castsi256_si128(pairs)) - kAdded,
          _mm_cvtsi128_si32(_mm256_extracti128_si256(pairs, 1)) - kAdded};
}

#endif

// largest_of: the bits of the largest magnitude of v: [kCount], a multiple of 32.
// quantise: v * to_q to nearest even as q: [32], zeros where to_q is 0.
#if defined(__AVX512F__)

template <int64_t kCount>
inline uint32_t largest_of(const float* v) {
  __m512i larger = _mm512_setzero_si512();
  for (int64_t i = 0; i < kCount; i += 16) {
    const __m512i magnitude =
        _mm512_and_si512(_mm512_loadu_si512(v + i), _mm512_set1_epi32(0x7fffffff));
    larger = _mm512_max_epu32(larger, magnitude);
  }
  return _mm512_reduce_max_epu32(larger);
}
inline HalfSums quantise(const float* v, float to_q, int8_t* out) {
  const __mmask16 usable = to_q > 0.0f ? 0xffff : 0;
  const auto whole = [&](const float* p) {
    return _mm512_cvtepi32_epi8(
        _mm512_cvtps_epi32(_mm512_maskz_mul_ps(usable, _mm512_loadu_ps(p), _mm512_set1_ps(to_q))));
  };
  const __m256i q = _mm256_set_m128i(whole(v + 16), whole(v));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), q);
  return sums_of(q);
}

#elif defined(__AVX2__)

template <int64_t kCount>
inline uint32_t largest_of(const float* v) {
  __m256i larger = _mm256_setzero_si256();
  for (int64_t i = 0; i < kCount; i += 8) {
    const __m256i bits = _mm256_castps_si256(_mm256_loadu_ps(v + i));
    larger = _mm256_max_epu32(larger, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  }
  __m128i most = _mm_max_epu32(_mm256_castsi256_si128(larger), _mm256_extracti128_si256(larger, 1));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0x4e));
  most = _mm_max_epu32(most, _mm_shuffle_epi32(most, 0xb1));
  return static_cast<uint32_t>(_mm_cvtsi128_si32(most));
}
inline HalfSums quantise(const float* v, float to_q, int8_t* out) {
  const __m256 usable = _mm256_castsi256_ps(_mm256_set1_epi32(to_q > 0.0f ? -1 : 0));
  __m256i whole[4];
  for (int i = 0; i < 4; ++i) {
    const __m256 value = _mm256_and_ps(_mm256_loadu_ps(v + 8 * i), usable);
    whole[i] = _mm256_cvtps_epi32(_mm256_mul_ps(value, _mm256_set1_ps(to_q)));
  }
  // Each instruction packs within halves: four elements of each of the eight vectors' halves
  // alternate.
  const __m256i q =
      _mm256_permutevar8x32_epi32(_mm256_packs_epi16(_mm256_packs_epi32(whole[0], whole[1]),
                                                     _mm256_packs_epi32(whole[2], whole[3])),
                                  _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), q);
  return sums_of(q);
}

#else

template <int64_t kCount>
inline uint32_t largest_of(const float* v) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < kCount; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, v + i, 4);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}
inline HalfSums quantise(const float* v, float to_q, int8_t* out) {
  HalfSums sums{};
  for (int i = 0; i < kBlockColumns; ++i) {
    const float value = to_q > 0.0f ? v[i] * to_q : 0.0f;
    const auto whole = static_cast<int32_t>((value + 12582912.0f) - 12582912.0f);
    out[i] = static_cast<int8_t>(whole);
    (i < kBlockColumns / 2 ? sums.low : sums.high) += whole;
  }
  return sums;
}

#endif

// row: [kCount] as floats, converted into room if they are none.
template <int64_t kCount, typename T>
inline const float* as_floats(const T* row, float* room) {
  if constexpr (std::is_same_v<T, float>) return row;
  for (int64_t i = 0; i < kCount; i += kWidth) store(room + i, load(row + i));
  return room;
}

// v: [32]
inline void quantise_block(const float* v, XBlock* out) {
  const BlockScale scale = block_scale(largest_of<kBlockColumns>(v));
  const HalfSums sums = quantise(v, scale.to_q, out->q);
  out->scale = scale.scale;
  out->scaled_sum = scale.scale * static_cast<float>(sums.low + sums.high);
  out->minus_8 = -8 * (sums.low + sums.high);
}
// v: [256]
inline void quantise_super_block(const float* v, XSuperBlock* out) {
  const BlockScale scale = block_scale(largest_of<kSuperColumns>(v));
  out->scale = scale.scale;
  for (int64_t i = 0; i < kSuperColumns / kBlockColumns; ++i) {
    const HalfSums sums = quantise(v + i * kBlockColumns, scale.to_q, out->q + i * kBlockColumns);
    out->half_sums[2 * i] = static_cast<int16_t>(sums.low);
    out->half_sums[2 * i + 1] = static_cast<int16_t>(sums.high);
    out->sums[i] = static_cast<int16_t>(sums.low + sums.high);
  }
}

#if defined(__AVX512BF16__)

// Fewer rows of x than kFewestInTile do not use matrix tiles; after full tiles the minimum is
// kFewestInLastTile.
constexpr int64_t kFewestInTile = 10, kFewestInLastTile = 5;
// Rows of x in a tile: as many as it can hold, or kFewInTile where one or two such tiles hold all
// rows.
constexpr int64_t kFewInTile = 12;
constexpr int64_t rows_of_tile(int64_t num_rows) {
  const bool fill_one = num_rows <= kFewInTile;
  const bool fill_two = num_rows >= kTileSide + kFewestInLastTile && num_rows <= 2 * kFewInTile;
  return fill_one || fill_two ? kFewInTile : kTileSide;
}

#endif

template <>
struct Format<Panel> {
  using PackedX = uint8_t;

  // Rows of memory that num_rows rows take: tiles may read past the last row.
  static constexpr int64_t held(int64_t num_rows) {
#if defined(__AVX512BF16__)
    if (num_rows >= kFewestInTile) return ceil_div(num_rows, kTileSide) * kTileSide;
#endif
    return num_rows;
  }

  // stride: of the packed rows, which tells the blocks that they hold.
  template <typename T>
  static void pack(const T* row, int64_t n, int64_t stride, uint8_t* x) {
    const XRowSizes sizes = x_row_sizes(n);
    if (stride != sizes.super_blocks) {
      auto* block = reinterpret_cast<XBlock*>(x);
      for (int64_t k = 0; k < n; k += kBlockColumns) {
        alignas(64) float room[kBlockColumns];
        quantise_block(as_floats<kBlockColumns>(row + k, room), block++);
      }
    }
    if (stride != sizes.blocks) {
      auto* block = reinterpret_cast<XSuperBlock*>(x + stride - sizes.super_blocks);
      for (int64_t k = 0; k < n; k += kSuperColumns) {
        alignas(64) float room[kSuperColumns];
        quantise_super_block(as_floats<kSuperColumns>(row + k, room), block++);
      }
    }
  }
};

// The blocks of a packed row of x of one kind.
template <typename X>
inline const X* x_blocks(const uint8_t* row, int64_t stride, int64_t columns) {
  constexpr bool kIsSuper = sizeof(X) == sizeof(XSuperBlock);
  const int64_t first = kIsSuper ? stride - x_row_sizes(columns).super_blocks : 0;
  return reinterpret_cast<const X*>(row + first);
}
// The tables of a weight's rows: one, or one a layer.
struct Tables {
  const int64_t* first;
  int64_t num_rows, count = 1, stride = 0;
};
// The bytes of a packed row of x that holds the blocks that a weight's formats multiply.
inline int64_t x_stride_of(const Tables& tables, int64_t columns) {
  const XRowSizes sizes = x_row_sizes(columns);
  if (columns % kSuperColumns != 0) return sizes.blocks;
  uint64_t formats = 0, with_sub_scales = 0;
  for (int64_t i = 0; i < tables.count; ++i) {
    const int64_t* table = tables.first + i * tables.stride;
    for (int64_t row = 0; row < tables.num_rows; ++row) {
      formats |= uint64_t{1} << (table[row] >> 4 & 15);
    }
  }
  for (int i = 0; i < kNumBlockFormats; ++i) {
    with_sub_scales |= has_sub_scales(static_cast<BlockFormat>(i)) ? uint64_t{1} << i : 0;
  }
  return (formats & ~with_sub_scales ? sizes.blocks : 0) +
         (formats & with_sub_scales ? sizes.super_blocks : 0);
}

template <>
struct WeightRows<Panel> {
  const uint8_t* bytes;
  const int64_t* table;  // [num_rows]

  // The panel that row i is in.
  const Panel* row(int64_t i) const {
    return reinterpret_cast<const Panel*>(bytes + row_place(table[i]).offset);
  }
  WeightRows from(int64_t i) const { return {bytes, table + i}; }
};
template <>
inline WeightRows<Panel> weight_rows(const void* data, int64_t, const float*,
                                     const int64_t* table) {
  return {static_cast<const uint8_t*>(data), table};
}

#if defined(__AVX512BF16__)

// Tiles of a product with a panel of blocks of 32 columns: tile 0 has sums, then come the left
// factor, a block of `rows` rows of x, and the right one, a block of the panel.
constexpr int kLeftTile = 1, kRightTile = 2;
constexpr TileSizes panel_tiles(int64_t rows) {
  TileSizes sizes;
  sizes.set(0, rows, kTileRowBytes);
  sizes.set(kLeftTile, rows, kBlockColumns);
  sizes.set(kRightTile, kBlockColumns / 4, kTileRowBytes);
  return sizes;
}

template <>
struct Unit<Panel> {
  static bool uses_tiles() { return tiles_in_use() != Tiles::kNone; }
  explicit Unit(int64_t num_rows)
      : tiles(num_rows < kFewestInTile ? Tiles::kNone : tiles_in_use()),
        tile_rows(rows_of_tile(num_rows)) {}
  ~Unit() {
    if (tiles == Tiles::kHardware && is_set_) TileHardware::end();
  }
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  // Sets the sizes of tiles that products of a format take.
  void set_tiles(BlockFormat format) const {
    const bool whole = has_sub_scales(format);
    if (tiles == Tiles::kNone || (is_set_ && is_whole_ == whole)) return;
    const TileSizes sizes = whole ? whole_tiles() : panel_tiles(tile_rows);
    if (tiles == Tiles::kHardware) TileHardware::begin(sizes);
    if (tiles == Tiles::kModel) TileModel::begin(sizes);
    is_set_ = true;
    is_whole_ = whole;
  }

  const Tiles tiles;
  const int64_t tile_rows;

 private:
  mutable bool is_set_ = false, is_whole_ = false;
};

#else

template <>
struct Unit<Panel> {
  static bool uses_tiles() { return false; }
  explicit Unit(int64_t) {}
  void set_tiles(BlockFormat) const {}
  static constexpr Tiles tiles = Tiles::kNone;
  static constexpr int64_t tile_rows = 0;
};

#endif

// With this many rows of x or more, two panels are multiplied at a time, where registers are many.
#if defined(__AVX512VNNI__)
constexpr int64_t kFewestOfTwoPanels = 9;
#else
constexpr int64_t kFewestOfTwoPanels = INT64_MAX;
#endif

void multiply_panel(BlockFormat format, const PanelProduct& product);

// Stores the sums of row b of x with all rows of the panel, of which the product may want only
// some.
inline void store_row(const PanelProduct& product, int64_t b, const float* sums) {
  float* out = product.out + b * product.out_stride;
  if (product.count == kPanelRows) {
    __builtin_memcpy(out, sums, kPanelRows * sizeof(float));
    return;
  }
  for (int64_t r = 0; r < product.count; ++r) out[r] = sums[product.first + r];
}

// While a panel is multiplied, memory is prefetched from this many bytes after the start of the
// next panel: a panel of few columns is finished before its prefetches arrive.
constexpr int64_t kFurther = 4096;

// How many of the first rows of a table follow one another in memory.
inline int64_t rows_in_order(const int64_t* table, int64_t most) {
  int64_t count = 1;
  while (count < most && table[count] == table[0] + count) ++count;
  return count;
}

// Whether the first rows of a table are all rows of a panel, in order: without an early exit, so
// that it takes a few vectors.
inline bool is_whole_panel(const int64_t* table) {
  int64_t off = 0;
  for (int64_t i = 0; i < kPanelRows; ++i) off |= table[i] ^ (table[0] + i);
  return off == 0;
}

// How many of the first rows of a table, num_rows of which are left, are multiplied together.
inline int64_t rows_together(const int64_t* table, int64_t lane, int64_t num_rows) {
  if (lane == 0 && num_rows >= kPanelRows && is_whole_panel(table)) return kPanelRows;
  return rows_in_order(table, min_of(kPanelRows - lane, num_rows));
}

// out[b, r]: [num_batch, num_rows] with row stride out_stride, of rows of w and packed x:
// [num_batch, n packed]. Adjacent rows of a panel are multiplied together. `next`: the panel that
// is read after these rows; may be null.
inline void multiply(const Unit<Panel>& unit, const WeightRows<Panel>& w, int64_t num_rows,
                     const uint8_t* x, int64_t x_stride, int64_t num_batch, int64_t n,
                     const Panel* next, float* out, int64_t out_stride) {
  const bool takes_two = unit.tiles == Tiles::kNone && num_batch >= kFewestOfTwoPanels;
  for (int64_t r = 0; r < num_rows;) {
    const RowPlace place = row_place(w.table[r]);
    const int64_t count = rows_together(w.table + r, place.lane, num_rows - r);
    const uint8_t* second = nullptr;
    if (takes_two && count == kPanelRows && num_rows - r >= 2 * kPanelRows) {
      const RowPlace next_place = row_place(w.table[r + kPanelRows]);
      if (next_place.format == place.format && next_place.lane == 0 &&
          is_whole_panel(w.table + r + kPanelRows)) {
        second = w.bytes + next_place.offset;
      }
    }
    const int64_t done = second ? 2 * kPanelRows : count;
    const Panel* after = r + done < num_rows ? w.row(r + done) : next;
    const uint8_t* ahead = after ? reinterpret_cast<const uint8_t*>(after) + kFurther : nullptr;
    unit.set_tiles(place.format);
    multiply_panel(place.format,
                   {w.bytes + place.offset, second, n, place.lane, count, x, x_stride, num_batch,
                    ahead, out + r, out_stride, unit.tiles, unit.tile_rows});
    r += done;
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
