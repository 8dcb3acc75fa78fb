// Blocks of packed weights (packed_weight.h) as a thread reads them: the 8 columns of a piece out
// of the 32 of a row, and their scales. Whole numbers of 2 to 8 bits are exact in any element type.
#pragma once

#include <type_traits>

#include "eecore/element.cuh"
#include "eecore/packed_weight.h"
#include "eecore/shared.cuh"
#include "eecore/whole_pair.cuh"

namespace eecore::cuda {

// The properties of a format that kernels use, in 16 bits, the lowest 6 of which are a quarter of
// the offset: device code cannot index kBlockTraits. Values of tables are as of 8 bits.
constexpr uint32_t k8Bits = 0x40, k5Bits = 0x80, k6Bits = 0x100, kMinima = 0x200,
                   kSubScales = 0x400, kHalves = 0x800, k2Bits = 0x1000, kTable = 0x2000,
                   kFloat4Table = 0x4000, kUsualBits = 0xfff;
constexpr uint64_t form_bits(BlockFormat format) {
  const BlockTraits& traits = traits_of(format);
  const int offset = has_table(format) ? 128 : quant_offset(format);
  return static_cast<uint64_t>(offset / 4) | (traits.quants == 512 ? k8Bits : 0) |
         (traits.high_bits == 64 ? k5Bits : 0) | (traits.high_bits == 128 ? k6Bits : 0) |
         (has_minima(format) ? kMinima : 0) | (traits.sub_scales > 0 ? kSubScales : 0) |
         (has_halves(format) ? kHalves : 0) | (traits.quants == 128 ? k2Bits : 0) |
         (has_table(format) ? kTable : 0) | (format == BlockFormat::kMXFP4 ? kFloat4Table : 0);
}
constexpr uint64_t four_forms(int first) {
  uint64_t all = 0;
  for (int i = 0; i < 4 && first + i < kNumBlockFormats; ++i) {
    all |= form_bits(static_cast<BlockFormat>(first + i)) << 16 * i;
  }
  return all;
}
template <BlockFormat kFormat>
constexpr uint32_t kFormBits = static_cast<uint32_t>(form_bits(kFormat));
template <int kFirst>
constexpr uint64_t kFourForms = four_forms(kFirst);
static_assert(kNumBlockFormats <= 16);

class PanelForm {
 public:
  PanelForm() = default;
  __device__ __forceinline__ explicit PanelForm(BlockFormat format) {
    const int i = static_cast<int>(format);
    const uint64_t four =
        i < 8 ? (i < 4 ? kFourForms<0> : kFourForms<4>) : (i < 12 ? kFourForms<8> : kFourForms<12>);
    bits_ = static_cast<uint32_t>(four >> 16 * (i % 4) & 0xffff);
  }
  // The form of a format that is known at compile time, so that the compiler resolves all queries.
  template <BlockFormat kFormat>
  __device__ __forceinline__ static PanelForm of() {
    PanelForm form;
    form.bits_ = kFormBits<kFormat>;
    return form;
  }
  // Whether the queries of usual() are those of this form.
  __device__ __forceinline__ bool is_usual() const { return (bits_ & ~kUsualBits) == 0; }
  // The form without what only few formats have, so that the compiler leaves that out.
  __device__ __forceinline__ PanelForm usual() const {
    PanelForm form;
    form.bits_ = bits_ & kUsualBits;
    return form;
  }
  __device__ __forceinline__ bool operator==(const PanelForm& other) const {
    return bits_ == other.bits_;
  }

  __device__ __forceinline__ bool has_8_bits() const { return (bits_ & k8Bits) != 0; }
  __device__ __forceinline__ bool has_5_bits() const { return (bits_ & k5Bits) != 0; }
  __device__ __forceinline__ bool has_6_bits() const { return (bits_ & k6Bits) != 0; }
  __device__ __forceinline__ bool has_2_bits() const { return (bits_ & k2Bits) != 0; }
  // Whether quants are places in a table, and whether in that of MXFP4.
  __device__ __forceinline__ bool has_table() const { return (bits_ & kTable) != 0; }
  __device__ __forceinline__ bool has_float4_table() const { return (bits_ & kFloat4Table) != 0; }
  // Whether whole numbers are signed bytes.
  __device__ __forceinline__ bool is_signed() const { return has_8_bits() || has_table(); }
  __device__ __forceinline__ bool has_minima() const { return (bits_ & kMinima) != 0; }
  __device__ __forceinline__ bool has_sub_scales() const { return (bits_ & kSubScales) != 0; }
  // Whether the last 16 columns of a block have a scale of their own.
  __device__ __forceinline__ bool has_halves() const { return (bits_ & kHalves) != 0; }
  // Whether they also have minima of their own.
  __device__ __forceinline__ bool has_half_minima() const { return has_2_bits() && has_minima(); }

  // The sizes that BlockTraits has.
  __device__ __forceinline__ int quants() const {
    return has_8_bits() ? 512 : has_2_bits() ? 128 : 256;
  }
  __device__ __forceinline__ int high_bits() const {
    return has_5_bits() ? 64 : has_6_bits() ? 128 : 0;
  }
  __device__ __forceinline__ int sub_scales() const {
    return !has_sub_scales() ? 0 : has_table() ? 16 : 32;
  }
  __device__ __forceinline__ int scales() const { return has_minima() ? 64 : 32; }
  __device__ __forceinline__ int offset() const { return static_cast<int>(bits_ & 0x3f) * 4; }

 private:
  uint32_t bits_;
};

// A row of a packed weight.
struct PanelRow {
  const uint8_t* panel;
  PanelForm form;
  int lane;
};
__device__ __forceinline__ PanelRow panel_row(const void* weight, int64_t entry) {
  const RowPlace place = row_place(entry);
  return {static_cast<const uint8_t*>(weight) + place.offset, PanelForm(place.format),
          static_cast<int>(place.lane)};
}

// Where the planes of a panel have a block: in the panel itself, with Bytes = const uint8_t*, or in
// a copy in shared memory.
template <typename Bytes>
struct PanelBlock {
  Bytes quants, high_bits, sub_scales, scales;
};

// Block i of a panel of `num_blocks`, which is less than 2 GiB.
__device__ __forceinline__ PanelBlock<const uint8_t*> block_of_panel(const uint8_t* panel,
                                                                     PanelForm form, int num_blocks,
                                                                     int i) {
  const int quants = form.quants(), high_bits = form.high_bits(), subs = form.sub_scales();
  const int sub_plane = num_blocks * (quants + high_bits),
            scale_plane = sub_plane + num_blocks * subs;
  const int scale = form.has_sub_scales() ? i / 8 : i;  // of 256 columns, or 32
  return {panel + i * quants, panel + (num_blocks * quants + i * high_bits),
          panel + (sub_plane + i * subs), panel + (scale_plane + scale * form.scales())};
}

// A number at a place of a panel or of its copy.
template <typename T, typename Bytes>
__device__ __forceinline__ T number_at(Bytes place) {
  if constexpr (std::is_same_v<Bytes, const uint8_t*>) {
    return *reinterpret_cast<const T*>(place);
  } else {
    return *shared_as<T>(place);
  }
}
template <typename Bytes>
__device__ __forceinline__ float half_at(Bytes place) {
  return half_to_float(Float16{number_at<uint16_t>(place)});
}

// The place of byte `at` of the quants of some blocks in a copy, chosen so that the 8 rows and 4
// pieces that a warp reads at once are in different banks. `mask` is -1, or 0 for `at` itself.
__device__ __forceinline__ int swizzled(int at, PanelForm form, int mask) {
  const int way = form.has_8_bits() ? (at >> 1 & 64) | (at >> 3 & 32) : at >> 2 & 32;
  return at ^ (way & mask);
}

// 8 whole numbers, columns 8 * piece and on of a block's 32: a byte each, signed where the form
// says so.
struct Quants {
  uint32_t first, last;
};

// Four values of a table by their places, a byte each.
constexpr uint32_t four_values(const ValueTable& table, int first) {
  uint32_t four = 0;
  for (int i = 0; i < 4; ++i) {
    four |= static_cast<uint32_t>(static_cast<uint8_t>(table.values[first + i])) << 8 * i;
  }
  return four;
}
template <bool kIsFloat4, int kFirst>
constexpr uint32_t kFourValues = four_values(kIsFloat4 ? kFloat4 : kNonLinear, kFirst);
template <bool kIsFloat4>
__device__ __forceinline__ uint32_t values_at(uint32_t places) {
  const uint32_t pairs = places | places >> 4;  // two places in bytes 0 and 2
  const uint32_t selector = (pairs & 0xff) | (pairs >> 8 & 0xff00);
  const uint32_t low =
      permute_bytes(kFourValues<kIsFloat4, 0>, kFourValues<kIsFloat4, 4>, selector & 0x7777);
  const uint32_t high =
      permute_bytes(kFourValues<kIsFloat4, 8>, kFourValues<kIsFloat4, 12>, selector & 0x7777);
  const uint32_t takes_high = (places >> 3 & 0x01010101u) * 0xff;
  return (high & takes_high) | (low & ~takes_high);
}
template <typename Bytes>
__device__ __forceinline__ Quants quants_of(const PanelBlock<Bytes>& block, PanelForm form,
                                            int lane, int piece, int swizzle) {
  if (form.has_8_bits()) {
    const int at = 128 * piece + 4 * lane;
    const auto first = number_at<uint32_t>(block.quants + swizzled(at, form, swizzle));
    const auto last = number_at<uint32_t>(block.quants + swizzled(at + 64, form, swizzle));
    return {first ^ 0x80808080u, last ^ 0x80808080u};
  }
  Quants q;
  if (form.has_2_bits()) {
    const int word = piece / 2 * 64 + 4 * lane;
    const uint32_t bits = number_at<uint32_t>(block.quants + word) >> piece % 2 * 4;
    q = {bits & 0x03030303u, bits >> 2 & 0x03030303u};
  } else {
    const int at = swizzled(64 * piece + 4 * lane, form, swizzle);
    const auto nibbles = number_at<uint32_t>(block.quants + at);
    q = {nibbles & 0x0f0f0f0fu, nibbles >> 4 & 0x0f0f0f0fu};
  }
  if (form.has_float4_table()) return {values_at<true>(q.first), values_at<true>(q.last)};
  if (form.has_table()) return {values_at<false>(q.first), values_at<false>(q.last)};
  if (form.has_5_bits()) {
    const uint32_t bits = number_at<uint32_t>(block.high_bits + 4 * lane) >> 2 * piece;
    const int place = form.has_2_bits() ? 2 : 4;
    q.first |= (bits & 0x01010101u) << place;
    q.last |= (bits >> 1 & 0x01010101u) << place;
  } else if (form.has_6_bits()) {
    const int word = piece / 2 * 64 + 4 * lane;
    const uint32_t bits = number_at<uint32_t>(block.high_bits + word) >> piece % 2 * 4;
    q.first |= (bits & 0x03030303u) << 4;
    q.last |= (bits >> 2 & 0x03030303u) << 4;
  }
  return q;
}

// The numbers as elements of a 16-bit type, in pairs.
template <typename T>
__device__ __forceinline__ Pack<uint32_t> elements_of(const Quants& q, PanelForm form) {
  Pack<uint32_t> elements;
  if (form.is_signed()) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      elements.values[i] = whole_pair<T>(i < 2 ? q.first : q.last, i % 2);
    }
  } else {
    const uint32_t offset = static_cast<uint32_t>(form.offset());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      elements.values[i] = small_pair<T>(i < 2 ? q.first : q.last, i % 2, offset);
    }
  }
  return elements;
}

// The factors of a block's numbers, and the minima that are added to the products, for its first
// and its last 16 columns.
struct BlockScales {
  float first, last, minimum, last_minimum;
};
template <typename Bytes>
__device__ __forceinline__ BlockScales scales_of(const PanelBlock<Bytes>& block, PanelForm form,
                                                 int lane) {
  const Bytes at = block.scales + 2 * lane;
  BlockScales scales{};
  if (form.has_float4_table()) {
    scales.first = bits_to_float(static_cast<uint32_t>(number_at<uint16_t>(at)) << 16);
  } else {
    scales.first = half_at(at);
  }
  if (form.has_minima()) scales.minimum = half_at(at + 2 * static_cast<int>(kPanelRows));
  scales.last = scales.first;
  scales.last_minimum = scales.minimum;
  if (form.has_sub_scales()) {
    const Bytes sub = block.sub_scales + lane;
    const auto first = number_at<uint8_t>(sub);
    if (form.has_table()) {
      scales.last = scales.first *= static_cast<float>(static_cast<int8_t>(first));
      return scales;
    }
    const auto last = number_at<uint8_t>(sub + 16);
    if (form.has_half_minima()) {
      scales.first *= static_cast<float>(first & 15);
      scales.last *= static_cast<float>(last & 15);
      scales.minimum *= -static_cast<float>(first >> 4);
      scales.last_minimum *= -static_cast<float>(last >> 4);
    } else if (form.has_halves()) {
      scales.last *= static_cast<float>(static_cast<int8_t>(last));
      scales.first *= static_cast<float>(static_cast<int8_t>(first));
    } else {
      scales.first *= static_cast<float>(first);
      scales.last = scales.first;
      scales.minimum *= -static_cast<float>(last);
      scales.last_minimum = scales.minimum;
    }
  }
  return scales;
}

// The floats that numbers stand for, rounded where the minimum is added, as the formats define.
__device__ __forceinline__ void to_floats(uint32_t quants, PanelForm form, float scale,
                                          float minimum, float (&out)[4]) {
  const int offset = form.offset();
  const uint32_t bytes = form.is_signed() ? quants ^ 0x80808080u : quants;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int whole = static_cast<int>(bytes >> 8 * i & 0xff) - offset;
    out[i] = fmaf(static_cast<float>(whole), scale, minimum);
  }
}

}  // namespace eecore::cuda
