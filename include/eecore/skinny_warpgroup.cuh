// Skinny products by warpgroups (sm_90a).
//
// Where the weight has too few rows for all multiprocessors, a cluster of blocks shares 64 of them:
// each takes some slices, and then finishes a share of the sums, which it reads from the shared
// memory of all.
#pragma once

#include "eecore/skinny_append.cuh"
#include "eecore/skinny_gated_linear.cuh"
#include "eecore/skinny_linear.cuh"
#include "eecore/warpgroup_tile.cuh"

namespace eecore::cuda {

constexpr int kMaxWarpgroupCluster = 4;

// Floats of shared memory in which a block leaves its sums to its cluster, in place of the ring and
// the rows of x.
template <int kMTiles>
constexpr int kClusterBuffer = kSkinnyWarps * kMTiles * kExchangeTile;  // for 8 columns
template <int kMTiles, int kNTiles>
constexpr int kClusterFloats = kNTiles * kClusterBuffer<kMTiles>;

// The blocks of a cluster, which share a tile of 64 rows, and their sums. Grid: (blocks of a
// cluster by groups of rows of x, clusters that share the tiles): groups come first, so that blocks
// that read the same rows of the weight run together, and memory is read once.
template <int kMTiles, int kNTiles>
class Cluster {
 public:
  __device__ __forceinline__ Cluster(const SkinnyPlan& plan, int shift)
      : plan_(plan),
        exchange_(dynamic_shared<float>()),
        num_blocks_(1 << shift),
        rank_(static_cast<int>(blockIdx.x) & (num_blocks_ - 1)),
        first_token_(static_cast<int64_t>(blockIdx.x >> shift) * (8 * kNTiles)) {}

  __device__ __forceinline__ bool is_one_block() const { return num_blocks_ == 1; }
  __device__ __forceinline__ int64_t first_token() const { return first_token_; }
  __device__ __forceinline__ int num_blocks() const { return num_blocks_; }
  __device__ __forceinline__ int rank() const { return rank_; }

  // Leaves the block's sums to the others. Nothing of the ring and the rows of x is needed then.
  __device__ __forceinline__ void put(const SkinnyLane& lane,
                                      const float (&sums)[kMTiles][kNTiles][4]) const {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      put_products(exchange_ + n * kClusterBuffer<kMTiles>, first_warp(lane.group) + lane.slice,
                   lane, sums, n);
    }
    cluster_sync();
  }

  // Calls body(column, i) for this thread's share of `count` items of each column.
  template <typename Body>
  __device__ __forceinline__ void for_own(int count, const Body& body) const {
    for (int e = rank_ * kSkinnyThreads + static_cast<int>(threadIdx.x); e < 8 * kNTiles * count;
         e += num_blocks_ * kSkinnyThreads) {
      body(e / count, e % count);
    }
    cluster_sync();  // other blocks read this one's sums until then
  }

  // The sums of rows `row` to row + 3 of a group's 16 rows m over all slices, in their order.
  __device__ __forceinline__ Pack<float> sums_of(int group, int m, int row, int column) const {
    const Shared<float> at = exchange_ + (column / 8 * kClusterBuffer<kMTiles> +
                                          (first_warp(group) * kMTiles + m) * kExchangeTile +
                                          column % 8 * kExchangeColumn + row);
    Pack<float> of_slices[kMaxWarpgroupCluster][kMaxWarpgroupSlices] = {};
#pragma unroll
    for (int block = 0; block < kMaxWarpgroupCluster; ++block) {
#pragma unroll
      for (int slice = 0; slice < kMaxWarpgroupSlices; ++slice) {
        if (block >= num_blocks_) continue;
        of_slices[block][slice] = cluster_load16(at + slice * kMTiles * kExchangeTile, block);
      }
    }
    Pack<float> sums = of_slices[0][0];
#pragma unroll
    for (int i = 1; i < kMaxWarpgroupCluster * kMaxWarpgroupSlices; ++i) {
      const int block = i / kMaxWarpgroupSlices;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float addend = of_slices[block][i % kMaxWarpgroupSlices].values[j];
        if (block < num_blocks_) sums.values[j] += addend;
      }
    }
    return sums;
  }

 private:
  __device__ __forceinline__ int first_warp(int group) const { return group << plan_.slices_shift; }

  const SkinnyPlan& plan_;
  Shared<float> exchange_;
  int num_blocks_, rank_;
  int64_t first_token_;
};

// The work of the kernels. row_of(tile, row, m) is the row of the weight that is row `row` of tile
// `tile` of 16 rows, for each m below kMTiles. started() is called when x may be read, and
// finish(lane, first_tile, first_token, exchange, turn, sums) with the sums of each tile of the
// block, whose first 16 rows are first_tile. Dynamic shared memory: the ring, the exchange, then
// the buffers of rows of x. The blocks of a cluster have plan.num_slices slices each, and one tile.
template <typename T, typename W, int kMTiles, int kNTiles, typename Params, typename RowOf,
          typename Started, typename Finish>
__device__ __forceinline__ void multiply_by_warpgroups(const Params& params, const SkinnyPlan& plan,
                                                       const Cluster<kMTiles, kNTiles>& cluster,
                                                       const RowOf& row_of, const Started& started,
                                                       const Finish& finish) {
#if EECORE_HAS_WGMMA
  const SkinnyLane lane = SkinnyLane::of_warpgroup(plan);
  const int groups = skinny_tile_rows(plan, 1) / 16;
  const bool is_shared = !cluster.is_one_block();
  const int number = static_cast<int>(blockIdx.y);
  const int my_tiles = is_shared ? 1 : tiles_of_block(plan, plan.num_tiles, number);
  const auto first_tile = [&](int tile) {
    return (number + tile * static_cast<int>(gridDim.y)) * groups;
  };
  const auto rows_of = [&](int tile, WeightRow<W>(&rows)[2 * kMTiles]) {
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      rows[i] = row_of(first_tile(tile) + lane.group, i % 2 * 8 + lane.row, i / 2);
    }
  };
  // The slices of all blocks, to which the chunks are dealt out.
  SkinnyPlan chunk_plan = plan;
  chunk_plan.num_slices = cluster.num_blocks() * plan.num_slices;
  SkinnyLane chunk_lane = lane;
  chunk_lane.slice += cluster.rank() * plan.num_slices;

  WeightStream<W, kMTiles> weight(chunk_plan, chunk_lane, my_tiles);
  const int64_t first_token = cluster.first_token();
  const int ring_bytes = skinny_ring_bytes(plan, kMTiles);
  const Shared<float> exchange = dynamic_shared<float>(ring_bytes);
  const int exchange_floats = is_shared ? 0 : skinny_exchange_floats(plan, kMTiles);
  const int rows_at = ring_bytes + exchange_floats * static_cast<int>(sizeof(float));
  const auto x =
      start_product<T, kNTiles, false>(params, plan, weight, rows_of, first_token, rows_at);
  started();
  ChunksOfRows<T, W, kNTiles> chunks(chunk_plan, chunk_lane, lane.slice, x,
                                     dynamic_shared<T>(rows_at));
  int turn = 0;
  for (int tile = 0; tile < my_tiles; ++tile) {
    float sums[kMTiles][kNTiles][4];
    const auto row_of_tile = [&](int i) {
      return row_of(first_tile(tile) + i / kMTiles / 16, i / kMTiles % 16, i % kMTiles);
    };
    multiply_together(chunk_plan, chunk_lane, weight, rows_of, row_of_tile, chunks, sums);
    finish(lane, first_tile(tile), first_token, exchange, turn, sums);
  }
#else
  __trap();  // the launcher asks for a GPU that has wgmma, and for a build for it
#endif
}

// The work of the products with one number of `out` for each row: finish(token, row, values) gets
// the products of row r of num_rows with rows r + m * num_rows of the weight, for each m.
template <typename T, typename W, int kMTiles, int kNTiles, typename Params, typename Finish>
__device__ __forceinline__ void multiply_rows_by_warpgroups(const Params& params,
                                                            const SkinnyPlan& plan,
                                                            int cluster_shift, int64_t num_rows,
                                                            const Finish& finish) {
  const Cluster<kMTiles, kNTiles> cluster(plan, cluster_shift);
  const auto row_of = [&](int tile, int row_of_tile, int m) {
    int64_t row = int64_t{tile} * 16 + row_of_tile;
    if (row >= num_rows) row = num_rows - 1;
    return weight_row<W>(params.weight, params.weight_table, row + m * num_rows,
                         params.weight_stride);
  };
  multiply_by_warpgroups<T, W>(
      params, plan, cluster, row_of, Nothing{},
      [&](const SkinnyLane& lane, int first_tile, int64_t first_token, Shared<float> exchange,
          int& turn, const float (&sums)[kMTiles][kNTiles][4]) {
        const auto finish_one = [&](int group, int row_of_group, int column,
                                    const float (&values)[kMTiles]) {
          const int64_t row = int64_t{first_tile + group} * 16 + row_of_group;
          const int64_t token = first_token + column;
          if (token < params.num_tokens && row < num_rows) finish(token, row, values);
        };
        if (cluster.is_one_block()) {
          for_each_product(plan, lane, exchange, turn, sums,
                           [&](int row, int column, int, const float (&values)[kMTiles]) {
                             finish_one(lane.group, row, column, values);
                           });
          return;
        }
        cluster.put(lane, sums);
        cluster.for_own(kWarpgroupRows / 4, [&](int column, int i) {
          Pack<float> fours[kMTiles];
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            fours[m] = cluster.sums_of(i / 4, m, i % 4 * 4, column);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float values[kMTiles];
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) values[m] = fours[m].values[j];
            finish_one(i / 4, i % 4 * 4 + j, column, values);
          }
        });
      });
}

// Blocks of a product that share a multiprocessor.
template <typename W, int kMTiles, int kNTiles>
constexpr int kWarpgroupBlocks = kMTiles == 1 && !kIsPacked<W> && !is_wide(kNTiles) ? 2 : 1;

// skinny_linear_kernel by warpgroups.
template <typename T, int kNTiles, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, kWarpgroupBlocks<W, 1, kNTiles>)
    skinny_warpgroup_linear_kernel(SkinnyLinearParams params, SkinnyPlan plan, int cluster_shift) {
  multiply_rows_by_warpgroups<T, W, 1, kNTiles>(
      params, plan, cluster_shift, params.out_features,
      [&](int64_t token, int64_t row, const float (&values)[1]) {
        const Addends<T> addends = addends_of<T>(params, token, row, true);
        write_finished<T, W>(params, token, row, values[0], addends);
      });
}

// skinny_gated_linear_kernel by warpgroups.
template <typename T, int kNTiles, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, kWarpgroupBlocks<W, kGatedMTiles, kNTiles>)
    skinny_warpgroup_gated_kernel(SkinnyGatedLinearParams params, SkinnyPlan plan,
                                  int cluster_shift) {
  multiply_rows_by_warpgroups<T, W, kGatedMTiles, kNTiles>(
      params, plan, cluster_shift, params.inner_size,
      [&](int64_t token, int64_t row, const float (&values)[kGatedMTiles]) {
        static_cast<T*>(params.out)[token * params.out_stride + row] =
            gated<T, W>(params, row, values[0], values[1]);
      });
}

// skinny_append_kernel by warpgroups.
template <typename T, int kNTiles, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, kWarpgroupBlocks<W, 1, kNTiles>)
    skinny_warpgroup_append_kernel(SkinnyLinearParams params, SkinnyPlan plan, int cluster_shift,
                                   HeadTiles tiles) {
  EECORE_SHARED(CacheSlot, slots, 8 * kNTiles);
  EECORE_SHARED(int64_t, angles, 8 * kNTiles);
  const Cluster<1, kNTiles> cluster(plan, cluster_shift);
  const int64_t left = params.num_tokens - cluster.first_token();
  const AppendedHeads<T, W> heads(params, tiles, slots, angles,
                                  left < 8 * kNTiles ? static_cast<int>(left) : 8 * kNTiles,
                                  cluster.first_token());
  if (plan.early_places) heads.load_places();
  const auto row_of = [&](int tile, int row, int) {
    const HeadTile at(tiles, min(tile, tiles.count - 1));
    const int64_t in_head = row < 8 ? at.first + row : at.second + row - 8;
    return static_cast<const W*>(params.weight) +
           (at.head * 16 * tiles.per_head.value + in_head) * params.weight_stride;
  };
  const auto started = [&] {
    if (!plan.early_places) heads.load_places();
    __syncthreads();
  };
  multiply_by_warpgroups<T, W>(
      params, plan, cluster, row_of, started,
      [&](const SkinnyLane& lane, int first_tile, int64_t, Shared<float> exchange, int& turn,
          const float (&sums)[1][kNTiles][4]) {
        const auto append = [&](int group, int row, int column, float first, float second) {
          const int tile = first_tile + group;
          heads.append(tile, row, column, first, second, heads.rotation_of(tile, row, column));
        };
        if (cluster.is_one_block()) {
          for_each_pair(plan, lane, exchange, turn, sums,
                        [&](int, int row, int column, int, float first, float second) {
                          append(lane.group, row, column, first, second);
                        });
          return;
        }
        cluster.put(lane, sums);
        cluster.for_own(kWarpgroupRows / 8, [&](int column, int i) {
          const Pack<float> first = cluster.sums_of(i / 2, 0, i % 2 * 4, column);
          const Pack<float> second = cluster.sums_of(i / 2, 0, i % 2 * 4 + 8, column);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            append(i / 2, i % 2 * 4 + j, column, first.values[j], second.values[j]);
          }
        });
      });
}

}  // namespace eecore::cuda
