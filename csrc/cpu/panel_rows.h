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
  for (int64_t k = 0; k < kBlockColumns; ++k) {
    const int64_t group = k / 4, byte = 4 * lane + k % 4;
    if (format == BlockFormat::kQ8_0) {
      q[k] = quants[64 * group + byte];
      continue;
    }
    int value = quants[64 * (group / 2) + byte] >> (group % 2 * 4) & 15;
    if (num_high == 64) value |= (high_bits[byte] >> group & 1) << 4;
    if (num_high == 128) {
      value |= (high_bits[64 * (group / 4) + byte] >> (group % 4 * 2) & 3) << 4;
    }
    q[k] = static_cast<uint8_t>(value);
  }
}

// out: [columns]
inline void unpack_row(const uint8_t* panel, const RowPlace& place, float* out) {
  const BlockFormat format = place.format;
  const BlockTraits& traits = traits_of(format);
  const PanelPlanes planes = planes_of(format, place.columns);
  const int64_t lane = place.lane, blocks_per_scale = traits.columns / kBlockColumns;
  for (int64_t i = 0; i < place.columns / kBlockColumns; ++i, out += kBlockColumns) {
    uint8_t q[kBlockColumns];
    unpack_quants(format, panel + i * traits.quants,
                  panel + planes.high_bits + i * traits.high_bits, lane, q);
    const uint8_t* scales = panel + planes.scales + i / blocks_per_scale * traits.scales + 2 * lane;
    const uint8_t* sub = panel + planes.sub_scales + i * traits.sub_scales + lane;
    float scale = half_to_float(scales), last_scale = scale;
    if (format == BlockFormat::kQ6_K) {
      last_scale = scale * static_cast<float>(static_cast<int8_t>(sub[kPanelRows]));
      scale *= static_cast<float>(static_cast<int8_t>(sub[0]));
    } else if (traits.sub_scales > 0) {
      last_scale = scale *= static_cast<float>(sub[0]);
    }
    float minimum = has_minima(format) ? half_to_float(scales + 2 * kPanelRows) : 0.0f;
    if (has_minima(format) && traits.sub_scales > 0) {
      minimum = 0.0f - minimum * static_cast<float>(sub[kPanelRows]);
    }
    const int offset = quant_offset(format);
    for (int64_t k = 0; k < kBlockColumns; ++k) {
      const float product =
          (k < kBlockColumns / 2 ? scale : last_scale) * static_cast<float>(q[k] - offset);
      out[k] = has_minima(format) ? product + minimum : product;
    }
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
