// Reductions within a warp and a block, always in the same order.
#pragma once

#include "eecore/shared.cuh"

namespace eecore::cuda {

constexpr unsigned kWholeWarp = 0xffffffffu;

struct Sum {
  __device__ __forceinline__ float operator()(float a, float b) const { return a + b; }
  static constexpr float kNone = 0.0f;
};
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
  static constexpr float kNone = -INFINITY;
};

// Combines `x` over groups of kLanes neighbouring lanes; every lane gets the result.
template <int kLanes = 32, typename Op = Sum>
__device__ __forceinline__ float reduce_lanes(float x, Op op = {}) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    x = op(x, __shfl_xor_sync(kWholeWarp, x, distance));
  }
  return x;
}

// Combines `x` over a block of kThreads threads, a multiple of 32; every thread gets the result.
// All threads of the block call it.
template <int kThreads, typename Op = Sum>
__device__ __forceinline__ float reduce_block(float x, Op op = {}) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32);
  x = reduce_lanes<32>(x, op);
  if constexpr (kWarps == 1) {
    return x;
  } else {
    EECORE_SHARED(float, parts, kWarps);
    __syncthreads();  // all threads have read the parts of an earlier call
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float total = parts[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) total = op(total, parts[warp]);
    return total;
  }
}

// Whether `x` holds in any of a block's kThreads threads, a multiple of 32; every thread gets the
// answer. All threads of the block call it, once per kernel.
template <int kThreads>
__device__ __forceinline__ bool any_in_block(bool x) {
  constexpr int kWarps = kThreads / 32;
  static_assert(kThreads % 32 == 0 && kWarps <= 32);
  EECORE_SHARED(int, any_in_warp, kWarps);
  x = __any_sync(kWholeWarp, x) != 0;
  if (threadIdx.x % 32 == 0) any_in_warp[threadIdx.x / 32] = x;
  __syncthreads();
  int any = 0;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) any |= any_in_warp[warp];
  return any != 0;
}

}  // namespace eecore::cuda
