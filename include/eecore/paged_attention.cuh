// paged_attention: a block holds the rows (query, head of the group) of one tile of a sequence that
// share a kv head, and streams their keys and values through shared memory. The keys are cut into
// splits; a row's results of its splits are merged in ascending order, in the block or, where
// several blocks share a tile, by the last of them to be done or by a second kernel.
//
// A row's arithmetic over a split depends on its own keys and on where the split begins alone: one
// warp walks the split in steps of kStepKeys keys, and keys that only a neighbour sees weigh
// exactly 0. With a fixed split size the row therefore does not depend on its company, to the bit.
#pragma once

#include <type_traits>

#include "eecore/attention_rows.cuh"
#include "eecore/attention_tile.cuh"
#include "eecore/key_stream.cuh"

namespace eecore::cuda {

// The results of a tile's rows over one round of splits, one for each team, in shared memory.
struct RoundResults {
  Shared<float> values;  // [kAttentionWarps, kWarpRows, kPartStride]
  Shared<float> stats;   // [kAttentionWarps, kWarpRows, 2]: maximum, weight
  int round, end_round;
  bool is_first;     // of the block
  bool shares_tile;  // with other blocks
};

// What a row of a tile is.
struct QueryHead {
  int token, head;
};

__device__ __forceinline__ QueryHead query_head(const AttentionPlan& plan,
                                                const AttentionTile& tile, int kv_head, int row) {
  const int query = (tile.first_row + row) / plan.group_size;
  return {tile.seq.first_token + query, (kv_head - query) * plan.group_size + tile.first_row + row};
}

// A kv head's scale of what a cache of C holds.
template <typename T, typename C>
__device__ __forceinline__ float scale_of(const float* scales, int kv_head) {
  if constexpr (std::is_same_v<T, C>) return 1.0f;
  return load_or(scales == nullptr ? nullptr : scales + kv_head, 1.0f);
}

// Writes a row's elements of the result from `at` on.
template <typename T, typename C, int kSize>
__device__ __forceinline__ void store_result(const PagedAttentionParams& params,
                                             const AttentionPlan& plan, QueryHead row, int at,
                                             const PartialRow<kSize>& result) {
  T* const out = static_cast<T*>(params.out) + row.token * params.out_token_stride +
                 row.head * params.out_head_stride + at;
  const float scale = scale_of<T, C>(params.cache_format.value_scales, row.head / plan.group_size);
  result.store(out, plan.out_aligned, scale);
}

// Merges a round's results with those of the block's rounds before, and passes them on: to `out`
// when there is no more to come, else to the workspace.
template <typename T, int kHeadDim, typename C>
__device__ __forceinline__ void finish_round(const PagedAttentionParams& params,
                                             const AttentionPlan& plan, const AttentionTile& tile,
                                             int kv_head, const RoundResults& results) {
  using Sizes = AttentionSizes<T, kHeadDim>;
  constexpr int kPack = Sizes::kPack;
  // Of the rows so far, read in one half and written in the other: all threads of a row read them.
  EECORE_SHARED(float, total_stats, Sizes::kStatsSize);
  const Shared<float> stats_before = total_stats + results.round % 2 * Sizes::kTileRows * 2;
  const Shared<float> stats_after = total_stats + (results.round + 1) % 2 * Sizes::kTileRows * 2;
  const bool shares_tile = results.shares_tile;
  const bool keeps_splits = shares_tile && plan.fixed_split_size > 0;
  const bool is_last = results.round + plan.num_blocks >= results.end_round;
  const int first_split = results.round * tile.num_teams();

  for (int i = threadIdx.x; i < tile.num_rows * Sizes::kPieces; i += kAttentionThreads) {
    const int row = i / Sizes::kPieces, at = i % Sizes::kPieces * kPack;
    if (at >= params.head_dim) continue;
    const QueryHead place = query_head(plan, tile, kv_head, row);
    const auto store_partial = [&](int index, const PartialRow<kPack>& partial) {
      const PartialAddress to = partial_address(params, plan, index, place.token, place.head);
      store_partial_values(to, at, partial);
      if (at == 0) {
        to.stats[0] = partial.maximum;
        to.stats[1] = partial.weight;
      }
    };

    PartialRow<kPack> total;
    if (!results.is_first && !shares_tile) {
      load_partial_values(partial_address(params, plan, 0, place.token, place.head), at, total);
      total.maximum = stats_before[row * 2];
      total.weight = stats_before[row * 2 + 1];
    }
    for (int team = 0; team < tile.num_teams(); ++team) {
      const int part = team * tile.team_warps * Sizes::kWarpRows + row;
      PartialRow<kPack> of_team;
#pragma unroll
      for (int j = 0; j < kPack; j += 4) {
        const Pack<float> pack = shared_load16(results.values + part * Sizes::kPartStride + at + j);
#pragma unroll
        for (int e = 0; e < 4; ++e) of_team.values[j + e] = pack.values[e];
      }
      of_team.maximum = results.stats[part * 2];
      of_team.weight = results.stats[part * 2 + 1];
      if (!keeps_splits) {
        total.merge(of_team);
      } else if (first_split + team < tile.end_split) {
        store_partial(first_split + team, of_team);
      }
    }
    if (keeps_splits) continue;
    if (shares_tile) {
      store_partial(results.round, total);
    } else if (is_last) {
      store_result<T, C>(params, plan, place, at, total);
    } else {
      store_partial_values(partial_address(params, plan, 0, place.token, place.head), at, total);
      if (at == 0) {
        stats_after[row * 2] = total.maximum;
        stats_after[row * 2 + 1] = total.weight;
      }
    }
  }
}

// float32 with a bias has no registers to spare for it.
template <typename T, bool kBiased>
constexpr bool kLastBlockMerges = !(kBiased && std::is_same_v<T, float>);

// Merges what the blocks of a tile have left in the workspace, in the last of them to come here.
// All threads of each block call it, when they have written what they leave.
template <typename T, int kHeadDim, typename C>
__device__ __forceinline__ void merge_in_last_block(const PagedAttentionParams& params,
                                                    const AttentionPlan& plan,
                                                    const AttentionTile& tile, int kv_head) {
  using Sizes = AttentionSizes<T, kHeadDim>;
  EECORE_SHARED(int, is_last, 1);
  __syncthreads();  // what the block leaves is written
  if (threadIdx.x == 0) {
    // The counter goes back to 0 with the last one. A fence on each side: what the others wrote
    // before they counted is seen by whoever counts last, and by its block behind the barrier.
    const auto last = static_cast<unsigned>(tile.num_blocks(plan) - 1);
    __threadfence();
    is_last[0] = atomicInc(reinterpret_cast<unsigned*>(params.arrivals) + blockIdx.x, last) == last;
    __threadfence();
  }
  __syncthreads();
  if (!is_last[0]) return;
#pragma unroll 1
  for (int i = threadIdx.x; i < tile.num_rows * Sizes::kPieces; i += kAttentionThreads) {
    const int row = i / Sizes::kPieces, at = i % Sizes::kPieces * Sizes::kPack;
    if (at >= params.head_dim) continue;
    const QueryHead place = query_head(plan, tile, kv_head, row);
    store_result<T, C>(
        params, plan, place, at,
        merge_partials<Sizes::kPack>(params, plan, tile, place.token, place.head, at));
  }
}

// Grid: (num_tiles * num_kv_heads, num_blocks), heads first, so that neighbours read neighbouring
// memory; tiles backwards, so that those of a causal prefill with the most keys start first.
template <typename T, int kHeadDim, bool kBiased, typename C>
__device__ __forceinline__ void attend_tile(const PagedAttentionParams& params,
                                            const AttentionPlan& plan) {
  using Sizes = AttentionSizes<T, kHeadDim, C>;
  using Rows = std::conditional_t<Sizes::kTensorCores, TensorCoreRows<T, kHeadDim, kBiased, C>,
                                  PlainRows<kHeadDim, kBiased, C>>;
  constexpr int kWarpRows = Sizes::kWarpRows;
  EECORE_SHARED(int64_t, offsets, kAttentionWarps* Sizes::kStepKeys * 2);
  wait_for_previous_kernel();
  let_next_kernel_start();

  // This block's tile.
  const int num_kv_heads = static_cast<int>(params.num_kv_heads);
  const int kv_head = static_cast<int>(blockIdx.x) % num_kv_heads;
  const int tile_index = plan.num_tiles - 1 - static_cast<int>(blockIdx.x) / num_kv_heads;
  const auto first_tile = [&](int seq, int token) {
    return static_cast<int>(int64_t{token} * plan.group_size / Sizes::kTileRows) + seq;
  };
  const QuerySequence seq = find_sequence(params, tile_index, first_tile);
  const int tile_of_seq = tile_index - first_tile(seq.index, seq.first_token);
  const AttentionTile tile =
      make_tile<kWarpRows>(params, plan, seq, tile_of_seq * Sizes::kTileRows);
  if (tile.num_rows <= 0) return;

  // Its rounds.
  const int num_teams = tile.num_teams(), end_round = tile.end_round();
  int round = tile.first_round() + static_cast<int>(blockIdx.y);
  const int num_blocks = tile.num_blocks(plan);
  if (static_cast<int>(blockIdx.y) >= num_blocks) return;
  const bool shares_tile = num_blocks > 1;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int team = warp / tile.team_warps;
  const int first_row = tile.first_row + warp % tile.team_warps * kWarpRows;
  const Shared<C> ring = dynamic_shared<C>(Sizes::kRestBytes + Sizes::kWideBytes);
  const auto bias_table = dynamic_shared<float>(Sizes::kRestBytes + Sizes::kWideBytes +
                                                plan.num_stages * Sizes::kStageBytes);
  Rows rows(params, plan, tile, first_row, bias_table,
            scale_of<T, C>(params.cache_format.key_scales, kv_head));
  bool is_first = true;
  do {
    KeyStream<T, kHeadDim, C> stream(params, plan, tile, kv_head,
                                     tile.split(round * num_teams + team), ring,
                                     offsets + warp * Sizes::kStepKeys * 2);
    stream.start();
    if (is_first) {
      if constexpr (kBiased) {  // while the first keys are under way
        spread_position_bias(params, plan, kv_head, bias_table);
        __syncthreads();
      }
      const int row = min(first_row + lane % kWarpRows, tile.first_row + tile.num_rows - 1);
      const int query = row / plan.group_size;
      const int64_t q_offset = (seq.first_token + query) * params.q_token_stride +
                               ((kv_head - query) * plan.group_size + row) * params.q_head_stride;
      rows.load_queries(static_cast<const T*>(params.q), q_offset, params.head_dim, plan.q_aligned,
                        stream.unused(), dynamic_shared<T>() + warp * Sizes::kRestSize);
    }
    rows.start();
    int num_stages = stream.num_stages();
    if (tile.team_warps == 2) {  // both teams come to the same barriers
      num_stages = max(num_stages, stream.num_stages(tile.split(round * num_teams + 1 - team)));
    }
    for (int stage = 0; stage < num_stages; ++stage) {
      stream.advance(stage);
      for (int i = 0; i < tile.team_warps; ++i) {
        rows.attend(stream.keys(i), stream.values(i), stream.first_key(stage, i), stream.end());
      }
    }

    __syncthreads();  // all teams have read the ring, where the results lie now
    RoundResults results{};
    results.values = dynamic_shared<float>(Sizes::kRestBytes);
    results.stats = results.values + Sizes::kTileRows * Sizes::kPartStride;
    results.round = round;
    results.end_round = end_round;
    results.is_first = is_first;
    results.shares_tile = shares_tile;
    rows.store(results.values + warp * kWarpRows * Sizes::kPartStride,
               results.stats + warp * kWarpRows * 2);
    __syncthreads();
    finish_round<T, kHeadDim, C>(params, plan, tile, kv_head, results);
    is_first = false;
    round += plan.num_blocks;
    if (round < end_round) __syncthreads();  // the results are read before the ring is filled again
  } while (round < end_round);
  if constexpr (kLastBlockMerges<T, kBiased>) {
    if (plan.last_merges && shares_tile) {
      merge_in_last_block<T, kHeadDim, C>(params, plan, tile, kv_head);
    }
  }
}

template <typename T, int kHeadDim, bool kBiased>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocksPerMultiprocessor)
    paged_attention_kernel(PagedAttentionParams params, AttentionPlan plan) {
  attend_tile<T, kHeadDim, kBiased, T>(params, plan);
}

// The same of caches in float8.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocksPerMultiprocessor)
    paged_attention_float8_kernel(PagedAttentionParams params, AttentionPlan plan) {
  attend_tile<T, kHeadDim, false, Float8>(params, plan);
}

constexpr int kAttentionCombineThreads = 128;
// Of a multiprocessor. Asked for so few, ptxas leaves registers to the loads that are under way.
constexpr int kAttentionCombineBlocks = 4;

// out = the rows' partials merged in ascending order, of tiles that blocks share.
// Grid: (num_tokens, ceil(num_q_heads * head_dim / Pack<T>::kSize / kAttentionCombineThreads)).
template <typename T, int kWarpRows>
__global__ void __launch_bounds__(kAttentionCombineThreads, kAttentionCombineBlocks)
    paged_attention_combine_kernel(PagedAttentionParams params, AttentionPlan plan) {
  constexpr int kPack = Pack<T>::kSize, kTileRows = kAttentionWarps * kWarpRows;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int token = static_cast<int>(blockIdx.x);
  const QuerySequence seq =
      find_sequence(params, token, [](int, int first_token) { return first_token; });
  const int pieces = static_cast<int>(params.head_dim) / kPack;
  const int index = static_cast<int>(blockIdx.y) * kAttentionCombineThreads + threadIdx.x;
  const int head = index / pieces, at = index % pieces * kPack;
  if (head >= params.num_q_heads) return;

  const int row = (token - seq.first_token) * plan.group_size + head % plan.group_size;
  const AttentionTile tile = make_tile<kWarpRows>(params, plan, seq, row / kTileRows * kTileRows);
  if (tile.num_blocks(plan) == 1) return;
  // Where the caches hold T there are no scales.
  store_result<T, Float8>(params, plan, {token, head}, at,
                          merge_partials<kPack>(params, plan, tile, token, head, at));
}

}  // namespace eecore::cuda
