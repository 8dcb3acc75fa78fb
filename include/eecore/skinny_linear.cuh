// skinny_linear: bias, activation and residual are applied to a tile of products as soon as it is
// summed.
#pragma once

#include "eecore/params.h"
#include "eecore/skinny_rows.cuh"

namespace eecore::cuda {

// The numbers that are added to a product: the bias of its row of the weight, and the residual.
template <typename T>
struct Addends {
  T bias, residual;
};

// The addends of one number of `out`; zeros where `is_there` is false or `row` is past the last.
template <typename T>
__device__ __forceinline__ Addends<T> addends_of(const SkinnyLinearParams& params, int64_t token,
                                                 int64_t row, bool is_there) {
  Addends<T> addends{};
  if (!is_there || row >= params.out_features) return addends;
  if (params.bias != nullptr) addends.bias = static_cast<const T*>(params.bias)[row];
  if (params.residual != nullptr) {
    addends.residual = static_cast<const T*>(params.residual)[token * params.residual_stride + row];
  }
  return addends;
}

// A number of `out`: rounded to T unless out is wide.
template <typename T>
__device__ __forceinline__ float rounded(const SkinnyLinearParams& params, float number) {
  return params.wide_out ? number : to_float(from_float<T>(number));
}

// The number of `out` that a product gives: with scale, bias, activation, multiplier, soft cap and
// residual.
template <typename T, typename W>
__device__ __forceinline__ float finished(const SkinnyLinearParams& params, int64_t row,
                                          float product, const Addends<T>& addends) {
  const float addend = to_float(addends.bias);
  const float before = to_float(addends.residual);
  float sum;
  if constexpr (kHasScales<W>) {
    sum = fmaf(product, params.weight_scale[row], addend);
  } else {
    sum = params.bias == nullptr ? product : product + addend;
  }
  // This form of the comparison keeps NaN.
  if (params.activation == Activation::kRelu && sum < 0.0f) sum = 0.0f;
  float result = rounded<T>(params, sum);
  if (params.multiplier != 1.0f) result = rounded<T>(params, __fmul_rn(result, params.multiplier));
  if (params.soft_cap > 0.0f) {
    result = rounded<T>(params, __fmul_rn(params.soft_cap, tanhf(result / params.soft_cap)));
  }
  return params.residual != nullptr ? rounded<T>(params, before + result) : result;
}

// Writes the number of `out` that a product gives.
template <typename T, typename W>
__device__ __forceinline__ void write_finished(const SkinnyLinearParams& params, int64_t token,
                                               int64_t row, float product,
                                               const Addends<T>& addends) {
  const float number = finished<T, W>(params, row, product, addends);
  const int64_t at = token * params.out_stride + row;
  if (params.wide_out) {
    static_cast<float*>(params.out)[at] = number;
  } else {
    static_cast<T*>(params.out)[at] = from_float<T>(number);
  }
}

// Grid: (blocks that share the tiles of out_features, groups of 8 * kNTiles tokens). With
// kMakesRows each block makes the rows of x ready, else params.x holds them in the format of
// SkinnyRows. Dynamic shared memory: the ring, the exchange, then the rows that the block makes
// ready.
template <typename T, int kMTiles, int kNTiles, bool kMakesRows, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, kMTiles == 1 && kNTiles <= 2 ? 2 : 1)
    skinny_linear_kernel(SkinnyLinearParams params, SkinnyPlan plan) {
  const SkinnyLane lane(plan);
  const int tile_rows = skinny_tile_rows(plan, kMTiles);
  const int my_tiles = tiles_of_block(plan, plan.num_tiles);
  const auto first_row = [&](int tile) {
    return (blockIdx.x + static_cast<int64_t>(tile) * gridDim.x) * tile_rows +
           lane.group * (16 * kMTiles);
  };
  const auto rows_of = [&](int tile, WeightRow<W>(&rows)[2 * kMTiles]) {
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      int64_t row = first_row(tile) + 8 * i + lane.row;
      if (row >= params.out_features) row = params.out_features - 1;
      rows[i] = weight_row<W>(params.weight, params.weight_table, row, params.weight_stride);
    }
  };

  WeightStream<W, kMTiles> weight(plan, lane, my_tiles);
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * (8 * kNTiles);
  const int ring_bytes = skinny_ring_bytes(plan, kMTiles);
  const int rows_at =
      ring_bytes + skinny_exchange_floats(plan, kMTiles) * static_cast<int>(sizeof(float));
  const auto x =
      start_product<T, kNTiles, kMakesRows>(params, plan, weight, rows_of, first_token, rows_at);

  const Shared<float> exchange = dynamic_shared<float>(ring_bytes);
  // Where a thread finishes only one product of each 8 columns: the addends of that product, loaded
  // while the tile is multiplied. `out` may be the residual: a thread writes only what it has read.
  constexpr int kEarly = kNTiles <= 4 ? kNTiles : 1;
  const bool is_early = kEarly == kNTiles && plan.num_slices >= kSlicesOfOneEach;
  int turn = 0;
  for (int tile = 0; tile < my_tiles; ++tile) {
    Addends<T> early[kEarly][kMTiles];
    if (is_early) {
      const int e = thread_of_slices(lane);
#pragma unroll
      for (int n = 0; n < kEarly; ++n) {
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) {
          const int column = e < 128 ? 8 * n + e / 16 : x.count;
          early[n][m] = addends_of<T>(params, first_token + column,
                                      first_row(tile) + 16 * m + e % 16, column < x.count);
        }
      }
    }
    float sums[kMTiles][kNTiles][4];
    multiply_tile(plan, lane, weight, rows_of, x, sums);
    for_each_product(plan, lane, exchange, turn, sums,
                     [&](int row_in_tile, int column, int n, const float (&values)[kMTiles]) {
                       if (column >= x.count) return;
                       const int64_t token = first_token + column;
#pragma unroll
                       for (int m = 0; m < kMTiles; ++m) {
                         const int64_t row = first_row(tile) + 16 * m + row_in_tile;
                         if (row >= params.out_features) break;
                         const Addends<T> addends = is_early
                                                        ? early[n < kEarly ? n : 0][m]
                                                        : addends_of<T>(params, token, row, true);
                         write_finished<T, W>(params, token, row, values[m], addends);
                       }
                     });
  }
}

}  // namespace eecore::cuda
