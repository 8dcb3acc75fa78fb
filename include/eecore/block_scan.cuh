// Sums over the threads of a block in front of each, in an order that does not depend on anything.
#pragma once

#include "eecore/reduce.cuh"

namespace eecore::cuda {

// What `x` of the threads in front of this one comes to; `total` becomes the sum of all. All
// threads of the block call it.
template <int kThreads, typename T>
__device__ __forceinline__ T sum_in_front(T x, T& total) {
  constexpr int kWarps = kThreads / 32;
  EECORE_SHARED(T, of_warp, kWarps);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T inclusive = x;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const T earlier = __shfl_up_sync(kWholeWarp, inclusive, distance);
    if (lane >= distance) inclusive += earlier;
  }
  T in_front = __shfl_up_sync(kWholeWarp, inclusive, 1);
  if (lane == 0) in_front = 0;
  __syncthreads();  // the sums of an earlier call have been read
  if (lane == 31) of_warp[warp] = inclusive;
  __syncthreads();
  T before = 0, sum = 0;
#pragma unroll 8
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp) before = sum;
    sum += of_warp[i];
  }
  total = sum;
  return before + in_front;
}

template <int kThreads, typename T>
__device__ __forceinline__ T sum_of_block(T x) {
  T total;
  sum_in_front<kThreads>(x, total);
  return total;
}

}  // namespace eecore::cuda
