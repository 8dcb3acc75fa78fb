// pack_weight on the CPU: unpacks a file's blocks, 16 rows at a time, and lays them out as a panel.
// Threads share the panels.
#include "panel_lanes.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// 32 columns of a row as stored in a file: quants that are not negative, and its scales.
struct RowBlock {
  alignas(16) uint8_t q[kBlockColumns];
  const uint8_t* scale;  // a float16, and after it a minimum where there are minima
  uint8_t sub[2];        // sub-scales, as a panel has them
};

// The low and the high nibbles of 16 bytes; bytes: [16].
void take_nibbles(const uint8_t* bytes, uint8_t* q) {
  for (int i = 0; i < 16; ++i) {
    q[i] = bytes[i] & 15;
    q[i + 16] = static_cast<uint8_t>(bytes[i] >> 4);
  }
}

// Puts bit i of a number of 32 bits into bit 4 of q[i].
void add_fifth_bits(const uint8_t* bytes, uint8_t* q) {
  uint32_t bits;
  __builtin_memcpy(&bits, bytes, 4);
  for (int i = 0; i < kBlockColumns; ++i) q[i] |= static_cast<uint8_t>((bits >> i & 1) << 4);
}

// The 6-bit scale and minimum of sub-block i, out of 12 bytes.
void take_sub_scales(const uint8_t* packed, int64_t i, uint8_t* sub) {
  if (i < 4) {
    sub[0] = packed[i] & 63;
    sub[1] = packed[i + 4] & 63;
  } else {
    sub[0] = static_cast<uint8_t>((packed[i + 4] & 15) | (packed[i - 4] >> 6 << 4));
    sub[1] = static_cast<uint8_t>((packed[i + 4] >> 4) | (packed[i] >> 6 << 4));
  }
}

// The two bits of the 32 columns of part i, of which 4 share 32 bytes.
void take_two_bits(const uint8_t* bytes, int64_t i, uint8_t* q) {
  for (int k = 0; k < kBlockColumns; ++k) {
    q[k] = bytes[i / 4 * 32 + k] >> static_cast<int>(i % 4 * 2) & 3;
  }
}

// The 6-bit scale of 16 columns i, less 32, out of 12 bytes.
uint8_t half_scale(const uint8_t* packed, int64_t i) {
  const int low = packed[i % 8] >> (i / 8 * 4) & 15;
  return static_cast<uint8_t>((low | (packed[8 + i % 4] >> (i / 4 * 2) & 3) << 4) - 32);
}

// The 6-bit scale of sub-block i, less 32, out of 2 bytes of high bits and 4 of low ones.
uint8_t sub_scale(const uint8_t* packed, int64_t i) {
  const int low = packed[2 + i / 2] >> (i % 2 * 4) & 15;
  return static_cast<uint8_t>((low | (packed[i / 4] >> (i % 4 * 2) & 3) << 4) - 32);
}

// A power of two, times a half, of which the exponent is stored.
BFloat16 half_power(uint8_t exponent) {
  return {static_cast<uint16_t>(exponent < 2 ? 0x20 << exponent : (exponent - 1) << 7)};
}

// Columns 32 i and on of a row.
template <BlockFormat kFormat>
void take_block(const uint8_t* row, int64_t i, RowBlock* out) {
  constexpr BlockTraits kTraits = traits_of(kFormat);
  constexpr int64_t kPerBlock = kTraits.columns / kBlockColumns;
  const uint8_t* block = row + i / kPerBlock * kTraits.bytes;
  const int64_t part = i % kPerBlock;
  out->scale = block;
  if constexpr (kFormat == BlockFormat::kQ8_0) {
    for (int k = 0; k < kBlockColumns; ++k) out->q[k] = block[2 + k] ^ 0x80;
  } else if constexpr (kFormat == BlockFormat::kQ6_K) {
    const uint8_t* low = block + part / 4 * 64 + part % 2 * 32;
    const uint8_t* top = block + 128 + part / 4 * 32;
    const int low_shift = part % 4 / 2 * 4, top_shift = static_cast<int>(part % 4 * 2);
    for (int k = 0; k < kBlockColumns; ++k) {
      out->q[k] = static_cast<uint8_t>((low[k] >> low_shift & 15) | (top[k] >> top_shift & 3) << 4);
    }
    out->sub[0] = block[192 + 2 * part];
    out->sub[1] = block[193 + 2 * part];
    out->scale = block + 208;
  } else if constexpr (kFormat == BlockFormat::kQ2_K) {
    take_two_bits(block + 16, part, out->q);
    out->sub[0] = block[2 * part];
    out->sub[1] = block[2 * part + 1];
    out->scale = block + 80;
  } else if constexpr (kFormat == BlockFormat::kQ3_K) {
    take_two_bits(block + 32, part, out->q);
    for (int k = 0; k < kBlockColumns; ++k) out->q[k] |= (block[k] >> part & 1) << 2;
    out->sub[0] = half_scale(block + 96, 2 * part);
    out->sub[1] = half_scale(block + 96, 2 * part + 1);
    out->scale = block + 108;
  } else if constexpr (kFormat == BlockFormat::kIQ4_XS) {
    take_nibbles(block + 8 + 16 * part, out->q);
    out->sub[0] = sub_scale(block + 2, part);
  } else if constexpr (kFormat == BlockFormat::kMXFP4) {
    take_nibbles(block + 1, out->q);
  } else if constexpr (has_sub_scales(kFormat)) {
    constexpr bool kFive = kFormat == BlockFormat::kQ5_K;
    const uint8_t* low = block + (kFive ? 48 : 16) + part / 2 * 32;
    const int low_shift = static_cast<int>(part % 2 * 4);
    for (int k = 0; k < kBlockColumns; ++k) out->q[k] = low[k] >> low_shift & 15;
    if constexpr (kFive) {
      const uint8_t* fifth = block + 16;
      for (int k = 0; k < kBlockColumns; ++k) {
        out->q[k] |= static_cast<uint8_t>((fifth[k] >> part & 1) << 4);
      }
    }
    take_sub_scales(block + 4, part, out->sub);
  } else {
    constexpr int64_t kScales = has_minima(kFormat) ? 4 : 2;
    constexpr int64_t kFifth = kTraits.high_bits > 0 ? 4 : 0;
    take_nibbles(block + kScales + kFifth, out->q);
    if constexpr (kFifth > 0) add_fifth_bits(block + kScales, out->q);
  }
}

uint32_t word(const uint8_t* bytes) {
  uint32_t value;
  __builtin_memcpy(&value, bytes, 4);
  return value;
}

// One row's share of the groups of 32 columns; words are 4 columns of a row.
template <BlockFormat kFormat>
void put_quants(const uint8_t* q, int64_t lane, uint8_t* quants, uint8_t* high_bits) {
  constexpr int kLow = low_bits(kFormat);
  constexpr int64_t kHighBits = traits_of(kFormat).high_bits;
  const auto put = [lane](uint8_t* plane, int64_t group, uint32_t value) {
    __builtin_memcpy(plane + 64 * group + 4 * lane, &value, 4);
  };
  // Two bits of each of 4 groups share a word.
  const auto put_pairs = [&](uint8_t* plane, int first_bit) {
    for (int half = 0; half < 2; ++half) {
      uint32_t bits = 0;
      for (int g = 0; g < 4; ++g) {
        bits |= (word(q + 16 * half + 4 * g) >> first_bit & 0x03030303u) << 2 * g;
      }
      put(plane, half, bits);
    }
  };
  if constexpr (kLow == 8) {
    for (int g = 0; g < 8; ++g) put(quants, g, word(q + 4 * g));
  } else if constexpr (kLow == 4) {
    for (int g = 0; g < 4; ++g) {
      const uint32_t low = word(q + 8 * g) & 0x0f0f0f0fu, high = word(q + 8 * g + 4) & 0x0f0f0f0fu;
      put(quants, g, low | high << 4);
    }
  } else {
    put_pairs(quants, 0);
  }
  if constexpr (kHighBits == 64) {
    uint32_t bits = 0;
    for (int g = 0; g < 8; ++g) bits |= (word(q + 4 * g) >> kLow & 0x01010101u) << g;
    put(high_bits, 0, bits);
  }
  if constexpr (kHighBits == 128) put_pairs(high_bits, kLow);
}

// Rows of zeros are all zero bytes, because a scale of zero gives zeros.
template <BlockFormat kFormat>
void pack_panel(const PackWeightParams& params, int64_t first_row, uint8_t* panel) {
  constexpr BlockTraits kTraits = traits_of(kFormat);
  constexpr int64_t kPerBlock = kTraits.columns / kBlockColumns;
  const PanelPlanes planes = planes_of(kFormat, params.columns);
  const int64_t num_rows = min_of(kPanelRows, params.num_rows - first_row);
  __builtin_memset(panel, 0, static_cast<uint64_t>(planes.bytes));
  for (int64_t i = 0; i < params.columns / kBlockColumns; ++i) {
    uint8_t* quants = panel + i * kTraits.quants;
    uint8_t* high_bits = panel + planes.high_bits + i * kTraits.high_bits;
    uint8_t* sub = panel + planes.sub_scales + i * kTraits.sub_scales;
    uint8_t* scales = panel + planes.scales + i / kPerBlock * kTraits.scales;
    for (int64_t lane = 0; lane < num_rows; ++lane) {
      RowBlock block;
      take_block<kFormat>(params.blocks + (first_row + lane) * params.blocks_stride, i, &block);
      put_quants<kFormat>(block.q, lane, quants, high_bits);
      if constexpr (kFormat == BlockFormat::kMXFP4) {
        const BFloat16 scale = half_power(*block.scale);
        __builtin_memcpy(scales + 2 * lane, &scale, 2);
      } else {
        for (int64_t k = 0; k < kTraits.scales / (2 * kPanelRows); ++k) {
          __builtin_memcpy(scales + 2 * (k * kPanelRows + lane), block.scale + 2 * k, 2);
        }
      }
      for (int64_t k = 0; k < kTraits.sub_scales / kPanelRows; ++k) {
        sub[k * kPanelRows + lane] = block.sub[k];
      }
    }
  }
}

template <BlockFormat kFormat>
void pack(const PackWeightParams& params, const Parallel& parallel) {
  const int64_t panel_bytes = planes_of(kFormat, params.columns).bytes;
  const int64_t grain = parallel.bytes_per_range / panel_bytes + 1;
  parallel_for(parallel, ceil_div(params.num_rows, kPanelRows), grain,
               [&](int64_t begin, int64_t end) {
                 for (int64_t i = begin; i < end; ++i) {
                   const int64_t offset = params.offset + i * panel_bytes;
                   pack_panel<kFormat>(params, i * kPanelRows, params.packed + offset);
                 }
               });
  for (int64_t row = 0; row < params.num_rows; ++row) {
    const int64_t offset = params.offset + row / kPanelRows * panel_bytes;
    params.table[row] = packed_place({offset, params.columns, kFormat, row % kPanelRows});
  }
}

}  // namespace

void run_pack_weight(const PackWeightParams& params, const Parallel& parallel) {
  dispatch_format(params.format, [&]<BlockFormat kFormat>() { pack<kFormat>(params, parallel); });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
