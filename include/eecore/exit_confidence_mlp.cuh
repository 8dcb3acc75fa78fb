// exit_confidence_mlp: blocks share the hidden units of the classifier and tiles of rows; the
// threads of a block share the columns. Each weight is read once for a tile of rows. Where several
// blocks share a row's units, a second kernel adds their parts of the row's logits.
#pragma once

#include "eecore/element.cuh"
#include "eecore/measured_rows.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kMlpThreads = 256;
constexpr int kMlpUnits = 4;  // units whose weights a thread holds at a time
constexpr int kMlpMaxFinishThreads = 1024;
constexpr int kMlpMaxRows = 8;  // rows of a tile

// Adds up kCount numbers over the lanes of a warp. The sum of x[i] ends in lanes i * 32 / kCount
// and following, and is the same number for every kCount.
template <int kCount, int kDistance = 16>
__device__ __forceinline__ float reduce_each(const float (&x)[kCount], int lane) {
  if constexpr (kCount == 1) {
    return reduce_lanes<2 * kDistance>(x[0]);
  } else {
    // Each lane gives one of two numbers away, and receives its partner's part of the other.
    const bool upper = (lane & kDistance) != 0;
    float kept[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float other = upper ? x[i] : x[i + kCount / 2];
      kept[i] = (upper ? x[i + kCount / 2] : x[i]) + __shfl_xor_sync(kWholeWarp, other, kDistance);
    }
    return reduce_each<kCount / 2, kDistance / 2>(kept, lane);
  }
}

__device__ __forceinline__ float softmax_of_second(float logit0, float logit1, const float* bias) {
  if (bias != nullptr) {
    logit0 += bias[0];
    logit1 += bias[1];
  }
  return 1.0f / (1.0f + expf(logit0 - logit1));
}

// A tile of rows times a tile of units. Near the end of either, the last row or unit is repeated to
// fill the tile, and the sums of the repeats are not used.
template <typename T, int kRows>
struct MlpTile {
  static constexpr int kSize = Pack<T>::kSize;
  static constexpr int kQuads = kSize / 4;

  const T* hidden;
  int64_t hidden_stride;
  const float* weight;
  int64_t n;
  int last_row, last_unit;
  float sums[kRows * kMlpUnits];

  // Adds the columns from `first` on, one pack of them.
  template <bool kWhole>
  __device__ __forceinline__ void add(int64_t first) {
    const int64_t count = kWhole ? kSize : n - first;
    float w[kMlpUnits][kSize];
#pragma unroll
    for (int unit = 0; unit < kMlpUnits; ++unit) {
      const float* from = weight + min(unit, last_unit) * n + first;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const Pack<float> pack =
            kWhole ? load16(from + 4 * quad) : load_pack(from + 4 * quad, count - 4 * quad, false);
#pragma unroll
        for (int i = 0; i < 4; ++i) w[unit][4 * quad + i] = pack.values[i];
      }
    }
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const T* from = hidden + min(row, last_row) * hidden_stride + first;
      float x[kSize];
      to_floats(kWhole ? load16(from) : load_pack(from, count, false), x);
#pragma unroll
      for (int unit = 0; unit < kMlpUnits; ++unit) {
        float& sum = sums[row * kMlpUnits + unit];
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum = fmaf(x[i], w[unit][i], sum);
      }
    }
  }

  // Adds this thread's part of all columns.
  __device__ __forceinline__ void add_all() {
    constexpr int kStep = kMlpThreads * kSize;
    const bool whole = n % kSize == 0 && reinterpret_cast<uintptr_t>(weight) % 16 == 0 &&
                       reinterpret_cast<uintptr_t>(hidden) % 16 == 0 &&
                       (last_row == 0 || hidden_stride % kSize == 0);
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    if (whole) {
      for (int64_t first = threadIdx.x * kSize; first < n; first += kStep) add<true>(first);
    } else {
      for (int64_t first = threadIdx.x * kSize; first < n; first += kStep) add<false>(first);
    }
  }
};

// Grid: (tiles of kRows rows, slices of slice_size units). With one slice the confidence is
// written, else each slice's part of the logits: parts [num_slices, num_seqs, 2]. With
// params.accept or params.exit, one block has all rows and units, and also accepts the rows or
// lets them exit.
template <typename T, int kRows>
__global__ void __launch_bounds__(kMlpThreads)
    exit_confidence_mlp_kernel(ExitConfidenceMlpParams params, int64_t slice_size, float* parts) {
  constexpr int kWarps = kMlpThreads / 32;
  constexpr int kSums = kRows * kMlpUnits;
  constexpr int kSumsOfWarps = kWarps * kSums;
  EECORE_SHARED(float, sums_of_warps, kSumsOfWarps);

  // Brings the weights to L2 while the previous kernel ends; L2 stays coherent with everything that
  // kernel writes.
  const int64_t begin = blockIdx.y * slice_size;
  const int64_t end = min(begin + slice_size, params.inner_size);
  if (blockIdx.x == 0) {
    constexpr int kLine = 128 / sizeof(float);
    const float* last = params.weight1 + end * params.hidden_size;
    const float* line = params.weight1 + begin * params.hidden_size + threadIdx.x * kLine;
    for (; line < last; line += kMlpThreads * kLine) prefetch_l2(line);
  }
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t first_row = static_cast<int64_t>(blockIdx.x) * kRows;
  const int64_t num_rows = min(params.num_seqs - first_row, int64_t{kRows});
  // Each lane of the first warp has one unit of one row of the tile.
  const int row = lane / kMlpUnits, unit = lane % kMlpUnits;
  float logit0 = 0.0f, logit1 = 0.0f;
  for (int64_t tile_unit = begin; tile_unit < end; tile_unit += kMlpUnits) {
    const int num_units = static_cast<int>(min(end - tile_unit, int64_t{kMlpUnits}));
    MlpTile<T, kRows> tile;
    tile.hidden = static_cast<const T*>(params.hidden) + first_row * params.hidden_stride;
    tile.hidden_stride = params.hidden_stride;
    tile.weight = params.weight1 + tile_unit * params.hidden_size;
    tile.n = params.hidden_size;
    tile.last_row = static_cast<int>(num_rows) - 1;
    tile.last_unit = num_units - 1;
    tile.add_all();

    // Sums of the warp, then of the block.
    const float sum_of_warp = reduce_each(tile.sums, lane);
    if (lane % (32 / kSums) == 0) sums_of_warps[warp * kSums + lane / (32 / kSums)] = sum_of_warp;
    __syncthreads();
    if (threadIdx.x < kSums && unit < num_units) {
      const int64_t at = tile_unit + unit;
      float x = params.bias1 == nullptr ? 0.0f : params.bias1[at];
#pragma unroll
      for (int i = 0; i < kWarps; ++i) x += sums_of_warps[i * kSums + lane];
      if (params.weight2 == nullptr) {
        if (unit == 0) logit0 = x;
        if (unit == 1) logit1 = x;
      } else {
        x = x < 0.0f ? 0.0f : x;  // NaN stays NaN: it must not look confident
        logit0 = fmaf(x, params.weight2[at], logit0);
        logit1 = fmaf(x, params.weight2[params.inner_size + at], logit1);
      }
    }
    __syncthreads();  // all threads read the sums before the next tile's are written
  }

  // A row's units lie in neighbouring lanes.
  if (warp == 0) {
    logit0 = reduce_lanes<kMlpUnits>(logit0);
    logit1 = reduce_lanes<kMlpUnits>(logit1);
    if (unit == 0 && row < num_rows) {
      if (gridDim.y > 1) {
        float* part = parts + 2 * (blockIdx.y * params.num_seqs + first_row + row);
        part[0] = logit0;
        part[1] = logit1;
      } else {
        params.confidence[first_row + row] = softmax_of_second(logit0, logit1, params.bias2);
      }
    }
  }
  go_on(params.accept, params.exit);
}

// Adds the parts of each row's logits, one warp per row. Grid: the rows by the block's warps. With
// params.accept or params.exit, one block has all rows and goes on as above.
__global__ void __launch_bounds__(kMlpMaxFinishThreads)
    exit_confidence_mlp_finish_kernel(ExitConfidenceMlpParams params, int64_t num_slices,
                                      const float* parts) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  if (row < params.num_seqs) {
    float logit0 = 0.0f, logit1 = 0.0f;
    for (int64_t slice = lane; slice < num_slices; slice += 32) {
      const float* part = parts + 2 * (slice * params.num_seqs + row);
      logit0 += part[0];
      logit1 += part[1];
    }
    logit0 = reduce_lanes<32>(logit0);
    logit1 = reduce_lanes<32>(logit1);
    if (lane == 0) params.confidence[row] = softmax_of_second(logit0, logit1, params.bias2);
  }
  go_on(params.accept, params.exit);
}

}  // namespace eecore::cuda
