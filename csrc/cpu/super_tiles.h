// Products of a panel of a format with sub-scales with many rows of x on matrix tiles, bit for bit
// the same as with vectors: sums of whole numbers over a super-block.
//
// Quants times sub-scales are whole numbers of up to 13 bits. A super-block of a panel is opened
// once for all rows of x: as two bytes of each such product, 7 bits in the lower one, that are two
// right factors. So a super-block of 32 rows of x and a panel takes 16 products of tiles, and its
// sums become floats once, while the unit multiplies the next rows.
#pragma once

#include "panel_blocks.h"
#include "tile_products.h"

#if defined(__AVX512BF16__)

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int64_t kSteps = kSuperColumns / kTileRowBytes;  // tiles of a super-block
constexpr int kLowBits = 7;
// Fewer rows of x take less time on vectors. By count: a super-block is opened in 64 groups of 12
// operations, 16 rows take 128 cycles of the unit, and a row 72 cycles on vectors.
constexpr int64_t kFewestForSuperBlocks = 13;
// Whether quants times sub-scales of a format fit into one byte.
constexpr bool is_one_byte(BlockFormat format) { return format == BlockFormat::kQ2_K; }

// What the sums of a super-block are multiplied with.
template <BlockFormat kFormat>
struct alignas(64) OpenScales {
  int32_t minima[kNumPairs<kFormat>][kPanelRows];  // see sum_factors
  float scale[kPanelRows], minimum[kPanelRows];
};

// Sums of up to 32 rows of x that are not floats yet.
template <BlockFormat kFormat>
struct WaitingRows {
  XRows<kFormat> x;
  const OpenScales<kFormat>* scales;
  const SumTile<int32_t>* sums;  // as store_sums stores them
  float (*totals)[kPanelRows];
  int64_t num_rows;  // a multiple of kTileSide
};

template <BlockFormat kFormat>
struct alignas(64) SuperRoom {
  uint8_t q[2][kSteps][kTileBytes];  // the lower and the upper bytes
  OpenScales<kFormat> scales[2];     // of this super-block and of the last one
  SumTile<int32_t> sums[2][4];
  float totals[kMaxTileBatch][kPanelRows];
};

// Quants of 4 columns of each row, times 16-bit factors, less 16-bit offsets, as lower and upper
// bytes.
[[gnu::always_inline]] inline void open_group(__m512i quants, __m512i factors, __m512i offsets,
                                              uint8_t* low, uint8_t* high) {
  const __m512i even_bytes = _mm512_set1_epi16(255);
  const __m512i even =
      _mm512_sub_epi16(_mm512_mullo_epi16(_mm512_and_si512(quants, even_bytes), factors), offsets);
  const __m512i odd =
      _mm512_sub_epi16(_mm512_mullo_epi16(_mm512_srli_epi16(quants, 8), factors), offsets);
  constexpr int kSelect = 0xca;  // the first of three decides which of the others
  const __m512i lower =
      _mm512_ternarylogic_epi32(even_bytes, even, _mm512_slli_epi16(odd, 8), kSelect);
  _mm512_store_si512(low, _mm512_and_si512(lower, _mm512_set1_epi8((1 << kLowBits) - 1)));
  _mm512_store_si512(high,
                     _mm512_ternarylogic_epi32(even_bytes, _mm512_srai_epi16(even, kLowBits),
                                               _mm512_slli_epi16(odd, 8 - kLowBits), kSelect));
}

template <BlockFormat kFormat>
inline void open_super_block(const PanelPart& part, int64_t i, SuperRoom<kFormat>& room) {
  constexpr BlockTraits kTraits = traits_of(kFormat);
  constexpr int64_t kBlocks = kSuperColumns / kBlockColumns;
  const uint8_t* sub_scales = part.sub_scales + i * kBlocks * kTraits.sub_scales;
  OpenScales<kFormat>& open = room.scales[i % 2];
  const LaneScales scales = scales_of<kFormat>(part.scales + i * kTraits.scales);
  store(open.scale, scales.scale);
  if constexpr (has_minima(kFormat)) {
    store(open.minimum, scales.minimum);
    for (int pair = 0; pair < kNumPairs<kFormat>; ++pair) {
      _mm512_store_si512(open.minima[pair], sum_factors<kFormat>(sub_scales, pair).v);
    }
  }
  const __m512i offset = _mm512_set1_epi16(static_cast<int16_t>(quant_offset(kFormat)));
  for (int64_t block = 0; block < kBlocks; ++block) {
    Bytes q[8];
    const int64_t at = i * kBlocks + block;
    unpack<kFormat>(part.quants + at * kTraits.quants, part.high_bits + at * kTraits.high_bits, q);
    Ints by_part[2];
    sub_scales_of<kFormat>(sub_scales + block * kTraits.sub_scales, by_part);
    const int64_t first = block % 2 * 8 * kTileRowBytes;
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const Ints factors = by_part[has_halves(kFormat) ? g / 4 : 0];
      const __m512i pairs = pairs_of(factors, factors).v;
      uint8_t* low = room.q[0][block / 2] + first + g * kTileRowBytes;
      if constexpr (is_one_byte(kFormat)) {
        // No product carries into the byte above it.
        _mm512_store_si512(low, _mm512_mullo_epi16(q[g].v, pairs));
      } else {
        const __m512i offsets =
            has_minima(kFormat) ? _mm512_setzero_si512() : _mm512_mullo_epi16(pairs, offset);
        open_group(q[g].v, pairs, offsets, low, room.q[1][block / 2] + first + g * kTileRowBytes);
      }
    }
  }
}

// Adds rows [begin, end) of those that wait to their totals.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline void add_waiting(const WaitingRows<kFormat>& waiting, int64_t begin,
                                               int64_t end) {
  constexpr int kPairs = has_minima(kFormat) ? kNumPairs<kFormat> : 0;
  const OpenScales<kFormat>& open = *waiting.scales;
  const LaneScales scales{load(open.scale), has_minima(kFormat) ? load(open.minimum) : zero()};
  for (int64_t b = begin; b < end; ++b) {
    const auto& x = waiting.x[b];
    const int64_t group = b / kTileSide * 2, first = b % kTileSide * kPanelRows;
    __m512i quants = _mm512_load_si512(waiting.sums[group].v + first);
    if constexpr (!is_one_byte(kFormat)) {
      const __m512i upper = _mm512_load_si512(waiting.sums[group + 1].v + first);
      quants = _mm512_add_epi32(quants, _mm512_slli_epi32(upper, kLowBits));
    }
    Ints minima = broadcast_shifted<0>(0);
#pragma GCC unroll 8
    for (int pair = 0; pair < kPairs; ++pair) {
      const Ints factors{_mm512_load_si512(open.minima[pair])};
      minima = add_pairs(minima, factors, part_sums<kFormat>(x) + 2 * pair);
    }
    float* total = waiting.totals[b];
    store(total, add_exact<kFormat>({quants}, minima, scales, broadcast(x.scale), load(total)));
  }
}

// Multiplies the open super-block with one or two times 16 rows of x, while the rows that wait
// become floats.
template <typename U, BlockFormat kFormat, bool kTwoGroups>
[[gnu::noinline]] void multiply_super(const SuperRoom<kFormat>& room, const XRows<kFormat>& x,
                                      const WaitingRows<kFormat>& waiting, SumTile<int32_t>* sums) {
  constexpr bool kTwoBytes = !is_one_byte(kFormat);
  const auto* q = reinterpret_cast<const uint8_t*>(x.first->q);
  const TileStream left[] = {{q, x.stride, kTileRowBytes},
                             {q + kTileSide * x.stride, x.stride, kTileRowBytes}};
  const TileStream right[] = {{room.q[0][0], kTileRowBytes, kTileBytes},
                              {room.q[1][0], kTileRowBytes, kTileBytes}};
  zero_sums<U, kTwoGroups, kTwoBytes>();
  const int64_t rows = waiting.num_rows / kSteps;
  multiply_streams<U, TileProduct::kBytesSS, TileProduct::kBytesSS, kTwoGroups, kTwoBytes>(
      left, right, kSteps,
      [&](int64_t step) { add_waiting<kFormat>(waiting, step * rows, (step + 1) * rows); });
  store_sums<U, kTwoGroups, kTwoBytes>(sums);
}

// Multiplies all rows of x; what rows after the last one give is not kept.
template <typename U, BlockFormat kFormat>
void multiply_super_blocks(const PanelProduct& product, const PanelPart& panel) {
  auto& room = kept_by_thread<SuperRoom<kFormat>>();
  const int64_t num_batch = product.num_batch, groups = ceil_div(num_batch, kTileSide);
  __builtin_memset(room.totals, 0,
                   sizeof(room.totals[0]) * static_cast<uint64_t>(groups * kTileSide));
  constexpr int64_t kBytes = bytes_of_block(kFormat) * kSuperColumns / kBlockColumns;
  const int64_t num_blocks = panel.num_blocks * kBlockColumns / kSuperColumns;
  const XRows<kFormat> x(product, 0);
  WaitingRows<kFormat> waiting{x, room.scales, room.sums[0], room.totals, 0};
  const uint8_t* ahead = product.ahead;
  int64_t parity = 0;
  for (int64_t i = 0; i < num_blocks; ++i) {
    if (ahead) {
      for (int64_t line = 0; line < kBytes; line += 64) prefetch(ahead + line);
      ahead += kBytes;
    }
    open_super_block(panel, i, room);
    for (int64_t group = 0; group < groups; group += 2, parity ^= 1) {
      const int64_t row = group * kTileSide;
      const bool two = group + 1 < groups;
      const XRows<kFormat> rows = x.at(i).from(row);
      if (two) {
        multiply_super<U, kFormat, true>(room, rows, waiting, room.sums[parity]);
      } else {
        multiply_super<U, kFormat, false>(room, rows, waiting, room.sums[parity]);
      }
      waiting = {rows, &room.scales[i % 2], room.sums[parity], room.totals + row,
                 two ? 2 * kTileSide : kTileSide};
    }
  }
  add_waiting<kFormat>(waiting, 0, waiting.num_rows);
  for (int64_t b = 0; b < num_batch; ++b) store_row(product, b, room.totals[b]);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY

#endif
