// Prefix sums over the threads of a block, always in the same order.
#pragma once

#include "eecore/reduce.cuh"

namespace eecore::cuda {

// The sum of the lanes up to and including each lane.
template <typename T>
__device__ __forceinline__ T sum_up_to(T x) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T earlier = __shfl_up_sync(kWholeWarp, x, distance);
    if (static_cast<int>(threadIdx.x % 32) >= distance) x += earlier;
  }
  return x;
}

// The sum of `x` over the threads before this one; `total` becomes the sum of all. All threads of
// the block call it.
template <int kThreads, typename T>
__device__ __forceinline__ T sum_in_front(T x, T& total) {
  constexpr int kWarps = kThreads / 32;
  EECORE_SHARED(T, of_warps, kWarps);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T inclusive = sum_up_to(x);
  T in_front = __shfl_up_sync(kWholeWarp, inclusive, 1);
  if (lane == 0) in_front = 0;
  __syncthreads();  // all threads have read the sums of an earlier call
  if (lane == 31) of_warps[warp] = inclusive;
  __syncthreads();
  // Each warp adds up the sums of all warps, in the same order.
  T of_warp = 0;
  if (lane < kWarps) of_warp = of_warps[lane];
  of_warp = sum_up_to(of_warp);
  total = __shfl_sync(kWholeWarp, of_warp, 31);
  const T before = __shfl_sync(kWholeWarp, of_warp, max(warp - 1, 0));
  return warp == 0 ? in_front : before + in_front;
}

template <int kThreads, typename T>
__device__ __forceinline__ T sum_of_block(T x) {
  T total;
  sum_in_front<kThreads>(x, total);
  return total;
}

}  // namespace eecore::cuda
