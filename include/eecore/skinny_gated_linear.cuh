// skinny_gated_linear: a warp multiplies 16 rows of the gate and the matching 16 rows of up, so
// that one thread has both products of an output.
#pragma once

#include "eecore/params.h"
#include "eecore/skinny_rows.cuh"

namespace eecore::cuda {

constexpr int kGatedMTiles = 2;  // gate, then up

// silu(x), or gelu(x) in its approximation by tanh: 0.5 * (1 + tanh(u)) is sigmoid(2 * u), so both
// are x times a sigmoid.
__device__ __forceinline__ float gate_activation(float x, bool is_gelu) {
  constexpr float kTwiceRootTwoOverPi = 1.59576912f;
  const float u = is_gelu ? kTwiceRootTwoOverPi * fmaf(0.044715f * x * x, x, x) : x;
  return x / (1.0f + expf(-u));
}

// The number of `out` that the products of row `row` of the gate and of up give.
template <typename T, typename W>
__device__ __forceinline__ T gated(const SkinnyGatedLinearParams& params, int64_t row, float gate,
                                   float up) {
  const T* bias = static_cast<const T*>(params.bias);
  if constexpr (kHasScales<W>) {
    const float* scale = params.weight_scale + row;
    const float gate_scale = scale[0], up_scale = scale[params.inner_size];
    const bool biased = bias != nullptr;
    gate = fmaf(gate, gate_scale, biased ? to_float(bias[row]) : 0.0f);
    up = fmaf(up, up_scale, biased ? to_float(bias[params.inner_size + row]) : 0.0f);
  } else if (bias != nullptr) {
    gate += to_float(bias[row]);
    up += to_float(bias[params.inner_size + row]);
  }
  const bool is_gelu = params.activation == Activation::kGeluTanh;
  const float active = rounded<T>(gate_activation(rounded<T>(gate), is_gelu));
  return from_float<T>(active * rounded<T>(up));
}

// Grid: (blocks that share the tiles of inner_size, groups of 8 * kNTiles tokens). With kMakesRows
// each block makes the rows of x ready, else params.x holds them in the format of SkinnyRows.
// Dynamic shared memory: the ring, the exchange, then the rows that the block makes ready.
template <typename T, int kNTiles, bool kMakesRows, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, 1)
    skinny_gated_linear_kernel(SkinnyGatedLinearParams params, SkinnyPlan plan) {
  const SkinnyLane lane(plan);
  const int tile_rows = skinny_tile_rows(plan, 1);
  const int my_tiles = tiles_of_block(plan, plan.num_tiles);
  const auto first_row = [&](int tile) {
    return (blockIdx.x + static_cast<int64_t>(tile) * gridDim.x) * tile_rows + lane.group * 16;
  };
  const auto rows_of = [&](int tile, WeightRow<W>(&rows)[2 * kGatedMTiles]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int64_t row = first_row(tile) + 8 * i + lane.row;
      if (row >= params.inner_size) row = params.inner_size - 1;
      for (int half = 0; half < 2; ++half) {
        rows[2 * half + i] = weight_row<W>(params.weight, params.weight_table,
                                           row + half * params.inner_size, params.weight_stride);
      }
    }
  };

  WeightStream<W, kGatedMTiles> weight(plan, lane, my_tiles);
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * (8 * kNTiles);
  const int ring_bytes = skinny_ring_bytes(plan, kGatedMTiles);
  const int rows_at =
      ring_bytes + skinny_exchange_floats(plan, kGatedMTiles) * static_cast<int>(sizeof(float));
  const auto x =
      start_product<T, kNTiles, kMakesRows>(params, plan, weight, rows_of, first_token, rows_at);

  T* out = static_cast<T*>(params.out);
  const Shared<float> exchange = dynamic_shared<float>(ring_bytes);
  int turn = 0;
  for (int tile = 0; tile < my_tiles; ++tile) {
    float sums[kGatedMTiles][kNTiles][4];
    multiply_tile(plan, lane, weight, rows_of, x, sums);
    for_each_product(plan, lane, exchange, turn, sums,
                     [&](int row_in_tile, int column, int, const float (&values)[kGatedMTiles]) {
                       const int64_t row = first_row(tile) + row_in_tile;
                       if (column >= x.count || row >= params.inner_size) return;
                       out[(first_token + column) * params.out_stride + row] =
                           gated<T, W>(params, row, values[0], values[1]);
                     });
  }
}

}  // namespace eecore::cuda
