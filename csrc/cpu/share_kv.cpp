// share_kv on the CPU: a few kilobytes per row, so one thread.
#include "head_row.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// Copies all heads of a slot, in one cache: strides and sizes are in bytes.
void copy_heads(const ShareKvParams& params, void* cache, int64_t layer_stride,
                const CacheStrides& strides, CacheSlot slot, int64_t from, int64_t to) {
  char* const base = static_cast<char*>(cache);
  for (int64_t head = 0; head < params.num_kv_heads; ++head) {
    const int64_t at = cache_offset(strides, slot, head);
    copy_bytes(base + to * layer_stride + at, base + from * layer_stride + at, params.head_bytes);
  }
}

}  // namespace

void run_share_kv(const ShareKvParams& params, const Parallel&) {
  for (int64_t row = 0; row < params.num_tokens; ++row) {
    if (params.slot_mapping[row] < 0) continue;
    const CacheSlot slot = cache_slot(params.slot_mapping[row], params.page_size);
    const int64_t exit_layer = params.exit_layer[row];
    for (int64_t layer = exit_layer; layer < params.num_layers; ++layer) {
      const int64_t from = shared_layer(params, exit_layer, layer);
      if (from < 0 || from == layer) continue;
      copy_heads(params, params.k_cache, params.k_cache_layer_stride, params.k_cache_strides, slot,
                 from, layer);
      copy_heads(params, params.v_cache, params.v_cache_layer_stride, params.v_cache_strides, slot,
                 from, layer);
    }
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
