// embed_tokens: a block for each row.
#pragma once

#include "eecore/copy_row.cuh"
#include "eecore/params.h"

namespace eecore::cuda {

constexpr int kEmbedTokensThreads = 128;

// Grid: num_tokens.
__global__ void __launch_bounds__(kEmbedTokensThreads)
    embed_tokens_kernel(EmbedTokensParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int32_t source = params.sources == nullptr ? -1 : params.sources[row];
  const int64_t token = source < 0 ? params.token_ids[row] : params.previous[source];
  copy_row(static_cast<const char*>(params.weight) + token * params.weight_stride,
           static_cast<char*>(params.out) + row * params.out_stride, params.row_bytes, threadIdx.x,
           kEmbedTokensThreads);
}

}  // namespace eecore::cuda
