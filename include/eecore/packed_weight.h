// Packed weights: a weight in blocks of 4 to 8 bits, as GGUF files have them, laid out so that a
// product reads it in order and needs no sum across a vector.
//
// A panel is kPanelRows rows, all columns; rows of zeros fill the last panel of a weight. Its
// planes follow one another, each in ascending columns:
//   quants      per 32 columns: 64 bytes are 4 columns of each row, row by row; two such groups
//               share them as low and high nibbles. Of Q8_0 a group has its own, 128 added.
//   high bits   per 32 columns: bytes in the order of a group, of Q5 one bit for each of its 8
//               groups; of Q6_K two bits for each of 4, then the same of the other 4
//   sub-scales  of K formats, per 32 columns: 16 bytes, one a row, of scales, then of minima (of
//               Q6_K scales of the first, then of the last 16 columns)
//   scales      float16 [16], and minima of formats that have them, per block
// A row of floats has the values that the block format defines; nothing is rounded.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define EECORE_HOST_DEVICE __host__ __device__
#else
#define EECORE_HOST_DEVICE
#endif

namespace eecore {

enum class BlockFormat : int8_t { kQ4_0, kQ4_1, kQ5_0, kQ5_1, kQ8_0, kQ4_K, kQ5_K, kQ6_K };
constexpr int kNumBlockFormats = 8;
constexpr int64_t kPanelRows = 16;
// Columns that share a scale, or in K formats a sub-scale; half as many in Q6_K.
constexpr int64_t kBlockColumns = 32;

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
};
constexpr const BlockTraits& traits_of(BlockFormat format) {
  return kBlockTraits[static_cast<int>(format)];
}

// Whether w = quant * scale + minimum; else w = (quant - quant_offset) * scale.
constexpr bool has_minima(BlockFormat format) {
  return format == BlockFormat::kQ4_1 || format == BlockFormat::kQ5_1 ||
         format == BlockFormat::kQ4_K || format == BlockFormat::kQ5_K;
}
constexpr int quant_bits(BlockFormat format) {
  const BlockTraits& traits = traits_of(format);
  return traits.quants == 512 ? 8 : 4 + static_cast<int>(traits.high_bits / 64);
}
constexpr int quant_offset(BlockFormat format) {
  return has_minima(format) ? 0 : 1 << (quant_bits(format) - 1);
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
