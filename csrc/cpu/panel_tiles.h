// Products of a panel with 12 or 16 rows of x at a time on matrix tiles, bit for bit the same as
// with vectors: a tile's sums are the exact sums of a block, and are converted to floats in the
// same order. Formats with sub-scales: see super_tiles.h.
#pragma once

#include "super_tiles.h"

#if defined(__AVX512BF16__)

namespace eecore::cpu::EECORE_CAPABILITY {

// Blocks that are unpacked once for all rows of x; together with their part of 16 rows of x they
// stay in the first-level cache.
constexpr int64_t kStretch = 18;
// Blocks that are multiplied before the sums of one become floats, and the number of buffers for
// sums.
constexpr int64_t kDelay = 2, kWaiting = 4;

// A block of a panel as a right factor, signed, and its scales.
template <BlockFormat kFormat>
struct alignas(64) OpenBlock {
  uint8_t q[8][kTileRowBytes];
  float scale[kPanelRows], minimum[kPanelRows];
};

template <BlockFormat kFormat>
struct TileRoom {
  OpenBlock<kFormat> blocks[kStretch];
  SumTile<int32_t> sums[kWaiting];
  alignas(64) float totals[kMaxTileBatch][kPanelRows];
};

template <BlockFormat kFormat>
[[gnu::always_inline]] inline void open_block(const PanelPart& part, int64_t block,
                                              OpenBlock<kFormat>* out) {
  constexpr BlockTraits kTraits = traits_of(kFormat);
  const __m512i offset = _mm512_set1_epi8(static_cast<char>(quant_offset(kFormat)));
  Bytes q[8];
  unpack<kFormat>(part.quants + block * kTraits.quants, part.high_bits + block * kTraits.high_bits,
                  q);
#pragma GCC unroll 8
  for (int g = 0; g < 8; ++g) {
    if constexpr (!has_minima(kFormat)) q[g].v = _mm512_sub_epi8(q[g].v, offset);
    _mm512_store_si512(out->q[g], q[g].v);
  }
  const LaneScales scales = scales_of<kFormat>(part.scales + block * kTraits.scales);
  store(out->scale, scales.scale);
  if constexpr (has_minima(kFormat)) store(out->minimum, scales.minimum);
}

// sums: [rows of x, kPanelRows]
template <typename U, BlockFormat kFormat>
[[gnu::always_inline]] inline void multiply_open(const OpenBlock<kFormat>& block,
                                                 const XRows<kFormat>& x, int32_t* sums) {
  U::template load<kLeftTile>(x.first->q, x.stride);
  U::template load<kRightTile>(block.q[0], kTileRowBytes);
  U::template zero<0>();
  U::template multiply_bytes<0, kLeftTile, kRightTile>();
  U::template store<0>(sums);
}

template <BlockFormat kFormat, int kRows>
[[gnu::always_inline]] inline void add_sums(const OpenBlock<kFormat>& block, const int32_t* sums,
                                            XRows<kFormat> x, Vec* totals) {
  const Vec scale = load(block.scale);
  const Vec minimum = has_minima(kFormat) ? load(block.minimum) : zero();
#pragma GCC unroll 16
  for (int b = 0; b < kRows; ++b, x = x.from(1)) {
    // One address that advances: the compiler would keep 16 of them, and spill to vector registers.
    asm("" : "+r"(x.first));
    const Vec products = to_vec(Ints{_mm512_load_si512(sums + b * kPanelRows)});
    totals[b] = fma(products, scale * broadcast(x.first->scale), totals[b]);
    totals[b] = add_minima<kFormat>(minimum, *x.first, totals[b]);
  }
}

// Adds blocks [begin, begin + count) of a panel, count <= kStretch, times kRows rows of x to sums:
// [kRows, kPanelRows]. kOpens: the blocks are unpacked on the way, else they already are. A
// separate function, so that the compiler keeps the totals in registers.
template <typename U, BlockFormat kFormat, int kRows, bool kOpens>
[[gnu::noinline]] void multiply_stretch(TileRoom<kFormat>& room, const PanelPart& part,
                                        int64_t begin, int64_t count, XRows<kFormat> x,
                                        const uint8_t* ahead, float (*sums)[kPanelRows]) {
  Vec totals[kRows];
#pragma GCC unroll 16
  for (int b = 0; b < kRows; ++b) totals[b] = load(sums[b]);
  // While a block's sums become floats a later block is multiplied, and before that another one
  // unpacked: nothing waits for memory that was only just written.
  constexpr int64_t kLead = kOpens ? kDelay + 1 : kDelay;
  constexpr int64_t kBytes = bytes_of_block(kFormat);
  for (int64_t i = -kLead; i < count; ++i) {
    const int64_t opened = i + kLead, multiplied = i + kDelay;
    if (kOpens && opened < count) {
      if (ahead) {
        for (int64_t line = 0; line < kBytes; line += 64) prefetch(ahead + line);
        ahead += kBytes;
      }
      open_block(part, begin + opened, &room.blocks[opened]);
    }
    if (multiplied >= 0 && multiplied < count) {
      multiply_open<U>(room.blocks[multiplied], x.at(multiplied),
                       room.sums[multiplied % kWaiting].v);
    }
    if (i >= 0) {
      add_sums<kFormat, kRows>(room.blocks[i], room.sums[i % kWaiting].v, x.at(i), totals);
    }
  }
#pragma GCC unroll 16
  for (int b = 0; b < kRows; ++b) store(sums[b], totals[b]);
}

// Multiplies the first rows of x, kRows at a time; returns how many. Some of the last rows may be
// computed again, or be rows after the last one, of which nothing is kept.
template <typename U, BlockFormat kFormat, int kRows>
int64_t multiply_rows(const PanelProduct& product, const PanelPart& panel) {
  const int64_t rest = product.num_batch % kRows;
  const int64_t fewest = product.num_batch < kRows ? kFewestInTile : kFewestInLastTile;
  const int64_t num_batch = rest < fewest ? product.num_batch - rest : product.num_batch;
  if (num_batch == 0) return 0;
  const int64_t num_tiles = ceil_div(num_batch, kRows), last = max_of(num_batch - kRows, 0);
  auto& room = kept_by_thread<TileRoom<kFormat>>();
  __builtin_memset(room.totals, 0,
                   sizeof(room.totals[0]) * static_cast<uint64_t>(num_tiles * kRows));
  const int64_t num_stretches = ceil_div(panel.num_blocks, kStretch);
  for (int64_t stretch = 0; stretch < num_stretches; ++stretch) {
    const int64_t begin = stretch * panel.num_blocks / num_stretches;
    const int64_t count = (stretch + 1) * panel.num_blocks / num_stretches - begin;
    const uint8_t* ahead =
        product.ahead ? product.ahead + begin * bytes_of_block(kFormat) : nullptr;
    const XRows<kFormat> x = XRows<kFormat>(product, 0).at(begin);
    multiply_stretch<U, kFormat, kRows, true>(room, panel, begin, count, x, ahead, room.totals);
    for (int64_t tile = 1; tile < num_tiles; ++tile) {
      const int64_t first = min_of(tile * kRows, last);
      multiply_stretch<U, kFormat, kRows, false>(room, panel, begin, count, x.from(first), nullptr,
                                                 room.totals + tile * kRows);
    }
  }
  for (int64_t b = 0; b < num_batch; ++b) {
    const int64_t first = b / kRows * kRows;
    store_row(product, b, room.totals[first + b - min_of(first, last)]);
  }
  return num_batch;
}

template <typename U, BlockFormat kFormat>
int64_t multiply_with_tiles(const PanelProduct& product, const PanelPart& panel) {
  if constexpr (has_sub_scales(kFormat)) {
    if (product.num_batch < kFewestForSuperBlocks) return 0;
    multiply_super_blocks<U, kFormat>(product, panel);
    return product.num_batch;
  } else if (product.tile_rows == kFewInTile) {
    return multiply_rows<U, kFormat, kFewInTile>(product, panel);
  } else {
    return multiply_rows<U, kFormat, kTileSide>(product, panel);
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY

#endif
