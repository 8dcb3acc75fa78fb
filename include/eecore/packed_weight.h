// Packed weights: a weight in blocks of 2 to 8 bits, as GGUF files have them, laid out so that a
// product reads it in order and needs no sum across a vector.
//
// A panel is kPanelRows rows, all columns; rows of zeros fill the last panel of a weight. Its
// planes follow one another, each in ascending columns:
//   quants      per 32 columns: 64 bytes are 4 columns of each row, row by row; two such groups
//               share them as low and high nibbles. Of Q8_0 a group has its own, 128 added. Of Q2_K
//               and Q3_K four groups share them, two bits each. Of formats whose quants are places
//               in a table (IQ4_NL, IQ4_XS, MXFP4) nibbles are the places.
//   high bits   per 32 columns: bytes in the order of a group, of Q5 and Q3_K one bit for each of
//               its 8 groups; of Q6_K two bits for each of 4, then the same of the other 4
//   sub-scales  of K formats, per 32 columns: 16 bytes, one a row, of scales, then of minima (of
//               Q6_K, Q3_K and Q2_K scales of the first, then of the last 16 columns, of Q2_K with
//               minima in their high nibbles; of IQ4_XS scales only)
//   scales      float16 [16], of MXFP4 bfloat16, and minima of formats that have them, per block
// A row of floats has the values that the block format defines; nothing is rounded.
#pragma once

#include <cstdint>
#include <utility>

#ifdef __CUDACC__
#define EECORE_HOST_DEVICE __host__ __device__
#else
#define EECORE_HOST_DEVICE
#endif

namespace eecore {

enum class BlockFormat : int8_t {
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kQ2_K,
  kQ3_K,
  kIQ4_NL,
  kIQ4_XS,
  kMXFP4
};
constexpr int kNumBlockFormats = 13;
constexpr int64_t kPanelRows = 16;
// Columns that share a scale, or a sub-scale; half as many in Q6_K, Q3_K and Q2_K.
constexpr int64_t kBlockColumns = 32;
// Columns of a super-block, the block of formats with sub-scales.
constexpr int64_t kSuperColumns = 256;

// The contents of a format's blocks. Sizes in bytes.
struct BlockTraits {
  const char* name;
  int64_t columns;  // of a block
  int64_t bytes;    // of a block in a file
  int64_t quants;   // of a panel per 32 columns, like the next two
  int64_t high_bits;
  int64_t sub_scales;
  int64_t scales;  // of a panel per block
};
constexpr BlockTraits kBlockTraits[kNumBlockFormats] = {
    {"Q4_0", 32, 18, 256, 0, 0, 32},     {"Q4_1", 32, 20, 256, 0, 0, 64},
    {"Q5_0", 32, 22, 256, 64, 0, 32},    {"Q5_1", 32, 24, 256, 64, 0, 64},
    {"Q8_0", 32, 34, 512, 0, 0, 32},     {"Q4_K", 256, 144, 256, 0, 32, 64},
    {"Q5_K", 256, 176, 256, 64, 32, 64}, {"Q6_K", 256, 210, 256, 128, 32, 32},
    {"Q2_K", 256, 84, 128, 0, 32, 64},   {"Q3_K", 256, 110, 128, 64, 32, 32},
    {"IQ4_NL", 32, 18, 256, 0, 0, 32},   {"IQ4_XS", 256, 136, 256, 0, 16, 32},
    {"MXFP4", 32, 17, 256, 0, 0, 32},
};
constexpr const BlockTraits& traits_of(BlockFormat format) {
  return kBlockTraits[static_cast<int>(format)];
}

// Calls body<kFormat>().
template <typename Body>
void dispatch_format(BlockFormat format, const Body& body) {
  const auto call = [&]<int kFormat>() {
    body.template operator()<static_cast<BlockFormat>(kFormat)>();
    return true;
  };
  const auto find = [&]<int... kFormats>(std::integer_sequence<int, kFormats...>) {
    ((static_cast<int>(format) == kFormats && call.template operator()<kFormats>()) || ...);
  };
  find(std::make_integer_sequence<int, kNumBlockFormats>());
}

// Whether w = quant * scale + minimum; else w = (quant - quant_offset) * scale.
constexpr bool has_minima(BlockFormat format) {
  return format == BlockFormat::kQ4_1 || format == BlockFormat::kQ5_1 ||
         format == BlockFormat::kQ4_K || format == BlockFormat::kQ5_K ||
         format == BlockFormat::kQ2_K;
}
// Whether the first and the last 16 of 32 columns have sub-scales of their own.
constexpr bool has_halves(BlockFormat format) {
  return format == BlockFormat::kQ6_K || format == BlockFormat::kQ3_K ||
         format == BlockFormat::kQ2_K;
}

// The values of formats whose quants are places in a table.
struct ValueTable {
  int8_t values[16];
};
constexpr ValueTable kNonLinear = {
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113}};
// Twice the numbers of 4 bits, of which 2 are the exponent's.
constexpr ValueTable kFloat4 = {{0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12}};
constexpr bool has_table(BlockFormat format) {
  return format == BlockFormat::kIQ4_NL || format == BlockFormat::kIQ4_XS ||
         format == BlockFormat::kMXFP4;
}

// Whether blocks are super-blocks, with whole numbers as scales of their parts.
constexpr bool has_sub_scales(BlockFormat format) { return traits_of(format).sub_scales > 0; }

// Bits of a quant in a panel's plane of quants.
constexpr int low_bits(BlockFormat format) {
  return static_cast<int>(traits_of(format).quants / 64);
}
// Bits of a quant in products: of formats with a table those of its values.
constexpr int quant_bits(BlockFormat format) {
  if (has_table(format)) return format == BlockFormat::kMXFP4 ? 5 : 8;
  return low_bits(format) + static_cast<int>(traits_of(format).high_bits / 64);
}
constexpr int quant_offset(BlockFormat format) {
  return has_minima(format) ? 0 : 1 << (quant_bits(format) - 1);
}
// A format's table as quants, which have quant_offset added.
struct QuantTable {
  uint8_t quants[16];
};
constexpr QuantTable table_of(BlockFormat format) {
  QuantTable table{};
  for (int i = 0; i < 16; ++i) {
    const int value = (format == BlockFormat::kMXFP4 ? kFloat4 : kNonLinear).values[i];
    table.quants[i] = static_cast<uint8_t>(value + quant_offset(format));
  }
  return table;
}

// The offsets of the planes in a panel, after its quants, and the panel's size, a multiple of 64.
struct PanelPlanes {
  int64_t high_bits, sub_scales, scales, bytes;
};
constexpr PanelPlanes planes_of(BlockFormat format, int64_t columns) {
  const BlockTraits& traits = traits_of(format);
  const int64_t blocks = columns / kBlockColumns;
  const int64_t high_bits = blocks * traits.quants;
  const int64_t sub_scales = high_bits + blocks * traits.high_bits;
  const int64_t scales = sub_scales + blocks * traits.sub_scales;
  const int64_t end = scales + columns / traits.columns * traits.scales;
  return {high_bits, sub_scales, scales, (end + 63) / 64 * 64};
}

// The place of a row: its panel in the packed bytes, and its number in the panel.
struct RowPlace {
  int64_t offset;   // of the panel in bytes, a multiple of 64
  int64_t columns;  // a multiple of kBlockColumns
  BlockFormat format;
  int64_t lane;  // 0..kPanelRows - 1
};
// The place as one number, an element of a weight's table. The next row of a panel has the next
// number.
constexpr int64_t kMaxPackedColumns = (int64_t{1} << 24) * kBlockColumns - kBlockColumns;
constexpr int64_t packed_place(const RowPlace& place) {
  return place.lane | static_cast<int64_t>(place.format) << 4 | place.columns / kBlockColumns << 8 |
         place.offset / 64 << 32;
}
EECORE_HOST_DEVICE constexpr RowPlace row_place(int64_t entry) {
  return {(entry >> 32) * 64, (entry >> 8 & 0xffffff) * kBlockColumns,
          static_cast<BlockFormat>(entry >> 4 & 15), entry & 15};
}

}  // namespace eecore
