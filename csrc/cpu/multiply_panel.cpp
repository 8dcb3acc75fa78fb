// Products of one panel of a packed weight, compiled once per format and number of rows of x.
#include "panel_tiles.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

template <BlockFormat kFormat>
using DotOf = PanelDot<has_halves(kFormat) ? 4 : 8, quant_bits(kFormat), has_sub_scales(kFormat)>;

// Multiplies group kGroup of columns of a block of two parts with row b of x, whose columns of the
// block are q_of_x.
template <int kGroup, int kRows, typename Dot>
[[gnu::always_inline]] inline void add_group(const Bytes (*q)[2], const int8_t* q_of_x, int b,
                                             const Ints* factors, Dot (*products)[kRows]) {
  const Bytes group = broadcast_bytes(q_of_x + 4 * kGroup);
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p) {
    products[p][b].template add<kGroup % Dot::kGroups>(q[p][kGroup % 2], group, factors[p]);
  }
}

// Multiplies columns 8 * kTwo.. of a block of two parts with kRows rows of x. x: of the first row,
// the block's columns.
template <BlockFormat kFormat, int kTwo, int kRows, typename Dot>
[[gnu::always_inline]] inline void dot_of_two(const uint8_t* const* quants,
                                              const uint8_t* const* high_bits, const int8_t* x,
                                              int64_t x_stride, const Ints* factors,
                                              Dot (*products)[kRows]) {
  Bytes q[2][2];
  unpack_two<kFormat, kTwo>(quants[0], high_bits[0], q[0]);
  unpack_two<kFormat, kTwo>(quants[1], high_bits[1], q[1]);
#pragma GCC unroll 8
  for (int b = 0; b < kRows; ++b) {
    add_group<2 * kTwo>(q, x + b * x_stride, b, factors, products);
    if constexpr (!Dot::kTakesTurns) {
      add_group<2 * kTwo + 1>(q, x + b * x_stride, b, factors, products);
    }
  }
  if constexpr (Dot::kTakesTurns) {
#pragma GCC unroll 8
    for (int b = 0; b < kRows; ++b) {
      add_group<2 * kTwo + 1>(q, x + b * x_stride, b, factors, products);
    }
  }
}

// Adds a super-block to sums: [kRows, kWidth], row stride `stride`. exact: the whole-number sums of
// its quants times sub-scales, of kRows rows of x. kIsSigned: the quants have no offset.
template <BlockFormat kFormat, int kRows, bool kIsSigned>
[[gnu::always_inline]] inline void add_super_block(const uint8_t* sub_scales,
                                                   const LaneScales& scales,
                                                   const XRows<kFormat>& x, const Ints* exact,
                                                   float* sums, int64_t stride) {
  constexpr int kPairs = has_minima(kFormat) || !kIsSigned ? kNumPairs<kFormat> : 0;
  Ints factors[kNumPairs<kFormat>];
#pragma GCC unroll 8
  for (int i = 0; i < kPairs; ++i) factors[i] = sum_factors<kFormat>(sub_scales, i);
#pragma GCC unroll 8
  for (int b = 0; b < kRows; ++b) {
    Ints corrected = has_minima(kFormat) ? broadcast_shifted<0>(0) : exact[b];
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) {
      corrected = add_pairs(corrected, factors[i], part_sums<kFormat>(x[b]) + 2 * i);
    }
    const Vec total = load(sums + b * stride), x_scale = broadcast(x[b].scale);
    store(sums + b * stride, add_exact<kFormat>(has_minima(kFormat) ? exact[b] : corrected,
                                                corrected, scales, x_scale, total));
  }
}

// Memory that is prefetched during the product, in equal portions after each two groups of columns.
template <bool kNear>
struct LinesAhead {
  const uint8_t *next, *end, *until;
  int64_t step;  // bytes; 0: nothing is prefetched

  // Part `part` of num_parts equal parts of the memory at `bytes`, with block_bytes for each of
  // num_blocks, prefetched while these are multiplied. A division would take as long as much of a
  // short panel.
  LinesAhead(const uint8_t* bytes, int64_t block_bytes, int64_t part, int64_t num_parts,
             int64_t num_blocks) {
    const int64_t lines = bytes ? num_blocks * block_bytes / 64 : 0;
    next = until = bytes;
    end = bytes + 64 * lines;
    step = bytes ? ceil_div(block_bytes, 4) : 0;
    if (num_parts == 1) return;
    next = until = bytes + 64 * (lines * part / num_parts);
    end = bytes + 64 * (lines * (part + 1) / num_parts);
    step = ceil_div(end - next, 4 * num_blocks);
  }
  [[gnu::always_inline]] void ask() {
    until = end - until < step ? end : until + step;
    for (; next < until; next += 64) prefetch_weight<kNear>(next);
  }
};

// sums: [kBatch, 2 * kWidth] with row stride `stride`, for two parts of kWidth rows each and kBatch
// rows of x: a load of x, which takes as long as a product, serves both parts. A separate function,
// so that the compiler keeps the most in registers.
template <BlockFormat kFormat, int kBatch, bool kNear>
[[gnu::noinline]] void multiply_two_parts(const PanelPart* parts, XRows<kFormat> x,
                                          LinesAhead<kNear> ahead, float* sums, int64_t stride) {
  constexpr BlockTraits kTraits = traits_of(kFormat);
  using Dot = DotOf<kFormat>;
  Vec totals[2][kBatch];
#pragma GCC unroll 2
  for (auto& of_panel : totals) {
#pragma GCC unroll 8
    for (Vec& total : of_panel) total = zero();
  }
  const Ints ones[2] = {Dot::ones(), Dot::ones()};
  const uint8_t* quants[2] = {parts[0].quants, parts[1].quants};
  const uint8_t* high_bits[2] = {parts[0].high_bits, parts[1].high_bits};
  const int64_t num_blocks = parts[0].num_blocks;
  for (int64_t i = 0; i < num_blocks; ++i, ++x.first) {
    Dot products[2][kBatch];
    const auto offset_of = [&](int b) {
      return has_minima(kFormat) || Dot::kIsSigned ? 0 : x[b].minus_8;
    };
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) {
      products[0][b].begin(offset_of(b));
      products[1][b] = products[0][b];
    }
    const LaneScales scales[2] = {scales_of<kFormat>(parts[0].scales + i * kTraits.scales),
                                  scales_of<kFormat>(parts[1].scales + i * kTraits.scales)};
    dot_of_two<kFormat, 0>(quants, high_bits, x.first->q, x.stride, ones, products);
    ahead.ask();
    dot_of_two<kFormat, 1>(quants, high_bits, x.first->q, x.stride, ones, products);
    ahead.ask();
    dot_of_two<kFormat, 2>(quants, high_bits, x.first->q, x.stride, ones, products);
    ahead.ask();
    dot_of_two<kFormat, 3>(quants, high_bits, x.first->q, x.stride, ones, products);
    ahead.ask();
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) {
      const Vec x_scale = broadcast(x[b].scale);
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        const Vec product = to_vec(products[p][b].total(offset_of(b)));
        totals[p][b] = fma(product, scales[p].scale * x_scale, totals[p][b]);
      }
    }
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) {
      totals[0][b] = add_minima<kFormat>(scales[0].minimum, x[b], totals[0][b]);
      totals[1][b] = add_minima<kFormat>(scales[1].minimum, x[b], totals[1][b]);
    }
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      quants[p] += kTraits.quants;
      high_bits[p] += kTraits.high_bits;
    }
  }
#pragma GCC unroll 8
  for (int b = 0; b < kBatch; ++b) {
    store(sums + b * stride, totals[0][b]);
    store(sums + b * stride + kWidth, totals[1][b]);
  }
}

// The same for formats with sub-scales. Sums stay in memory: they change once in 256 columns.
template <BlockFormat kFormat, int kBatch, bool kNear>
  requires(has_sub_scales(kFormat))
[[gnu::noinline]] void multiply_two_parts(const PanelPart* parts, XRows<kFormat> x,
                                          LinesAhead<kNear> ahead, float* sums, int64_t stride) {
  constexpr BlockTraits kTraits = traits_of(kFormat);
  constexpr bool kHasHalves = has_halves(kFormat);
  using Dot = DotOf<kFormat>;
  for (int b = 0; b < kBatch; ++b) {
    store(sums + b * stride, zero());
    store(sums + b * stride + kWidth, zero());
  }
  const uint8_t* quants[2] = {parts[0].quants, parts[1].quants};
  const uint8_t* high_bits[2] = {parts[0].high_bits, parts[1].high_bits};
  const uint8_t* sub_scales[2] = {parts[0].sub_scales, parts[1].sub_scales};
  const int64_t num_blocks = parts[0].num_blocks * kBlockColumns / kSuperColumns;
  for (int64_t i = 0; i < num_blocks; ++i, ++x.first) {
    Dot products[2][kBatch];
#pragma GCC unroll 2
    for (auto& of_panel : products) {
#pragma GCC unroll 8
      for (Dot& product : of_panel) product.begin(0);
    }
    const int8_t* q_of_x = x.first->q;
#pragma GCC unroll 1
    for (int block = 0; block < kSuperColumns / kBlockColumns; ++block, q_of_x += kBlockColumns) {
      Ints factors[2][2], of_part[2];
      const auto begin = [&](int part) {
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
          of_part[p] = Dot::factors(factors[p][part]);
#pragma GCC unroll 8
          for (Dot& product : products[p]) product.begin_part();
        }
      };
      const auto end = [&] {
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 8
          for (Dot& product : products[p]) product.end_part(of_part[p]);
        }
      };
      sub_scales_of<kFormat>(sub_scales[0] + block * kTraits.sub_scales, factors[0]);
      sub_scales_of<kFormat>(sub_scales[1] + block * kTraits.sub_scales, factors[1]);
      begin(0);
      dot_of_two<kFormat, 0>(quants, high_bits, q_of_x, x.stride, of_part, products);
      ahead.ask();
      dot_of_two<kFormat, 1>(quants, high_bits, q_of_x, x.stride, of_part, products);
      ahead.ask();
      if constexpr (kHasHalves) {
        end();
        begin(1);
      }
      dot_of_two<kFormat, 2>(quants, high_bits, q_of_x, x.stride, of_part, products);
      ahead.ask();
      dot_of_two<kFormat, 3>(quants, high_bits, q_of_x, x.stride, of_part, products);
      ahead.ask();
      end();
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        quants[p] += kTraits.quants;
        high_bits[p] += kTraits.high_bits;
      }
    }
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      const LaneScales scales = scales_of<kFormat>(parts[p].scales + i * kTraits.scales);
      Ints exact[kBatch];
#pragma GCC unroll 8
      for (int b = 0; b < kBatch; ++b) exact[b] = products[p][b].total(0);
      add_super_block<kFormat, kBatch, Dot::kIsSigned>(sub_scales[p], scales, x, exact,
                                                       sums + p * kWidth, stride);
      sub_scales[p] += kSuperColumns / kBlockColumns * kTraits.sub_scales;
    }
  }
}

// Multiplies two parts with num_batch rows of x from b on, into sums; `ahead` as in
// multiply_two_parts.
template <BlockFormat kFormat, int kBatch, bool kNear>
void multiply_batch_of_two(const PanelProduct& product, const PanelPart* parts, int64_t b,
                           int64_t num_batch, const LinesAhead<kNear>& ahead, float* sums,
                           int64_t stride) {
  if constexpr (kBatch > 1) {
    if (num_batch < kBatch) {
      return multiply_batch_of_two<kFormat, kBatch - 1>(product, parts, b, num_batch, ahead, sums,
                                                        stride);
    }
  }
  multiply_two_parts<kFormat, kBatch, kNear>(parts, XRows<kFormat>(product, b), ahead, sums,
                                             stride);
}

// Multiplies two parts, all rows of their panels, with rows of x in groups as equal as possible,
// each of which prefetches its share of the next memory, block_bytes for each block.
template <BlockFormat kFormat, bool kNear>
void multiply_in_two(const PanelProduct& product, const PanelPart* parts, int64_t block_bytes) {
  constexpr int kBatch = DotOf<kFormat>::kBatch;
  const int64_t num_blocks = parts[0].num_blocks;
  const int64_t num_groups = ceil_div(product.num_batch, kBatch);
  for (int64_t group = 0, b = 0; group < num_groups; ++group) {
    const int64_t batch =
        num_groups == 1 ? product.num_batch : (product.num_batch + group) / num_groups;
    const LinesAhead<kNear> ahead(product.ahead, block_bytes, group, num_groups, num_blocks);
    float* const out = product.out + b * product.out_stride;
    if (product.count == kPanelRows) {
      multiply_batch_of_two<kFormat, kBatch>(product, parts, b, batch, ahead, out,
                                             product.out_stride);
    } else {
      alignas(64) float lanes[kBatch][2 * kWidth];
      multiply_batch_of_two<kFormat, kBatch>(product, parts, b, batch, ahead, lanes[0], 2 * kWidth);
      for (int64_t i = 0; i < batch; ++i) store_row(product, b + i, lanes[i]);
    }
    b += batch;
  }
}

#if defined(__AVX512VNNI__)

// sums: [kBatch, kWidth] with row stride `stride`, for kWidth rows of a panel and kBatch rows of x,
// which take turns. `ahead`: what to prefetch meanwhile, with kNear into the first-level cache; may
// be null. A separate function, so that the compiler keeps the sums in registers.
template <BlockFormat kFormat, int kBatch, bool kNear>
[[gnu::noinline]] void multiply_part(const PanelPart& part, XRows<kFormat> x, const uint8_t* ahead,
                                     float* sums, int64_t stride) {
  using Ahead = BlockAhead<kFormat, kNear>;
  constexpr BlockTraits kTraits = traits_of(kFormat);
  // From 8 times the sum of x to the multiple for the offset.
  constexpr int kShift = quant_bits(kFormat) - 4;
  Vec totals[kBatch];
#pragma GCC unroll 8
  for (int b = 0; b < kBatch; ++b) totals[b] = zero();
  const uint8_t *quants = part.quants, *high_bits = part.high_bits;
  const int64_t num_blocks = part.num_blocks;
  for (int64_t i = 0; i < num_blocks; ++i, ++x.first) {
    Bytes q[8];
    unpack<kFormat>(quants, high_bits, q);
    quants += kTraits.quants;
    high_bits += kTraits.high_bits;
    const LaneScales scales = scales_of<kFormat>(part.scales + i * kTraits.scales);
    Ints products[kBatch];
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) {
      products[b] = broadcast_shifted<kShift>(has_minima(kFormat) ? 0 : x[b].minus_8);
    }
    dot<8, kBatch>(q, x.first->q, x.stride, Ahead{ahead}, products);
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) {
      totals[b] = fma(to_vec(products[b]), scales.scale * broadcast(x[b].scale), totals[b]);
      totals[b] = add_minima<kFormat>(scales.minimum, x[b], totals[b]);
    }
    if (ahead) ahead += bytes_of_block(kFormat);
  }
#pragma GCC unroll 8
  for (int b = 0; b < kBatch; ++b) store(sums + b * stride, totals[b]);
}

// The same for formats with sub-scales; see multiply_two_parts.
template <BlockFormat kFormat, int kBatch, bool kNear>
  requires(has_sub_scales(kFormat))
[[gnu::noinline]] void multiply_part(const PanelPart& part, XRows<kFormat> x, const uint8_t* ahead,
                                     float* sums, int64_t stride) {
  using Ahead = BlockAhead<kFormat, kNear>;
  constexpr BlockTraits kTraits = traits_of(kFormat);
  constexpr int kGroups = DotOf<kFormat>::kGroups;
  for (int b = 0; b < kBatch; ++b) store(sums + b * stride, zero());
  const uint8_t *quants = part.quants, *high_bits = part.high_bits, *sub_scales = part.sub_scales;
  const int64_t num_blocks = part.num_blocks * kBlockColumns / kSuperColumns;
  for (int64_t i = 0; i < num_blocks; ++i, ++x.first) {
    Ints exact[kBatch];
#pragma GCC unroll 8
    for (int b = 0; b < kBatch; ++b) exact[b] = broadcast_shifted<0>(0);
    const int8_t* q_of_x = x.first->q;
#pragma GCC unroll 1
    for (int block = 0; block < kSuperColumns / kBlockColumns; ++block, q_of_x += kBlockColumns) {
      Bytes q[8];
      unpack<kFormat>(quants, high_bits, q);
      quants += kTraits.quants;
      high_bits += kTraits.high_bits;
      Ints factors[2];
      sub_scales_of<kFormat>(sub_scales + block * kTraits.sub_scales, factors);
#pragma GCC unroll 2
      for (int g = 0; g < 8; g += kGroups) {
        Ints products[kBatch];
#pragma GCC unroll 8
        for (int b = 0; b < kBatch; ++b) products[b] = broadcast_shifted<0>(0);
        dot<kGroups, kBatch>(q + g, q_of_x + 4 * g, x.stride, Ahead{ahead}.from(g), products);
#pragma GCC unroll 8
        for (int b = 0; b < kBatch; ++b) {
          exact[b] = add_scaled(exact[b], products[b], factors[g / kGroups]);
        }
      }
      if (ahead) ahead += bytes_of_block(kFormat);
    }
    const LaneScales scales = scales_of<kFormat>(part.scales + i * kTraits.scales);
    add_super_block<kFormat, kBatch, false>(sub_scales, scales, x, exact, sums, stride);
    sub_scales += kSuperColumns / kBlockColumns * kTraits.sub_scales;
  }
}

// Multiplies at most kBatch rows of x from b on; returns how many.
template <BlockFormat kFormat, int kBatch, bool kNear>
int64_t multiply_batch(const PanelProduct& product, const PanelPart& panel, int64_t b) {
  if constexpr (kBatch > 1) {
    const int64_t rest = product.num_batch - b;
    if (rest <= kBatch / 2) return multiply_batch<kFormat, kBatch / 2, kNear>(product, panel, b);
    if (rest < kBatch) return multiply_batch<kFormat, kBatch - 1, kNear>(product, panel, b);
  }
  const auto multiply_into = [&](float* sums, int64_t stride) {
    for (int64_t lane = 0; lane < kPanelRows; lane += kWidth) {
      multiply_part<kFormat, kBatch, kNear>(panel.from(lane), XRows<kFormat>(product, b),
                                            b == 0 && lane == 0 ? product.ahead : nullptr,
                                            sums + lane, stride);
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

#endif

// Multiplies the rows of x from b on.
template <BlockFormat kFormat, bool kNear>
inline void multiply_from(const PanelProduct& product, const PanelPart& panel,
                          [[maybe_unused]] int64_t b) {
  constexpr int64_t kBytes = bytes_of_block(kFormat);
#if defined(__AVX512VNNI__)
  if (product.second) {
    const PanelPart parts[] = {panel, whole_panel(product.second, kFormat, product.columns)};
    return multiply_in_two<kFormat, kNear>(product, parts, 2 * kBytes);
  }
  while (b < product.num_batch) {
    b += multiply_batch<kFormat, kMaxPanelBatch, kNear>(product, panel, b);
  }
#else
  const PanelPart halves[] = {panel, panel.from(kWidth)};
  multiply_in_two<kFormat, kNear>(product, halves, kBytes);
#endif
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
#if defined(EECORE_HANDS_OVER)
  switch (active_capability()) {
    case Capability::kAvxVnni:
      return avx_vnni::multiply_panel(format, product);
    case Capability::kAvxVnniModel:
      return avx_vnni_model::multiply_panel(format, product);
    default:
      break;
  }
#endif
  dispatch_format(format, [&]<BlockFormat kFormat>() { multiply_panel<kFormat>(product); });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
