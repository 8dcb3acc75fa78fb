// exit_confidence_cosine: four warps sum each row's products in float; a row whose sums are outside
// the safe range of float is summed again by one of the warps, in double.
#pragma once

#include "eecore/element.cuh"
#include "eecore/measured_rows.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kCosineThreadsPerRow = 128;
constexpr int kCosineMaxRowsPerBlock = 8;

// Sums of a * b, a * a and b * b over part of two rows.
template <typename Number>
struct Products {
  Number dot = 0, previous = 0, hidden = 0;

  template <typename T>
  __device__ __forceinline__ void add(const Pack<T>& a, const Pack<T>& b) {
#pragma unroll
    for (int i = 0; i < Pack<T>::kSize; ++i) {
      const Number x = to_float(a.values[i]), y = to_float(b.values[i]);
      dot += x * y;
      previous += x * x;
      hidden += y * y;
    }
  }

  __device__ __forceinline__ void reduce_warp() {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      dot += __shfl_xor_sync(kWholeWarp, dot, distance);
      previous += __shfl_xor_sync(kWholeWarp, previous, distance);
      hidden += __shfl_xor_sync(kWholeWarp, hidden, distance);
    }
  }
};

// The sums of one thread of `threads`. Which thread adds which elements does not depend on the
// alignment.
template <typename Number, typename T>
__device__ __forceinline__ Products<Number> sum_products(const T* previous, const T* hidden,
                                                         int64_t n, int thread, int threads) {
  constexpr int kSize = Pack<T>::kSize;
  Products<Number> sums;
  const bool previous_aligned = reinterpret_cast<uintptr_t>(previous) % 16 == 0;
  const bool hidden_aligned = reinterpret_cast<uintptr_t>(hidden) % 16 == 0;
  const int64_t step = int64_t{threads} * kSize;
  int64_t first = int64_t{thread} * kSize;
  if (previous_aligned && hidden_aligned) {
#pragma unroll 4
    for (; first + kSize <= n; first += step) {
      sums.add(load16(previous + first), load16(hidden + first));
    }
  }
  for (; first < n; first += step) {
    sums.add(load_pack(previous + first, n - first, previous_aligned),
             load_pack(hidden + first, n - first, hidden_aligned));
  }
  return sums;
}

// Whether the products kept their precision; true for NaN, which double does not remove.
__device__ __forceinline__ bool is_comfortable(float squares) {
  return !(squares <= 1e-20f || squares >= 1e30f);
}

// Grid: rows by the block's. Block: kCosineThreadsPerRow threads for each of its rows. With
// params.accept or params.exit, one block has all rows, and also accepts them or lets them exit.
template <typename T>
__global__ void __launch_bounds__(kCosineThreadsPerRow* kCosineMaxRowsPerBlock)
    exit_confidence_cosine_kernel(ExitConfidenceCosineParams params) {
  constexpr int kWarpsPerRow = kCosineThreadsPerRow / 32;
  EECORE_SHARED(float, parts, 3 * kWarpsPerRow * kCosineMaxRowsPerBlock);
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int row_in_block = threadIdx.x / kCosineThreadsPerRow;
  const int thread = threadIdx.x % kCosineThreadsPerRow;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t rows_per_block = blockDim.x / kCosineThreadsPerRow;
  const int64_t row = blockIdx.x * rows_per_block + row_in_block;
  const bool exists = row < params.num_seqs;
  const T* previous = static_cast<const T*>(params.previous) + row * params.previous_stride;
  const T* hidden = static_cast<const T*>(params.hidden) + row * params.hidden_stride;

  Products<float> sums;
  if (exists) {
    sums = sum_products<float>(previous, hidden, params.hidden_size, thread, kCosineThreadsPerRow);
  }
  sums.reduce_warp();
  if (lane == 0) {
    parts[3 * warp] = sums.dot;
    parts[3 * warp + 1] = sums.previous;
    parts[3 * warp + 2] = sums.hidden;
  }
  __syncthreads();

  // The row's first warp finishes it.
  if (exists && thread < 32) {
    Products<float> total;
#pragma unroll
    for (int i = 0; i < kWarpsPerRow; ++i) {
      total.dot += parts[3 * (warp + i)];
      total.previous += parts[3 * (warp + i) + 1];
      total.hidden += parts[3 * (warp + i) + 2];
    }
    Products<double> exact;
    if (is_comfortable(total.previous) && is_comfortable(total.hidden)) {
      exact.dot = total.dot;
      exact.previous = total.previous;
      exact.hidden = total.hidden;
    } else {
      exact = sum_products<double>(previous, hidden, params.hidden_size, lane, 32);
      exact.reduce_warp();
    }
    if (lane == 0) {
      const double norms = exact.previous * exact.hidden;
      const float cosine = norms == 0.0 ? 0.0f : static_cast<float>(exact.dot / sqrt(norms));
      // Rounding must not leave [-1, 1]; NaN stays NaN.
      params.confidence[row] = cosine > 1.0f ? 1.0f : cosine < -1.0f ? -1.0f : cosine;
    }
  }
  go_on(params.accept, params.exit);
}

}  // namespace eecore::cuda
