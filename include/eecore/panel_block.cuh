// Blocks of packed weights (packed_weight.h) as a thread takes them: of 32 columns of a row the 8
// of a piece, and what scales them. Whole numbers of 4 to 8 bits are elements of any type exactly.
#pragma once

#include <type_traits>

#include "eecore/element.cuh"
#include "eecore/packed_weight.h"
#include "eecore/shared.cuh"
#include "eecore/whole_pair.cuh"

namespace eecore::cuda {

// A number of every format, 8 bits each: device code cannot index kBlockTraits.
template <typename Of>
constexpr uint64_t per_format(Of of) {
  uint64_t all = 0;
  for (int i = 0; i < kNumBlockFormats; ++i) {
    all |= static_cast<uint64_t>(of(static_cast<BlockFormat>(i))) << 8 * i;
  }
  return all;
}
constexpr uint64_t kQuantUnits = per_format([](BlockFormat f) { return traits_of(f).quants / 16; });
constexpr uint64_t kHighUnits = per_format([](auto f) { return traits_of(f).high_bits / 16; });
constexpr uint64_t kSubUnits = per_format([](auto f) { return traits_of(f).sub_scales / 16; });
constexpr uint64_t kScaleUnits = per_format([](auto f) { return traits_of(f).scales / 16; });
constexpr uint64_t kOffsets = per_format([](BlockFormat f) { return quant_offset(f); });
constexpr uint64_t kWithMinima = per_format([](BlockFormat f) { return has_minima(f); });

// What BlockTraits says of a format, on the device.
struct PanelForm {
  int format;

  PanelForm() = default;
  __device__ __forceinline__ explicit PanelForm(BlockFormat which)
      : format(static_cast<int>(which)) {}

  __device__ __forceinline__ bool is(BlockFormat other) const {
    return format == static_cast<int>(other);
  }
  __device__ __forceinline__ int quants() const { return of(kQuantUnits) * 16; }
  __device__ __forceinline__ int high_bits() const { return of(kHighUnits) * 16; }
  __device__ __forceinline__ int sub_scales() const { return of(kSubUnits) * 16; }
  __device__ __forceinline__ int scales() const { return of(kScaleUnits) * 16; }
  __device__ __forceinline__ int offset() const { return of(kOffsets); }
  __device__ __forceinline__ bool has_minima() const { return of(kWithMinima) != 0; }
  __device__ __forceinline__ bool has_sub_scales() const { return of(kSubUnits) != 0; }

 private:
  __device__ __forceinline__ int of(uint64_t numbers) const {
    return static_cast<int>(numbers >> 8 * format & 0xff);
  }
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

// Where the planes of a panel have what some blocks in a row are made of, the first of them:
// in a panel where it is, Bytes = const uint8_t*, or in a copy in shared memory.
template <typename Bytes>
struct PanelBlocks {
  Bytes quants, high_bits, sub_scales, scales;
};

// From block `first` on of a panel of `num_blocks`.
__device__ __forceinline__ PanelBlocks<const uint8_t*> blocks_of_panel(const PanelRow& row,
                                                                       int64_t num_blocks,
                                                                       int64_t first) {
  const PanelForm form = row.form;
  const int quants = form.quants(), high_bits = form.high_bits(), subs = form.sub_scales();
  const uint8_t* high_plane = row.panel + num_blocks * quants;
  const uint8_t* sub_plane = high_plane + num_blocks * high_bits;
  const uint8_t* scale_plane = sub_plane + num_blocks * subs;
  const int64_t first_scale = form.has_sub_scales() ? first / 8 : first;  // of 256 columns
  return {row.panel + first * quants, high_plane + first * high_bits, sub_plane + first * subs,
          scale_plane + first_scale * form.scales()};
}

// A number at a place of a panel or of a copy.
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

// Where a copy of a chunk has byte `at` of its quants: so that the 8 rows and 4 pieces that a warp
// takes at once are in different banks.
__device__ __forceinline__ int swizzled(int at, bool has_8_bits) {
  return has_8_bits ? at ^ (at >> 1 & 64) ^ (at >> 3 & 32) : at ^ (at >> 2 & 32);
}

// 8 whole numbers, columns 8 * piece and on of a block's 32: a byte each, of Q8_0 with a sign.
struct Quants {
  uint32_t first, last;
};
template <typename Bytes>
__device__ __forceinline__ Quants quants_of(const PanelBlocks<Bytes>& blocks, PanelForm form,
                                            int block, int lane, int piece) {
  constexpr bool kIsCopy = !std::is_same_v<Bytes, const uint8_t*>;
  const bool has_8_bits = form.is(BlockFormat::kQ8_0);
  const Bytes quants = blocks.quants + block * form.quants();
  const auto word = [&](int at) {
    return number_at<uint32_t>(quants + (kIsCopy ? swizzled(at, has_8_bits) : at));
  };
  if (has_8_bits) {
    const int at = 128 * piece + 4 * lane;
    return {word(at) ^ 0x80808080u, word(at + 64) ^ 0x80808080u};
  }
  const uint32_t nibbles = word(64 * piece + 4 * lane);
  Quants q{nibbles & 0x0f0f0f0fu, nibbles >> 4 & 0x0f0f0f0fu};
  const int high_bits = form.high_bits();
  const Bytes high = blocks.high_bits + (block * high_bits + 4 * lane);
  if (high_bits == 64) {
    const uint32_t bits = number_at<uint32_t>(high) >> 2 * piece;
    q.first |= (bits & 0x01010101u) << 4;
    q.last |= (bits >> 1 & 0x01010101u) << 4;
  } else if (high_bits == 128) {
    const uint32_t bits = number_at<uint32_t>(high + piece / 2 * 64) >> piece % 2 * 4;
    q.first |= (bits & 0x03030303u) << 4;
    q.last |= (bits >> 2 & 0x03030303u) << 4;
  }
  return q;
}

// As elements of a 16-bit type, in pairs.
template <typename T>
__device__ __forceinline__ Pack<uint32_t> elements_of(const Quants& q, PanelForm form) {
  Pack<uint32_t> elements;
  if (form.is(BlockFormat::kQ8_0)) {
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

// What a block's numbers are multiplied with, those of its first and of its last 16 columns, and
// what is added then.
struct BlockScales {
  float first, last, minimum;
};
template <typename Bytes>
__device__ __forceinline__ BlockScales scales_of(const PanelBlocks<Bytes>& blocks, PanelForm form,
                                                 int block, int lane) {
  const bool has_sub_scales = form.has_sub_scales();
  const Bytes at = blocks.scales + (2 * lane + (has_sub_scales ? 0 : block * form.scales()));
  BlockScales scales{half_at(at), 0.0f, 0.0f};
  if (form.has_minima()) scales.minimum = half_at(at + 2 * static_cast<int>(kPanelRows));
  scales.last = scales.first;
  if (has_sub_scales) {
    const Bytes sub = blocks.sub_scales + (32 * block + lane);
    const uint8_t first = number_at<uint8_t>(sub), last = number_at<uint8_t>(sub + 16);
    if (form.is(BlockFormat::kQ6_K)) {
      scales.last *= static_cast<float>(static_cast<int8_t>(last));
      scales.first *= static_cast<float>(static_cast<int8_t>(first));
    } else {
      scales.first *= static_cast<float>(first);
      scales.last = scales.first;
      scales.minimum *= -static_cast<float>(last);
    }
  }
  return scales;
}

// The floats that numbers stand for, rounded where the minimum is added, as the formats say.
__device__ __forceinline__ void to_floats(uint32_t quants, PanelForm form, float scale,
                                          float minimum, float (&out)[4]) {
  const bool has_8_bits = form.is(BlockFormat::kQ8_0);
  const int offset = form.offset();
  const uint32_t bytes = has_8_bits ? quants ^ 0x80808080u : quants;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int whole = static_cast<int>(bytes >> 8 * i & 0xff) - offset;
    out[i] = fmaf(static_cast<float>(whole), scale, minimum);
  }
}

}  // namespace eecore::cuda
