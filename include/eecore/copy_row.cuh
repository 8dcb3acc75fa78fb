// Copies a row of a tensor of any element type.
#pragma once

#include <cstdint>

#include "eecore/element.cuh"

namespace eecore::cuda {

// Copies the part of one thread of `threads`; elements have 2 or 4 bytes. A whole batch of 16-byte
// pieces is loaded before its first is stored: a store might write where the next load reads.
template <int kBatch = 2>
__device__ __forceinline__ void copy_row(const void* from, void* to, int64_t bytes, int thread,
                                         int threads) {
  const uint16_t* source = static_cast<const uint16_t*>(from);
  uint16_t* target = static_cast<uint16_t*>(to);
  constexpr int kPerAccess = 16 / sizeof(uint16_t);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(uint16_t));
  const bool aligned =
      (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  const int64_t whole = aligned ? count / kPerAccess * kPerAccess : 0;
  const int64_t step = int64_t{threads} * kPerAccess;
#pragma unroll 1
  for (int64_t first = int64_t{thread} * kPerAccess; first < whole; first += kBatch * step) {
    Pack<uint16_t> packs[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j * step < whole) packs[j] = load16(source + first + j * step);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      if (first + j * step < whole) store16(target + first + j * step, packs[j]);
    }
  }
  for (int64_t i = whole + thread; i < count; i += threads) target[i] = source[i];
}

// The same, writing zeros.
__device__ __forceinline__ void zero_row(void* to, int64_t bytes, int thread, int threads) {
  uint16_t* target = static_cast<uint16_t*>(to);
  const int64_t count = bytes / static_cast<int64_t>(sizeof(uint16_t));
  for (int64_t i = thread; i < count; i += threads) target[i] = 0;
}

}  // namespace eecore::cuda
