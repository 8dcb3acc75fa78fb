// Products of one panel of a packed weight, compiled once per format and number of rows of x.
#include "panel_gemm.h"
#include "panel_lanes.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// The 8 groups of columns of a block, as unsigned bytes. Always inline, as is what else a block
// takes: the compiler counts how often it could be, and each block's bytes would cross memory.
template <BlockFormat kFormat>
[[gnu::always_inline]] inline void unpack(const uint8_t* quants, const uint8_t* high_bits,
                                          Bytes* q) {
  if constexpr (kFormat == BlockFormat::kQ8_0) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) q[g] = load_bytes(quants + 64 * g);
    return;
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const Bytes both = load_bytes(quants + 64 * i);
    q[2 * i] = low_nibbles(both);
    q[2 * i + 1] = high_nibbles(both);
  }
  if constexpr (traits_of(kFormat).high_bits == 64) {
    const Bytes fifth = load_bytes(high_bits);
    q[0] = with_bits<4>(q[0], fifth, 0x10);
    q[1] = with_bits<3>(q[1], fifth, 0x10);
    q[2] = with_bits<2>(q[2], fifth, 0x10);
    q[3] = with_bits<1>(q[3], fifth, 0x10);
    q[4] = with_bits<0>(q[4], fifth, 0x10);
    q[5] = with_bits<-1>(q[5], fifth, 0x10);
    q[6] = with_bits<-2>(q[6], fifth, 0x10);
    q[7] = with_bits<-3>(q[7], fifth, 0x10);
  }
  if constexpr (traits_of(kFormat).high_bits == 128) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const Bytes top = load_bytes(high_bits + 64 * half);
      q[4 * half] = with_bits<4>(q[4 * half], top, 0x30);
      q[4 * half + 1] = with_bits<2>(q[4 * half + 1], top, 0x30);
      q[4 * half + 2] = with_bits<0>(q[4 * half + 2], top, 0x30);
      q[4 * half + 3] = with_bits<-2>(q[4 * half + 3], top, 0x30);
    }
  }
}

// The scales of kWidth rows' next block: w = quant * scale + minimum, of Q6_K `second` is the scale
// of the last 16 columns.
struct LaneScales {
  Vec scale, second;
};

// A part of a panel: kWidth of its rows.
struct PanelPart {
  const uint8_t *quants, *high_bits, *sub_scales, *scales;
  int64_t num_blocks;  // of kBlockColumns
};
inline PanelPart part_of(const uint8_t* panel, BlockFormat format, int64_t columns, int64_t lane) {
  const PanelPlanes planes = planes_of(format, columns);
  return {panel + 4 * lane, panel + planes.high_bits + 4 * lane, panel + planes.sub_scales + lane,
          panel + planes.scales + 2 * lane, columns / kBlockColumns};
}

template <BlockFormat kFormat>
[[gnu::always_inline]] inline LaneScales scales_of(const PanelPart& part, int64_t block) {
  constexpr BlockTraits kTraits = traits_of(kFormat);
  const uint8_t* scales = part.scales + block / (kTraits.columns / kBlockColumns) * kTraits.scales;
  const uint8_t* sub = part.sub_scales + block * kTraits.sub_scales;
  if constexpr (kFormat == BlockFormat::kQ6_K) {
    const Vec scale = load_half(scales);
    return {scale * load_signed(sub), scale * load_signed(sub + kPanelRows)};
  } else if constexpr (traits_of(kFormat).sub_scales > 0) {
    return {load_half(scales) * load_unsigned(sub),
            zero() - load_half(scales + 2 * kPanelRows) * load_unsigned(sub + kPanelRows)};
  } else if constexpr (has_minima(kFormat)) {
    return {load_half(scales), load_half(scales + 2 * kPanelRows)};
  } else {
    return {load_half(scales), zero()};
  }
}

// Adds a block's products with kRows rows of x, which take turns, to their totals.
template <BlockFormat kFormat, int kRows>
[[gnu::always_inline]] inline void multiply_abreast(const Bytes* q, const LaneScales& scales,
                                                    const XBlock* x, int64_t x_stride,
                                                    Vec* totals) {
  constexpr bool kHasHalves = kFormat == BlockFormat::kQ6_K;
  constexpr int kLargest = (1 << quant_bits(kFormat)) - 1;
  constexpr int kShift = quant_bits(kFormat) - 4;  // from 8 times the sum of x to the offset's
  constexpr bool kHasOffset = !has_minima(kFormat) && !(kTakes128 && kFormat == BlockFormat::kQ8_0);
  const int64_t bytes = x_stride * static_cast<int64_t>(sizeof(XBlock));
  Ints products[kRows], more[kRows];
#pragma GCC unroll 4
  for (int b = 0; b < kRows; ++b) {
    const XBlock& columns = x[b * x_stride];
    const int32_t first = kHasHalves ? columns.minus_8_low : kHasOffset ? columns.minus_8 : 0;
    products[b] = broadcast_shifted<kShift>(first);
    if constexpr (kHasHalves) {
      more[b] = broadcast_shifted<kShift>(columns.minus_8 - columns.minus_8_low);
    }
  }
  dot<kHasHalves ? 4 : 8, kLargest, kRows>(q, x->q, bytes, products);
  if constexpr (kHasHalves) dot<4, kLargest, kRows>(q + 4, x->q + 16, bytes, more);
#pragma GCC unroll 4
  for (int b = 0; b < kRows; ++b) {
    const XBlock& columns = x[b * x_stride];
    const Vec x_scale = broadcast(columns.scale);
    totals[b] = fma(to_vec(products[b]), scales.scale * x_scale, totals[b]);
    if constexpr (kHasHalves) {
      totals[b] = fma(to_vec(more[b]), scales.second * x_scale, totals[b]);
    }
    if constexpr (has_minima(kFormat)) {
      totals[b] = fma(scales.second, broadcast(columns.scaled_sum), totals[b]);
    }
  }
}

// The same of as many rows as registers hold totals of.
template <BlockFormat kFormat, int kBatch>
[[gnu::always_inline]] inline void multiply_block(const Bytes* q, const LaneScales& scales,
                                                  const XBlock* x, int64_t x_stride, Vec* totals) {
  constexpr int kMost = kFormat == BlockFormat::kQ6_K ? 1 : kRowsAbreast;
  constexpr int kRows = kBatch < kMost ? kBatch : kMost;
  multiply_abreast<kFormat, kRows>(q, scales, x, x_stride, totals);
  if constexpr (kBatch > kRows) {
    multiply_block<kFormat, kBatch - kRows>(q, scales, x + kRows * x_stride, x_stride,
                                            totals + kRows);
  }
}

// sums[b], of kWidth rows of a panel and kBatch rows of x. `ahead`: the panel to prefetch
// meanwhile; may be null. A function of its own, so that the compiler keeps the sums in registers.
template <BlockFormat kFormat, int kBatch>
[[gnu::noinline]] void multiply_part(const PanelPart& part, const XBlock* x, int64_t x_stride,
                                     const uint8_t* ahead, int64_t ahead_step, Vec* sums) {
  constexpr BlockTraits kTraits = traits_of(kFormat);
  Vec totals[kBatch];
#pragma GCC unroll 8
  for (int b = 0; b < kBatch; ++b) totals[b] = zero();
  const uint8_t *quants = part.quants, *high_bits = part.high_bits;
  for (int64_t i = 0; i < part.num_blocks; ++i, ++x) {
    if (ahead) {
      for (int64_t line = 0; line < ahead_step; line += 64) prefetch(ahead + line);
      ahead += ahead_step;
    }
    Bytes q[8];
    unpack<kFormat>(quants, high_bits, q);
    quants += kTraits.quants;
    high_bits += kTraits.high_bits;
    const LaneScales scales = scales_of<kFormat>(part, i);
    multiply_block<kFormat, kBatch>(q, scales, x, x_stride, totals);
  }
#pragma GCC unroll 8
  for (int b = 0; b < kBatch; ++b) sums[b] = totals[b];
}

// Rows of x from b on, at most kBatch; returns how many.
template <BlockFormat kFormat, int kBatch>
int64_t multiply_batch(const PanelProduct& product, int64_t b) {
  if constexpr (kBatch > 1) {
    if (product.num_batch - b < kBatch) return multiply_batch<kFormat, kBatch - 1>(product, b);
  }
  const int64_t num_blocks = product.columns / kBlockColumns;
  const uint8_t* ahead = b == 0 ? product.ahead : nullptr;
  const int64_t step = planes_of(kFormat, product.columns).bytes / num_blocks;
  alignas(64) float lanes[kBatch][kPanelRows];
  for (int64_t lane = 0; lane < kPanelRows; lane += kWidth) {
    Vec sums[kBatch];
    multiply_part<kFormat, kBatch>(part_of(product.panel, kFormat, product.columns, lane),
                                   product.x + b * product.x_stride, product.x_stride,
                                   lane == 0 ? ahead : nullptr, step, sums);
    for (int i = 0; i < kBatch; ++i) store(lanes[i] + lane, sums[i]);
  }
  for (int i = 0; i < kBatch; ++i) {
    float* out = product.out + (b + i) * product.out_stride;
    if (product.count == kPanelRows) {
      __builtin_memcpy(out, lanes[i], sizeof(lanes[i]));
      continue;
    }
    for (int64_t r = 0; r < product.count; ++r) out[r] = lanes[i][product.first + r];
  }
  return kBatch;
}

template <BlockFormat kFormat>
inline void multiply_panel(const PanelProduct& product) {
  for (int64_t b = 0; b < product.num_batch;) {
    b += multiply_batch<kFormat, kMaxPanelBatch>(product, b);
  }
}

}  // namespace

void multiply_panel(BlockFormat format, const PanelProduct& product) {
  switch (format) {
    case BlockFormat::kQ4_0:
      return multiply_panel<BlockFormat::kQ4_0>(product);
    case BlockFormat::kQ4_1:
      return multiply_panel<BlockFormat::kQ4_1>(product);
    case BlockFormat::kQ5_0:
      return multiply_panel<BlockFormat::kQ5_0>(product);
    case BlockFormat::kQ5_1:
      return multiply_panel<BlockFormat::kQ5_1>(product);
    case BlockFormat::kQ8_0:
      return multiply_panel<BlockFormat::kQ8_0>(product);
    case BlockFormat::kQ4_K:
      return multiply_panel<BlockFormat::kQ4_K>(product);
    case BlockFormat::kQ5_K:
      return multiply_panel<BlockFormat::kQ5_K>(product);
    case BlockFormat::kQ6_K:
      return multiply_panel<BlockFormat::kQ6_K>(product);
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
