// embed_tokens: one block per row.
#pragma once

#include "eecore/copy_row.cuh"
#include "eecore/element.cuh"
#include "eecore/panel_block.cuh"
#include "eecore/params.h"

namespace eecore::cuda {

constexpr int kEmbedTokensThreads = 128;

// The token of a row; -1: the row is left as it is. Where an earlier step made it, it is read from
// `previous`, whose -1, no token, is embedded as 0.
__device__ __forceinline__ int64_t token_of_row(const EmbedTokensParams& params, int64_t row) {
  const int32_t source = params.sources == nullptr ? -1 : params.sources[row];
  return source < 0 ? params.token_ids[row] : max(params.previous[source], int64_t{0});
}

// The multiple of a number that is first rounded to T.
template <typename T>
__device__ __forceinline__ T embedded(const EmbedTokensParams& params, float x) {
  return from_float<T>(__fmul_rn(rounded<T>(x), params.multiplier));
}

// Grid: num_tokens. For a table of int8, each row of which has a scale.
template <typename T>
__global__ void __launch_bounds__(kEmbedTokensThreads)
    embed_int8_tokens_kernel(EmbedTokensParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x, token = token_of_row(params, row);
  if (token < 0) return;
  const float scale = params.scale[token];
  const int8_t* from = static_cast<const int8_t*>(params.weight) + token * params.weight_stride;
  T* to = reinterpret_cast<T*>(static_cast<char*>(params.out) + row * params.out_stride);
  // Elements of a thread whose loads are in flight together.
  constexpr int kBatch = 8;
  for (int64_t i = threadIdx.x; i < params.hidden_size; i += kBatch * kEmbedTokensThreads) {
    int8_t batch[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t at = i + j * kEmbedTokensThreads;
      batch[j] = at < params.hidden_size ? from[at] : int8_t{0};
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t at = i + j * kEmbedTokensThreads;
      if (at < params.hidden_size)
        to[at] = embedded<T>(params, static_cast<float>(batch[j]) * scale);
    }
  }
}

// Grid: num_tokens. For a packed table: each thread makes 8 columns of a block at a time.
template <typename T>
__global__ void __launch_bounds__(kEmbedTokensThreads)
    embed_packed_tokens_kernel(EmbedTokensParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x, token = token_of_row(params, row);
  if (token < 0) return;
  const PanelRow from = panel_row(params.weight, params.table[token]);
  T* to = reinterpret_cast<T*>(static_cast<char*>(params.out) + row * params.out_stride);
  const int num_blocks = static_cast<int>(params.hidden_size / kBlockColumns);
  for (int i = static_cast<int>(threadIdx.x); i < 4 * num_blocks; i += kEmbedTokensThreads) {
    const int piece = i % 4;
    const PanelBlock<const uint8_t*> block =
        block_of_panel(from.panel, from.form, num_blocks, i / 4);
    const Quants q = quants_of(block, from.form, from.lane, piece, 0);
    const BlockScales scales = scales_of(block, from.form, from.lane);
    const float scale = piece < 2 ? scales.first : scales.last;
    const float minimum = piece < 2 ? scales.minimum : scales.last_minimum;
    float floats[2][4];
    to_floats(q.first, from.form, scale, minimum, floats[0]);
    to_floats(q.last, from.form, scale, minimum, floats[1]);
#pragma unroll
    for (int j = 0; j < 8; ++j) to[8 * i + j] = embedded<T>(params, floats[j / 4][j % 4]);
  }
}

// Grid: num_tokens. For a table of out's dtype whose rows are multiplied.
template <typename T>
__global__ void __launch_bounds__(kEmbedTokensThreads)
    embed_multiplied_tokens_kernel(EmbedTokensParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x, token = token_of_row(params, row);
  if (token < 0) return;
  const T* from = reinterpret_cast<const T*>(static_cast<const char*>(params.weight) +
                                             token * params.weight_stride);
  T* to = reinterpret_cast<T*>(static_cast<char*>(params.out) + row * params.out_stride);
  for (int64_t i = threadIdx.x; i < params.hidden_size; i += kEmbedTokensThreads) {
    to[i] = embedded<T>(params, to_float(from[i]));
  }
}

// Grid: num_tokens.
__global__ void __launch_bounds__(kEmbedTokensThreads)
    embed_tokens_kernel(EmbedTokensParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x, token = token_of_row(params, row);
  if (token < 0) return;
  copy_row(static_cast<const char*>(params.weight) + token * params.weight_stride,
           static_cast<char*>(params.out) + row * params.out_stride, params.row_bytes, threadIdx.x,
           kEmbedTokensThreads);
}

}  // namespace eecore::cuda
