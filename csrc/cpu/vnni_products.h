// The products that AVX-VNNI has instructions for. Its other kernels are those of AVX2, which hand
// these products over, so the arguments have types that all capabilities share.
#pragma once

#include "run.h"

namespace eecore::cpu {

// Storage element of an int8 weight.
struct Int8 {
  int8_t value;
};

// Multiplies rows of an int8 weight with packed rows of x.
struct Int8Product {
  const Int8* w;  // [num_rows, columns], row stride w_stride
  int64_t w_stride;
  const float* scales;  // [num_rows]
  int64_t num_rows;
  const int16_t* x;  // [num_batch, columns packed], row stride x_stride
  int64_t x_stride, num_batch, columns;
  const Int8* next;  // the rows that are read after these; may be null
  float* out;        // [num_batch, num_rows], row stride out_stride
  int64_t out_stride;
};

// 32 columns of a row of x: x = q * scale.
struct alignas(16) XBlock {
  float scale;
  float scaled_sum;  // scale * the sum of q
  int32_t minus_8;   // -8 times the sum of q
  int32_t unused;
  int8_t q[kBlockColumns];
};
// The same for the 256 columns of a super-block, the unit of K formats.
struct alignas(64) XSuperBlock {
  float scale;
  int32_t unused[3];
  int16_t sums[8];        // of q, 32 columns each
  int16_t half_sums[16];  // 16 columns each
  int8_t q[kSuperColumns];
};

// A packed row of x holds the blocks that its weight's formats multiply: blocks of 32 columns,
// super-blocks, or the former and then the latter. Its stride, in bytes, tells which. Blocks of one
// kind are an odd number of cache lines, so that the same columns of many rows do not share a set
// of the cache.
struct XRowSizes {
  int64_t blocks, super_blocks;  // bytes
};
constexpr XRowSizes x_row_sizes(int64_t columns) {
  const auto odd_lines = [](int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; };
  const int64_t super_blocks = columns / kSuperColumns * static_cast<int64_t>(sizeof(XSuperBlock));
  return {odd_lines(columns / kBlockColumns * static_cast<int64_t>(sizeof(XBlock))),
          columns % kSuperColumns == 0 ? odd_lines(super_blocks) : 0};
}

// Multiplies a panel's rows first..first + count with rows of x, into out[b * out_stride + r].
struct PanelProduct {
  const uint8_t* panel;
  const uint8_t* second;  // a whole panel of the same format, the next one in out; or null
  int64_t columns, first, count;
  const uint8_t* x;  // row stride x_stride, in bytes
  int64_t x_stride, num_batch;
  const uint8_t* ahead;  // what to prefetch meanwhile, as many bytes as the panel has; may be null
  float* out;
  int64_t out_stride;
  Tiles tiles;
  int64_t tile_rows;  // of x
};

namespace avx_vnni {
void multiply_panel(BlockFormat format, const PanelProduct& product);
void multiply_int8(const Int8Product& product);
double multiply_bytes(int64_t steps, float* sink);
}  // namespace avx_vnni
namespace avx_vnni_model {
void multiply_panel(BlockFormat format, const PanelProduct& product);
void multiply_int8(const Int8Product& product);
double multiply_bytes(int64_t steps, float* sink);
}  // namespace avx_vnni_model

// Defined in AVX2's kernels.
#if defined(__AVX2__) && !defined(__AVX512F__) && !defined(EECORE_VNNI)
#define EECORE_HANDS_OVER
#endif

}  // namespace eecore::cpu
