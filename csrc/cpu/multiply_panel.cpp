// Products of one panel of a packed weight, compiled once per format and number of rows of x.
#include "panel_tiles.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// Adds a block's products with kRows rows of x, which take turns, to their totals.
template <BlockFormat kFormat, int kRows, typename Ahead>
[[gnu::always_inline]] inline void multiply_abreast(const Bytes* q, const LaneScales& scales,
                                                    const XBlock* x, int64_t x_stride, Ahead ahead,
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
  dot<kHasHalves ? 4 : 8, kLargest, kRows>(q, x->q, bytes, ahead, products);
  if constexpr (kHasHalves) {
    dot<4, kLargest, kRows>(q + 4, x->q + 16, bytes, ahead.from(4), more);
  }
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
template <BlockFormat kFormat, int kBatch, typename Ahead>
[[gnu::always_inline]] inline void multiply_block(const Bytes* q, const LaneScales& scales,
                                                  const XBlock* x, int64_t x_stride, Ahead ahead,
                                                  Vec* totals) {
  constexpr int kMost = kFormat == BlockFormat::kQ6_K ? 1 : kRowsAbreast;
  constexpr int kRows = kBatch < kMost ? kBatch : kMost;
  multiply_abreast<kFormat, kRows>(q, scales, x, x_stride, ahead, totals);
  if constexpr (kBatch > kRows) {
    multiply_block<kFormat, kBatch - kRows>(q, scales, x + kRows * x_stride, x_stride,
                                            Ahead{nullptr}, totals + kRows);
  }
}

// sums: [kBatch, kWidth] with row stride `stride`, those of kWidth rows of a panel and kBatch rows
// of x. `ahead`: what to ask for meanwhile, kNear: into the first-level cache; may be null. A
// function of its own, so that the compiler keeps the sums in registers.
template <BlockFormat kFormat, int kBatch, bool kNear>
[[gnu::noinline]] void multiply_part(const PanelPart& part, const XBlock* x, int64_t x_stride,
                                     const uint8_t* ahead, float* sums, int64_t stride) {
  using Ahead = BlockAhead<kFormat, kNear>;
  constexpr BlockTraits kTraits = traits_of(kFormat);
  Vec totals[kBatch];
#pragma GCC unroll 8
  for (int b = 0; b < kBatch; ++b) totals[b] = zero();
  const uint8_t *quants = part.quants, *high_bits = part.high_bits;
  const int64_t num_blocks = part.num_blocks;
  for (int64_t i = 0; i < num_blocks; ++i, ++x) {
    Bytes q[8];
    unpack<kFormat>(quants, high_bits, q);
    quants += kTraits.quants;
    high_bits += kTraits.high_bits;
    const LaneScales scales = scales_of<kFormat>(part, i);
    multiply_block<kFormat, kBatch>(q, scales, x, x_stride, Ahead{ahead}, totals);
    if (ahead) ahead += bytes_of_block(kFormat);
  }
#pragma GCC unroll 8
  for (int b = 0; b < kBatch; ++b) store(sums + b * stride, totals[b]);
}

// Rows of x from b on, at most kBatch; returns how many.
template <BlockFormat kFormat, int kBatch, bool kNear>
int64_t multiply_batch(const PanelProduct& product, const PanelPart& panel, int64_t b) {
  if constexpr (kBatch > 1) {
    const int64_t rest = product.num_batch - b;
    if (rest <= kBatch / 2) return multiply_batch<kFormat, kBatch / 2, kNear>(product, panel, b);
    if (rest < kBatch) return multiply_batch<kFormat, kBatch - 1, kNear>(product, panel, b);
  }
  const auto multiply_into = [&](float* sums, int64_t stride) {
    for (int64_t lane = 0; lane < kPanelRows; lane += kWidth) {
      multiply_part<kFormat, kBatch, kNear>(
          panel.from(lane), product.x + b * product.x_stride, product.x_stride,
          b == 0 && lane == 0 ? product.ahead : nullptr, sums + lane, stride);
    }
  };
  if (product.count == kPanelRows) {
    multiply_into(product.out + b * product.out_stride, product.out_stride);
    return kBatch;
  }
  alignas(64) float lanes[kBatch][kPanelRows];
  multiply_into(lanes[0], kPanelRows);
  for (int i = 0; i < kBatch; ++i) store_row(product, b + i, lanes[i]);
  return kBatch;
}

// Rows of x from b on.
template <BlockFormat kFormat, bool kNear>
inline void multiply_from(const PanelProduct& product, const PanelPart& panel, int64_t b) {
  while (b < product.num_batch) {
    b += multiply_batch<kFormat, kMaxPanelBatch, kNear>(product, panel, b);
  }
}

template <BlockFormat kFormat>
inline void multiply_panel(const PanelProduct& product) {
  const PanelPart panel = whole_panel(product.panel, kFormat, product.columns);
  int64_t b = 0;
#if defined(__AVX512BF16__)
  if (product.tiles == Tiles::kHardware) {
    b = multiply_with_tiles<TileHardware, kFormat>(product, panel);
  } else if (product.tiles == Tiles::kModel) {
    b = multiply_with_tiles<TileModel, kFormat>(product, panel);
  }
  if (kAsksFirstLevel) return multiply_from<kFormat, true>(product, panel, b);
#endif
  multiply_from<kFormat, false>(product, panel, b);
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
