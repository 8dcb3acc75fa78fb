// Products that become heads, summed so that one thread has both elements of a head that are
// rotated together.
#pragma once

#include "eecore/skinny_gemm.cuh"

namespace eecore::cuda {

// How the rows of the weight are visited, 16 at a time. A thread has rows r and r + 8 of them: in
// the first tiles of a head these are elements that are rotated together.
struct HeadTiles {
  int count;          // of all heads
  Divisor per_head;   // head_dim / 16
  Divisor page_size;  // of the cache that the heads are written to
  int rotary;         // tiles of a head that are rotated
  int half;           // of rotary_dim

  __host__ __device__ static HeadTiles of(int64_t num_heads, int64_t head_dim, int64_t rotary_dim,
                                          int64_t page_size) {
    HeadTiles tiles;
    tiles.per_head = Divisor::of(head_dim / 16);
    tiles.page_size = Divisor::of(page_size);
    tiles.count = static_cast<int>(num_heads) * tiles.per_head.value;
    tiles.rotary = static_cast<int>(rotary_dim / 16);
    tiles.half = static_cast<int>(rotary_dim / 2);
    return tiles;
  }
  // Whether such heads consist of whole tiles.
  __host__ __device__ static bool fit(int64_t head_dim, int64_t rotary_dim) {
    return head_dim % 16 == 0 && rotary_dim % 16 == 0;
  }
};

// Where row 0 and row 8 of a tile lie in their head.
struct HeadTile {
  int head, first, second;
  bool is_rotary;

  __device__ __forceinline__ HeadTile(const HeadTiles& tiles, int tile) {
    head = tiles.per_head.quotient(tile);
    const int in_head = tile - head * tiles.per_head.value;
    is_rotary = in_head < tiles.rotary;
    first = in_head * (is_rotary ? 8 : 16);
    second = first + (is_rotary ? tiles.half : 8);
  }
};

// The rows of a weight of heads that a thread takes pieces of, where its warp's first tile is
// `first`; beyond the last tile, the rows of the last one.
template <int kMTiles, typename W>
__device__ __forceinline__ void paired_rows(const HeadTiles& tiles, int first,
                                            const SkinnyLane& lane, const W* weight, int64_t stride,
                                            const W* (&rows)[2 * kMTiles]) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
    const HeadTile at(tiles, min(first + m, tiles.count - 1));
    const int64_t row = at.head * 16 * tiles.per_head.value + lane.row;
    rows[2 * m] = weight + (row + at.first) * stride;
    rows[2 * m + 1] = weight + (row + at.second) * stride;
  }
}

// An element of a head, rounded as a model of dtype T rounds it. `scale` (of int8 weights) and
// `bias` may be null.
template <typename T, typename W>
__device__ __forceinline__ T projected(float sum, const float* scale, const T* bias, int row) {
  const float addend = bias == nullptr ? 0.0f : to_float(bias[row]);
  if constexpr (kHasScales<W>) {
    return from_float<T>(fmaf(sum, scale[row], addend));
  } else {
    return from_float<T>(bias == nullptr ? sum : sum + addend);
  }
}

// Rotates two elements, each rounded once.
template <typename T>
__device__ __forceinline__ void turn_pair(T& first, T& second, float cosine, float sine) {
  const float x = to_float(first), y = to_float(second);
  first = from_float<T>(fmaf(x, cosine, -(y * sine)));
  second = from_float<T>(fmaf(y, cosine, x * sine));
}

// The place of pair e of a group of warps, with 8 rows of x: each thread sums the slices of some
// pairs.
struct PairPlace {
  int m, row, column;

  __device__ __forceinline__ explicit PairPlace(int e)
      : m(e / 64),
        row(e % 8),
        column(2 * (e / 8 % 4) + e / 32 % 2) {}  // the columns of a warp are in different banks
};

// Calls finish(m, row, column, n, first, second) once for each pair of products of the block's
// tile: for rows `row` (0 to 7) and row + 8 of the warp's 16 rows m, and a column of the 8 from 8 *
// n on. Otherwise like for_each_product.
template <int kMTiles, int kNTiles, typename Finish>
__device__ __forceinline__ void for_each_pair(const SkinnyPlan& plan, const SkinnyLane& lane,
                                              Shared<float> exchange, int& turn,
                                              const float (&sums)[kMTiles][kNTiles][4],
                                              const Finish& finish) {
  if (plan.num_slices == 1) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 2 * kMTiles; ++i) {
        const float (&four)[4] = sums[i / 2][n];
        finish(i / 2, lane.row, 8 * n + 2 * lane.piece + i % 2, n, four[i % 2], four[i % 2 + 2]);
      }
    }
    return;
  }
  const int group = lane.group << plan.slices_shift;  // first warp of the group
  const int thread = thread_of_slices(lane);
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
    const Shared<float> buffer = exchange + turn * (kSkinnyWarps * kMTiles * kExchangeTile);
    turn = 1 - turn;
    put_products(buffer, group + lane.slice, lane, sums, n);
    __syncthreads();
    for (int e = thread; e < 64 * kMTiles; e += plan.num_slices * 32) {
      const PairPlace pair(e);
      const Shared<float> at = buffer + ((group * kMTiles + pair.m) * kExchangeTile +
                                         pair.column * kExchangeColumn + pair.row);
      finish(pair.m, pair.row, 8 * n + pair.column, n, sum_of_slices<kMTiles>(at, plan.num_slices),
             sum_of_slices<kMTiles>(at + 8, plan.num_slices));
    }
  }
}

}  // namespace eecore::cuda
