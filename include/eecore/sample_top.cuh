// sample_tokens, where the most probable tokens are asked for: first those of each slice, in order,
// then those of the row.
#pragma once

#include "eecore/sample_rows.cuh"

namespace eecore::cuda {

// A logit and its id in one number: larger for a larger logit, then for a lower id. No logit gives
// 0.
__device__ __forceinline__ unsigned long long ranked(float logit, int id) {
  const uint32_t bits = float_to_bits(logit + 0.0f);  // both zeros become one
  const uint32_t order = (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
  return static_cast<unsigned long long>(order) << 32 | static_cast<uint32_t>(~id);
}
__device__ __forceinline__ int id_of(unsigned long long ranked) {
  return static_cast<int>(~static_cast<uint32_t>(ranked));
}
__device__ __forceinline__ float logit_of(unsigned long long ranked) {
  const uint32_t order = static_cast<uint32_t>(ranked >> 32);
  return bits_to_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order);
}

__device__ __forceinline__ unsigned long long largest_of_warp(unsigned long long x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    x = max(x, __shfl_xor_sync(kWholeWarp, x, distance));
  }
  return x;
}

// The largest of a thread's own tokens of a slice that ranks after `last`.
template <typename T>
__device__ __forceinline__ unsigned long long next_of_thread(const Logits<T>& logits,
                                                             const SlicePlace& place,
                                                             unsigned long long last) {
  unsigned long long next = 0;
#pragma unroll 1
  for (int begin = place.begin; begin < place.end; begin += kSampleChunk) {
    const int token = begin + static_cast<int>(threadIdx.x) * kTokensPerThread;
    float values[kTokensPerThread];
    logits.load(token, place.end, values);
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      const unsigned long long mine = ranked(values[i], token + i);
      if (token + i < place.end && mine < last) next = max(next, mine);
    }
  }
  return next;
}

// Grid: num_rows by num_slices. Writes [num_rows, num_slices, num_top], 0 where a slice has no more
// tokens.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads)
    sample_top_slices_kernel(SampleTokensParams params, SampleWorkspace workspace) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const SlicePlace place(params, workspace);
  if (!place.wanted) return;
  EECORE_SHARED(unsigned long long, of_warp, 2 * kSampleWarps);
  const Logits<T> logits = place.logits<T>(params);
  unsigned long long* const top = workspace.top + place.number(workspace) * params.num_top;
  unsigned long long mine = next_of_thread(logits, place, ~0ull);
#pragma unroll 1
  for (int64_t k = 0; k < params.num_top; ++k) {
    // Two halves in turns: a barrier is between the threads that read one and the thread that
    // writes it again.
    const Shared<unsigned long long> half = of_warp + k % 2 * kSampleWarps;
    const unsigned long long largest_here = largest_of_warp(mine);
    if (threadIdx.x % 32 == 0) half[threadIdx.x / 32] = largest_here;
    __syncthreads();
    unsigned long long largest = 0;
#pragma unroll
    for (int warp = 0; warp < kSampleWarps; ++warp) {
      largest = max(largest, static_cast<unsigned long long>(half[warp]));
    }
    if (threadIdx.x == 0) top[k] = largest;
    if (largest != 0 && mine == largest) mine = next_of_thread(logits, place, largest);
  }
}

constexpr int kTopPerLane = kMaxSlices / 32;

// Grid: num_rows, one warp each, which repeatedly takes the largest of the slices' next tokens.
__global__ void __launch_bounds__(32)
    sample_top_kernel(SampleTokensParams params, SampleWorkspace workspace) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const RowPlace place(params, static_cast<int>(blockIdx.x));
  if (!place.wanted) return;
  const int lane = static_cast<int>(threadIdx.x);
  const unsigned long long* const top =
      workspace.top + int64_t{place.j} * workspace.num_slices * params.num_top;
  const float logsumexp = params.logsumexp[place.w];
  const bool known = logsumexp == logsumexp;
  const auto load = [&](int i, int64_t k) {
    const int slice = lane + 32 * i;
    return slice < workspace.num_slices && k < params.num_top ? top[slice * params.num_top + k]
                                                              : 0ull;
  };
  unsigned long long next[kTopPerLane];
  int64_t taken[kTopPerLane];
#pragma unroll
  for (int i = 0; i < kTopPerLane; ++i) {
    next[i] = load(i, 0);
    taken[i] = 0;
  }
#pragma unroll 1
  for (int64_t k = 0; k < params.num_top; ++k) {
    unsigned long long largest = 0;
#pragma unroll
    for (int i = 0; i < kTopPerLane; ++i) largest = max(largest, next[i]);
    largest = largest_of_warp(largest);
#pragma unroll
    for (int i = 0; i < kTopPerLane; ++i) {
      if (largest != 0 && next[i] == largest) next[i] = load(i, ++taken[i]);
    }
    if (lane != 0) continue;
    const bool exists = known && largest != 0;
    params.top_ids[place.w * params.num_top + k] = exists ? id_of(largest) : -1;
    params.top_logprobs[place.w * params.num_top + k] =
        exists ? logit_of(largest) - logsumexp : -INFINITY;
  }
}

}  // namespace eecore::cuda
