// share_kv: one block per row and layer, whose warps share the heads.
#pragma once

#include "eecore/cache_slot.cuh"
#include "eecore/copy_row.cuh"
#include "eecore/params.h"

namespace eecore::cuda {

constexpr int kShareKvThreads = 128;

// Grid: (num_tokens, num_layers). No block of the call writes what another one copies from.
__global__ void __launch_bounds__(kShareKvThreads) share_kv_kernel(ShareKvParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x, layer = blockIdx.y;
  if (params.slot_mapping[row] < 0) return;
  const int64_t from = shared_layer(params, params.exit_layer[row], layer);
  if (from < 0 || from == layer) return;
  const CacheSlot slot = cache_slot(params.slot_mapping[row], params.page_size);
  for (int64_t head = threadIdx.x / 32; head < 2 * params.num_kv_heads;
       head += kShareKvThreads / 32) {
    const bool is_key = head < params.num_kv_heads;
    const int64_t stride = is_key ? params.k_cache_layer_stride : params.v_cache_layer_stride;
    char* const base = static_cast<char*>(is_key ? params.k_cache : params.v_cache) +
                       cache_offset(is_key ? params.k_cache_strides : params.v_cache_strides, slot,
                                    is_key ? head : head - params.num_kv_heads);
    copy_row(base + from * stride, base + layer * stride, params.head_bytes, threadIdx.x % 32, 32);
  }
}

}  // namespace eecore::cuda
