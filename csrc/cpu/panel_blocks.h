// A panel block by block: its quants as bytes, its scales as floats.
#pragma once

#include <type_traits>

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

// The scales of kWidth rows' next block, or super-block: w = quant * scale + minimum, both times
// the sub-scales where there are any.
struct LaneScales {
  Vec scale, minimum;
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
  int64_t num_blocks;  // of kBlockColumns

  PanelPart from(int64_t lane) const {
    return {quants + 4 * lane, high_bits + 4 * lane, sub_scales + lane, scales + 2 * lane,
            num_blocks};
  }
};
inline PanelPart whole_panel(const uint8_t* panel, BlockFormat format, int64_t columns) {
  const PanelPlanes planes = planes_of(format, columns);
  return {panel, panel + planes.high_bits, panel + planes.sub_scales, panel + planes.scales,
          columns / kBlockColumns};
}

// scales: of the block
template <BlockFormat kFormat>
[[gnu::always_inline]] inline LaneScales scales_of(const uint8_t* scales) {
  if constexpr (kFormat == BlockFormat::kMXFP4) {
    return {load(reinterpret_cast<const BFloat16*>(scales)), zero()};
  }
  if constexpr (!has_minima(kFormat)) return {load_half(scales), zero()};
  const Vec minimum = load_half(scales + 2 * kPanelRows);
  return {load_half(scales), has_sub_scales(kFormat) ? zero() - minimum : minimum};
}

// The sub-scales of 32 columns, or of the first and of the last 16. sub: of the block of 32.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline void sub_scales_of(const uint8_t* sub, Ints* scales) {
  if constexpr (kFormat == BlockFormat::kQ2_K) {
    scales[0] = load_unsigned<0, 15>(sub);
    scales[1] = load_unsigned<0, 15>(sub + kPanelRows);
  } else if constexpr (has_minima(kFormat)) {
    scales[0] = load_unsigned(sub);
  } else {
    scales[0] = load_signed(sub);
    if constexpr (has_halves(kFormat)) scales[1] = load_signed(sub + kPanelRows);
  }
}

// Sums of x are multiplied with these: with minima, or with sub-scales times the quants' offset.
// Two neighbouring parts of columns are a pair, of which a super-block has kNumPairs.
template <BlockFormat kFormat>
constexpr int kNumPairs = has_halves(kFormat) ? 8 : 4;
template <BlockFormat kFormat>
[[gnu::always_inline]] inline Ints sum_factors(const uint8_t* sub_scales, int i) {
  constexpr int64_t kBytes = traits_of(kFormat).sub_scales;
  if constexpr (kFormat == BlockFormat::kQ2_K) {
    const uint8_t* sub = sub_scales + i * kBytes;
    return pairs_of(load_unsigned<4>(sub), load_unsigned<4>(sub + kPanelRows));
  } else if constexpr (has_minima(kFormat)) {
    const uint8_t* minima = sub_scales + 2 * i * kBytes + kPanelRows;
    return pairs_of(load_unsigned(minima), load_unsigned(minima + kBytes));
  } else {
    constexpr int64_t kNext = has_halves(kFormat) ? kPanelRows : kBytes;
    const uint8_t* sub = sub_scales + (has_halves(kFormat) ? i : 2 * i) * kBytes;
    return scaled_pairs(pairs_of(load_signed(sub), load_signed(sub + kNext)),
                        -quant_offset(kFormat));
  }
}
// The sums of q over the columns that share a sub-scale.
template <BlockFormat kFormat>
inline const int16_t* part_sums(const XSuperBlock& x) {
  return has_halves(kFormat) ? x.half_sums : x.sums;
}

// Rows of x as a format multiplies them, from a block on.
template <BlockFormat kFormat>
struct XRows {
  using X = std::conditional_t<has_sub_scales(kFormat), XSuperBlock, XBlock>;
  const X* first;
  int64_t stride;  // bytes

  XRows(const PanelProduct& product, int64_t b)
      : first(x_blocks<X>(product.x + b * product.x_stride, product.x_stride, product.columns)),
        stride(product.x_stride) {}
  const X& operator[](int64_t b) const { return *from(b).first; }
  [[gnu::always_inline]] XRows from(int64_t b) const {
    return {reinterpret_cast<const X*>(reinterpret_cast<const uint8_t*>(first) + b * stride),
            stride};
  }
  XRows at(int64_t block) const { return {first + block, stride}; }

 private:
  XRows(const X* x, int64_t x_stride) : first(x), stride(x_stride) {}
};

// Adds a super-block's products to a total: the sums of quants, without their offset, times
// sub-scales, and of minima where there are any. The sums are whole numbers that become floats
// once: no order of summing them, nor matrix tiles, change the total.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline Vec add_exact(Ints quants, Ints minima, const LaneScales& scales,
                                            Vec x_scale, Vec total) {
  total = fma(to_vec(quants), scales.scale * x_scale, total);
  if constexpr (has_minima(kFormat)) {
    total = fma(to_vec(minima), scales.minimum * x_scale, total);
  }
  return total;
}

// Adds a row of x times the minima of a block of 32 columns, in float32.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline Vec add_minima(Vec minimum, const XBlock& x, Vec total) {
  if constexpr (has_minima(kFormat)) return fma(minimum, broadcast(x.scaled_sum), total);
  return total;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
