// skinny_linear: a tile of products is finished with bias, activation and residual as soon as it is
// summed.
#pragma once

#include "eecore/params.h"
#include "eecore/skinny_rows.cuh"

namespace eecore::cuda {

// Grid: (blocks that share the tiles of out_features, groups of 8 * kNTiles tokens). With
// kMakesRows each block makes the rows of x ready, else params.x holds them as SkinnyRows wants
// them. Dynamic shared memory: the ring, the exchange, then the rows that the block makes.
template <typename T, int kMTiles, int kNTiles, bool kMakesRows, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, kMTiles == 1 && kNTiles <= 2 ? 2 : 1)
    skinny_linear_kernel(SkinnyLinearParams params, SkinnyPlan plan) {
  const SkinnyLane lane(plan);
  const int tile_rows = skinny_tile_rows(plan, kMTiles);
  const int my_tiles = tiles_of_block(plan.num_tiles);
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

  const T* bias = static_cast<const T*>(params.bias);
  const T* residual = static_cast<const T*>(params.residual);
  T* out = static_cast<T*>(params.out);
  const Shared<float> exchange = dynamic_shared<float>(ring_bytes);
  int turn = 0;
  for (int tile = 0; tile < my_tiles; ++tile) {
    float sums[kMTiles][kNTiles][4];
    multiply_tile(plan, lane, weight, rows_of, x, sums);
    for_each_product(plan, lane, exchange, turn, sums,
                     [&](int row_in_tile, int column, const float (&values)[kMTiles]) {
                       if (column >= x.count) return;
                       const int64_t token = first_token + column;
#pragma unroll
                       for (int m = 0; m < kMTiles; ++m) {
                         const int64_t row = first_row(tile) + 16 * m + row_in_tile;
                         if (row >= params.out_features) break;
                         // All loads at once: their latency ends the kernel.
                         const float addend = bias == nullptr ? 0.0f : to_float(bias[row]);
                         const float before =
                             residual == nullptr
                                 ? 0.0f
                                 : to_float(residual[token * params.residual_stride + row]);
                         float sum;
                         if constexpr (kHasScales<W>) {
                           sum = fmaf(values[m], params.weight_scale[row], addend);
                         } else {
                           sum = bias == nullptr ? values[m] : values[m] + addend;
                         }
                         // Compared so that NaN stays NaN.
                         if (params.activation == Activation::kRelu && sum < 0.0f) sum = 0.0f;
                         T result = from_float<T>(sum);
                         if (params.multiplier != 1.0f) {
                           result = from_float<T>(__fmul_rn(to_float(result), params.multiplier));
                         }
                         if (params.soft_cap > 0.0f) {
                           result = from_float<T>(__fmul_rn(
                               params.soft_cap, tanhf(to_float(result) / params.soft_cap)));
                         }
                         if (residual != nullptr) result = from_float<T>(before + to_float(result));
                         out[token * params.out_stride + row] = result;
                       }
                     });
  }
}

}  // namespace eecore::cuda
