// The launcher of paged_attention's kernel for sequences of many queries. It has a file of its own:
// static shared memory of all kernels of a file takes multiples of 1024 bytes where one of them has
// its dynamic memory at one.
#pragma once

#include "eecore/attention_tile.cuh"
#include "launch.h"

namespace eecore::cuda {

// A cache's strides, where those of dimensions of size 1 are not 0.
inline CacheStrides whole_strides(const PagedAttentionParams& params, const CacheStrides& strides) {
  return {params.num_pages > 1 ? strides.page : strides.slot * params.page_size, strides.slot,
          params.num_kv_heads > 1 ? strides.head : strides.slot};
}

// Runs a call for which csrc/cuda/paged_attention.cu finds the kernel fit.
void run_prompt_attention(const PagedAttentionParams& params, const AttentionPlan& plan,
                          Stream stream);

}  // namespace eecore::cuda
