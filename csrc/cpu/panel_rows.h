// One row of a panel as the floats that it stands for, rounded as the block formats define: to
// float32 after each product and sum.
#pragma once

#include "panel_lanes.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// The quants of 32 columns of a panel's row, with 128 or a similar offset still added. quants,
// high_bits: of the block.
inline void unpack_quants(BlockFormat format, const uint8_t* quants, const uint8_t* high_bits,
                          int64_t lane, uint8_t* q) {
  const int64_t num_high = traits_of(format).high_bits;
  const int low = low_bits(format), shared = 8 / low;  // groups that share 64 bytes
  const QuantTable table = table_of(format);
  for (int64_t k = 0; k < kBlockColumns; ++k) {
    const int64_t group = k / 4, byte = 4 * lane + k % 4;
    int value = quants[64 * (group / shared) + byte] >> (group % shared * low) & ((1 << low) - 1);
    if (num_high == 64) value |= (high_bits[byte] >> group & 1) << low;
    if (num_high == 128) {
      value |= (high_bits[64 * (group / 4) + byte] >> (group % 4 * 2) & 3) << low;
    }
    q[k] = has_table(format) ? table.quants[value] : static_cast<uint8_t>(value);
  }
}

// The scales of a panel's row in a block, for its first and its last 16 columns. scales,
// sub_scales: of the row.
struct RowScales {
  float scale[2], minimum[2];
};
inline RowScales row_scales(BlockFormat format, const uint8_t* scales, const uint8_t* sub_scales) {
  if (format == BlockFormat::kMXFP4) {
    const float scale = to_float(*reinterpret_cast<const BFloat16*>(scales));
    return {{scale, scale}, {}};
  }
  const float scale = half_to_float(scales);
  const float minimum = has_minima(format) ? half_to_float(scales + 2 * kPanelRows) : 0.0f;
  RowScales of_row{{scale, scale}, {minimum, minimum}};
  if (!has_sub_scales(format)) return of_row;
  for (int half = 0; half < 2; ++half) {
    const uint8_t sub = sub_scales[has_halves(format) ? half * kPanelRows : 0];
    if (!has_minima(format)) {
      of_row.scale[half] = scale * static_cast<float>(static_cast<int8_t>(sub));
      continue;
    }
    const bool is_nibble = has_halves(format);
    const int of_scale = is_nibble ? sub & 15 : sub;
    const int of_minimum = is_nibble ? sub >> 4 : sub_scales[kPanelRows];
    of_row.scale[half] = scale * static_cast<float>(of_scale);
    of_row.minimum[half] = 0.0f - minimum * static_cast<float>(of_minimum);
  }
  return of_row;
}

// out: [columns]
inline void unpack_row(const uint8_t* panel, const RowPlace& place, float* out) {
  const BlockFormat format = place.format;
  const BlockTraits& traits = traits_of(format);
  const PanelPlanes planes = planes_of(format, place.columns);
  const int64_t lane = place.lane, blocks_per_scale = traits.columns / kBlockColumns;
  const int offset = quant_offset(format);
  for (int64_t i = 0; i < place.columns / kBlockColumns; ++i, out += kBlockColumns) {
    uint8_t q[kBlockColumns];
    unpack_quants(format, panel + i * traits.quants,
                  panel + planes.high_bits + i * traits.high_bits, lane, q);
    const RowScales scales =
        row_scales(format, panel + planes.scales + i / blocks_per_scale * traits.scales + 2 * lane,
                   panel + planes.sub_scales + i * traits.sub_scales + lane);
    for (int64_t k = 0; k < kBlockColumns; ++k) {
      const int64_t half = k / (kBlockColumns / 2);
      const float product = scales.scale[half] * static_cast<float>(q[k] - offset);
      out[k] = has_minima(format) ? product + scales.minimum[half] : product;
    }
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
