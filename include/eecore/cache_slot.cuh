// The place of a slot of a paged cache, for any strides of the cache.
#pragma once

#include "eecore/params.h"

namespace eecore::cuda {

struct CacheSlot {
  int page, offset;
};

// The place of a slot of slot_mapping that is not -1. A cache has fewer than 2^31 slots.
__device__ __forceinline__ CacheSlot cache_slot(int64_t slot, int64_t page_size) {
  const uint32_t index = static_cast<uint32_t>(slot), size = static_cast<uint32_t>(page_size);
  const uint32_t page = index / size;
  return {static_cast<int>(page), static_cast<int>(index - page * size)};
}

// Elements from the start of a layer's cache to a head of a slot.
__device__ __forceinline__ int64_t cache_offset(const CacheStrides& strides, CacheSlot slot,
                                                int64_t head) {
  return slot.page * strides.page + slot.offset * strides.slot + head * strides.head;
}

}  // namespace eecore::cuda
