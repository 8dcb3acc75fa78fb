// A panel block by block: its quants as bytes, its scales as floats.
#pragma once

#include "panel_gemm.h"
#include "panel_lanes.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Two groups of columns of a block, 2 * kTwo and the next, as unsigned bytes. Always inlined, like
// the other functions on a block: with many uses the compiler would not inline it, and each block's
// bytes would go through memory.
template <BlockFormat kFormat, int kTwo>
[[gnu::always_inline]] inline void unpack_two(const uint8_t* quants, const uint8_t* high_bits,
                                              Bytes* q) {
  constexpr int kLow = low_bits(kFormat);
  if constexpr (kLow == 8) {
    q[0] = load_bytes(quants + 128 * kTwo);
    q[1] = load_bytes(quants + 128 * kTwo + 64);
    return;
  } else if constexpr (kLow == 4) {
    const Bytes both = load_bytes(quants + 64 * kTwo);
    q[0] = low_nibbles(both);
    q[1] = high_nibbles(both);
  } else {
    const Bytes four = load_bytes(quants + 64 * (kTwo / 2));
    q[0] = with_bits<-4 * (kTwo % 2)>(Bytes{}, four, 3);
    q[1] = with_bits<-4 * (kTwo % 2) - 2>(Bytes{}, four, 3);
  }
  if constexpr (traits_of(kFormat).high_bits == 64) {
    const Bytes one = load_bytes(high_bits);
    q[0] = with_bits<kLow - 2 * kTwo>(q[0], one, 1 << kLow);
    q[1] = with_bits<kLow - 1 - 2 * kTwo>(q[1], one, 1 << kLow);
  }
  if constexpr (traits_of(kFormat).high_bits == 128) {
    const Bytes top = load_bytes(high_bits + 64 * (kTwo / 2));
    q[0] = with_bits<4 - 4 * (kTwo % 2)>(q[0], top, 0x30);
    q[1] = with_bits<2 - 4 * (kTwo % 2)>(q[1], top, 0x30);
  }
  if constexpr (has_table(kFormat)) {
    static constexpr QuantTable kTable = table_of(kFormat);
    q[0] = taken_from(kTable.quants, q[0]);
    q[1] = taken_from(kTable.quants, q[1]);
  }
}

// The 8 groups of columns of a block.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline void unpack(const uint8_t* quants, const uint8_t* high_bits,
                                          Bytes* q) {
  unpack_two<kFormat, 0>(quants, high_bits, q);
  unpack_two<kFormat, 1>(quants, high_bits, q + 2);
  unpack_two<kFormat, 2>(quants, high_bits, q + 4);
  unpack_two<kFormat, 3>(quants, high_bits, q + 6);
}

// The scales of kWidth rows' next block: w = quant * scale + minimum, for all columns, or for the
// first and the last 16.
struct LaneScales {
  Vec scale[2], minimum[2];
};

// Bytes of a panel's block, all planes together.
constexpr int64_t bytes_of_block(BlockFormat format) {
  const BlockTraits traits = traits_of(format);
  return traits.quants + traits.high_bits + traits.sub_scales +
         traits.scales * kBlockColumns / traits.columns;
}

// What is prefetched while a block is multiplied, as many bytes as the block has: some after each
// of its 8 groups of columns. Many prefetches at once would delay the loads that are needed now.
// kNear: into the first-level cache.
template <BlockFormat kFormat, bool kNear>
struct BlockAhead {
  const uint8_t* bytes;  // null: nothing
  int first = 0;         // group

  BlockAhead from(int group) const { return {bytes, group}; }
  [[gnu::always_inline]] void ask(int group) const {
    if (!bytes) return;
    constexpr int kLines = (bytes_of_block(kFormat) + 63) / 64;
    const int begin = (first + group) * kLines / 8, end = (first + group + 1) * kLines / 8;
#pragma GCC unroll 2
    for (int line = begin; line < end; ++line) prefetch_weight<kNear>(bytes + 64 * line);
  }
};

// A panel, or the part of it that begins at one of its rows.
struct PanelPart {
  const uint8_t *quants, *high_bits, *sub_scales, *scales;
  int64_t num_blocks;   // of kBlockColumns
  int64_t block_bytes;  // see bytes_of_block

  PanelPart from(int64_t lane) const {
    return {quants + 4 * lane, high_bits + 4 * lane, sub_scales + lane,
            scales + 2 * lane, num_blocks,           block_bytes};
  }
};
inline PanelPart whole_panel(const uint8_t* panel, BlockFormat format, int64_t columns) {
  const PanelPlanes planes = planes_of(format, columns);
  const int64_t num_blocks = columns / kBlockColumns;
  return {panel,      panel + planes.high_bits, panel + planes.sub_scales, panel + planes.scales,
          num_blocks, bytes_of_block(format)};
}

template <BlockFormat kFormat>
[[gnu::always_inline]] inline LaneScales scales_of(const PanelPart& part, int64_t block) {
  constexpr BlockTraits kTraits = traits_of(kFormat);
  const uint8_t* scales = part.scales + block / (kTraits.columns / kBlockColumns) * kTraits.scales;
  const uint8_t* sub = part.sub_scales + block * kTraits.sub_scales;
  if constexpr (kFormat == BlockFormat::kMXFP4) {
    return {{load(reinterpret_cast<const BFloat16*>(scales))}, {}};
  }
  const Vec scale = load_half(scales);
  if constexpr (kFormat == BlockFormat::kQ2_K) {
    const Vec minimum = load_half(scales + 2 * kPanelRows);
    const uint8_t* last = sub + kPanelRows;
    return {{scale * load_unsigned<0, 15>(sub), scale * load_unsigned<0, 15>(last)},
            {zero() - minimum * load_unsigned<4>(sub), zero() - minimum * load_unsigned<4>(last)}};
  } else if constexpr (has_minima(kFormat) && kTraits.sub_scales > 0) {
    return {{scale * load_unsigned(sub)},
            {zero() - load_half(scales + 2 * kPanelRows) * load_unsigned(sub + kPanelRows)}};
  } else if constexpr (has_minima(kFormat)) {
    return {{scale}, {load_half(scales + 2 * kPanelRows)}};
  } else if constexpr (has_halves(kFormat)) {
    return {{scale * load_signed(sub), scale * load_signed(sub + kPanelRows)}, {}};
  } else if constexpr (kTraits.sub_scales > 0) {
    return {{scale * load_signed(sub)}, {}};
  } else {
    return {{scale}, {}};
  }
}

// Adds a row of x times the minima, in float32 after all products of the block.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline Vec add_minima(const Vec (&minimum)[2], const XBlock& x, Vec total) {
  if constexpr (has_minima(kFormat) && has_halves(kFormat)) {
    total = fma(minimum[0], broadcast(scaled_sum_of(x, x.minus_8_low)), total);
    return fma(minimum[1], broadcast(scaled_sum_of(x, x.minus_8 - x.minus_8_low)), total);
  } else if constexpr (has_minima(kFormat)) {
    return fma(minimum[0], broadcast(x.scaled_sum), total);
  }
  return total;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
