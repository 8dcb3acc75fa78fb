// skinny_linear whose results are heads of q, k and v, which go on as append_kv would have it: as
// soon as they are summed q is rotated in its place, k too, and k and v go to their cache slots.
#pragma once

#include "eecore/cache_slot.cuh"
#include "eecore/skinny_rows.cuh"

namespace eecore::cuda {

// Rows of x at most: with more the loads of a tile's end would be one behind the other.
constexpr int kMostAppendedRows = 8;

// How the rows of the weight are visited, 16 at a time. A thread has rows r and r + 8 of those: of
// the first tiles of a head they are elements that are rotated together.
struct HeadTiles {
  int count;     // of all heads
  int per_head;  // head_dim / 16
  int rotary;    // of a head, those that are rotated
  int half;      // of rotary_dim

  // Where head_dim and rotary_dim are multiples of 16.
  __host__ __device__ static HeadTiles of(const AppendKvParams& append) {
    HeadTiles tiles;
    tiles.per_head = static_cast<int>(append.head_dim / 16);
    tiles.count = static_cast<int>(append.num_q_heads + 2 * append.num_kv_heads) * tiles.per_head;
    tiles.rotary = static_cast<int>(append.rotary_dim / 16);
    tiles.half = static_cast<int>(append.rotary_dim / 2);
    return tiles;
  }
};

// Where row 0 and row 8 of a tile lie in their head.
struct HeadTile {
  int head, first, second;
  bool is_rotary;

  __device__ __forceinline__ HeadTile(const HeadTiles& tiles, int tile) {
    head = tile / tiles.per_head;
    const int in_head = tile - head * tiles.per_head;
    is_rotary = in_head < tiles.rotary;
    first = in_head * (is_rotary ? 8 : 16);
    second = first + (is_rotary ? tiles.half : 8);
  }
};

// finish(m, row, column, first, second) for each pair of products of the block's tile, once: of
// rows `row` (0 to 7) and row + 8 of the warp's 16 rows m. Else as for_each_product.
template <int kMTiles, typename Finish>
__device__ __forceinline__ void for_each_pair(const SkinnyPlan& plan, const SkinnyLane& lane,
                                              Shared<float> exchange, int& turn,
                                              const float (&sums)[kMTiles][1][4],
                                              const Finish& finish) {
  if (plan.num_slices == 1) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        finish(m, lane.row, 2 * lane.piece + i, sums[m][0][i], sums[m][0][i + 2]);
      }
    }
    return;
  }
  const int group = lane.group * plan.num_slices;  // its first warp
  const Shared<float> buffer = exchange + turn * (kSkinnyWarps * kMTiles * kExchangeTile);
  turn = 1 - turn;
  put_products(buffer, group + lane.slice, lane, sums, 0);
  __syncthreads();
  const int thread = lane.slice * 32 + static_cast<int>(threadIdx.x) % 32;
  for (int e = thread; e < 64 * kMTiles; e += plan.num_slices * 32) {
    const int row = e % 8, column = e / 8 % 8, m = e / 64;
    const Shared<float> at =
        buffer + ((group * kMTiles + m) * kExchangeTile + column * kExchangeColumn + row);
    finish(m, row, column, sum_of_slices<kMTiles>(at, plan.num_slices),
           sum_of_slices<kMTiles>(at + 8, plan.num_slices));
  }
}

// Grid: the blocks that share the tiles of out_features. Else as skinny_linear_kernel, with up to
// kMostAppendedRows tokens.
template <typename T, int kMTiles, bool kMakesRows, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, kMTiles == 1 ? 2 : 1)
    skinny_append_kernel(SkinnyLinearParams params, SkinnyPlan plan, HeadTiles tiles) {
  const SkinnyLane lane(plan);
  const AppendKvParams& append = params.append;
  const int head_dim = static_cast<int>(append.head_dim);
  const int tiles_at_a_time = skinny_tile_rows(plan, kMTiles) / 16;
  const int my_tiles = tiles_of_block(plan.num_tiles);
  const auto first_tile = [&](int tile) {
    const int block = static_cast<int>(blockIdx.x), num_blocks = static_cast<int>(gridDim.x);
    return (block + tile * num_blocks) * tiles_at_a_time + lane.group * kMTiles;
  };
  const auto rows_of = [&](int tile, const W*(&rows)[2 * kMTiles]) {
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      const HeadTile at(tiles, min(first_tile(tile) + m, tiles.count - 1));
      const int64_t row = at.head * head_dim + lane.row;
      const W* weight = static_cast<const W*>(params.weight);
      rows[2 * m] = weight + (row + at.first) * params.weight_stride;
      rows[2 * m + 1] = weight + (row + at.second) * params.weight_stride;
    }
  };

  WeightStream<W, kMTiles> weight(plan, lane, my_tiles);
  const int ring_bytes = skinny_ring_bytes(plan, kMTiles);
  const int rows_at =
      ring_bytes + skinny_exchange_floats(plan, kMTiles) * static_cast<int>(sizeof(float));
  const auto x = start_product<T, 1, kMakesRows>(params, plan, weight, rows_of, 0, rows_at);

  // Where each row's heads go, and how they are turned.
  EECORE_SHARED(CacheSlot, slots, kMostAppendedRows);
  EECORE_SHARED(int64_t, positions, kMostAppendedRows);
  if (static_cast<int>(threadIdx.x) < x.count) {
    const int64_t slot = append.slot_mapping[threadIdx.x];
    slots[threadIdx.x] = slot < 0 ? CacheSlot{-1, 0} : cache_slot(slot, append.page_size);
    positions[threadIdx.x] = tiles.rotary > 0 ? append.positions[threadIdx.x] : 0;
  }
  if (plan.num_slices == 1) __syncthreads();  // else the exchange has a barrier

  const T* bias = static_cast<const T*>(params.bias);
  const auto projected = [&](int row, float sum) {
    const float addend = bias == nullptr ? 0.0f : to_float(bias[row]);
    if constexpr (kHasScales<W>) {
      return from_float<T>(fmaf(sum, params.weight_scale[row], addend));
    } else {
      return from_float<T>(bias == nullptr ? sum : sum + addend);
    }
  };
  const Shared<float> exchange = dynamic_shared<float>(ring_bytes);
  int turn = 0;
  for (int tile = 0; tile < my_tiles; ++tile) {
    float sums[kMTiles][1][4];
    multiply_tile(plan, lane, weight, rows_of, x, sums);
    for_each_pair(
        plan, lane, exchange, turn, sums,
        [&](int m, int row, int column, float first_sum, float second_sum) {
          const int tile_of_head = first_tile(tile) + m;
          if (column >= x.count || tile_of_head >= tiles.count) return;
          const HeadTile at(tiles, tile_of_head);
          const int kv_head = at.head - static_cast<int>(append.num_q_heads);
          const int num_kv_heads = static_cast<int>(append.num_kv_heads);
          const int first = at.first + row, second = at.second + row;
          const bool is_turned = at.is_rotary && kv_head < num_kv_heads;
          float cosine = 0.0f, sine = 0.0f;
          if (is_turned) {
            const int64_t position = positions[column];
            const float* cos_sin = append.cos_sin + (position * append.rotary_dim + first);
            cosine = cos_sin[0];
            sine = cos_sin[tiles.half];
          }

          const T a = projected(at.head * head_dim + first, first_sum);
          const T b = projected(at.head * head_dim + second, second_sum);
          T turned_a = a, turned_b = b;
          if (is_turned) {
            const float p = to_float(a), q = to_float(b);
            turned_a = from_float<T>(fmaf(p, cosine, -(q * sine)));
            turned_b = from_float<T>(fmaf(q, cosine, p * sine));
          }
          T* out = static_cast<T*>(params.out) + (column * params.out_stride + at.head * head_dim);
          out[first] = kv_head < 0 ? turned_a : a;
          out[second] = kv_head < 0 ? turned_b : b;
          const CacheSlot slot = slots[column];
          if (kv_head < 0 || slot.page < 0) return;
          T* cache = kv_head < num_kv_heads
                         ? static_cast<T*>(append.k_cache) +
                               cache_offset(append.k_cache_strides, slot, kv_head)
                         : static_cast<T*>(append.v_cache) +
                               cache_offset(append.v_cache_strides, slot, kv_head - num_kv_heads);
          cache[first] = turned_a;
          cache[second] = turned_b;
        });
  }
}

}  // namespace eecore::cuda
