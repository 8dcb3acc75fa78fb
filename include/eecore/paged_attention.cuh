// paged_attention: a block holds the rows (query, head of the group) of one tile of a sequence that
// share a kv head, and streams their keys and values through shared memory. The keys are cut into
// splits, and the results of a row's splits are merged in ascending order: first the splits of a
// span, which take its steps in turns, within the block that has the span; then the spans, also
// within the block or, where several blocks share a tile, in the last block of the tile to finish
// or in a second kernel.
//
// A row's arithmetic over a split depends only on its own keys and on where the span begins, not on
// the other rows of its warp: one warp walks the split in steps of kStepKeys keys, and keys
// that only a neighbouring row sees have a weight of exactly 0. With a fixed split size spans also
// begin at fixed keys, so the row's result does not depend on the rest of the batch, to the bit.
#pragma once

#include <type_traits>

#include "eecore/attention_rows.cuh"
#include "eecore/attention_tile.cuh"
#include "eecore/key_stream.cuh"

namespace eecore::cuda {

// The results of one band of the warps' rows over a round of splits, one result for each team, in
// shared memory.
struct RoundResults {
  Shared<float> values;  // [kAttentionWarps, kResultSize], of which [kBandRows, kResultStride] used
  Shared<float> stats;   // [kAttentionWarps, kBandRows, 2]: maximum, weight
  int band, round;
  TileRounds rounds;
};

// The query and head of a row of a tile.
struct QueryHead {
  int token, head;
};

__device__ __forceinline__ QueryHead query_head(const AttentionPlan& plan,
                                                const AttentionTile& tile, int kv_head, int row) {
  const int query = plan.group_size.quotient(tile.first_row + row);
  return {tile.seq.first_token + query,
          (kv_head - query) * plan.group_size.value + tile.first_row + row};
}

// Writes a row's elements of the result, from `at` on.
template <typename T, typename C, int kSize>
__device__ __forceinline__ void store_result(const PagedAttentionParams& params,
                                             const AttentionPlan& plan, QueryHead row, int at,
                                             const PartialRow<kSize>& result) {
  T* const out = static_cast<T*>(params.out) + row.token * params.out_token_stride +
                 row.head * params.out_head_stride + at;
  const float scale =
      scale_of<T, C>(params.cache_format.value_scales, plan.group_size.quotient(row.head));
  result.store(out, plan.out_aligned, scale);
}

// Merges a band's results of a round with those of its span, and a complete span with the block's
// earlier spans. Stores the result in `out` if it is complete, else in the workspace: in the place
// of the span where blocks share the tile; otherwise in place 0 (all spans so far) or place 1 (the
// span that is not complete).
template <typename T, int kHeadDim, typename C, int kBands>
__device__ __forceinline__ void finish_round(const PagedAttentionParams& params,
                                             const AttentionPlan& plan, const AttentionTile& tile,
                                             int kv_head, const RoundResults& results) {
  using Sizes = AttentionSizes<T, kHeadDim, C, kBands>;
  constexpr int kPack = Sizes::kPack, kBandRows = Sizes::kBandRows;
  // The statistics of the span, then of all spans so far. Each is read in one half and written in
  // the other, because all threads of a row read it.
  EECORE_SHARED(float, stats, Sizes::kStatsSize);
  constexpr int kRowStats = Sizes::kTileRows * 2;
  const Shared<float> of_span = stats, of_spans = stats + 2 * kRowStats;
  const TileRounds& rounds = results.rounds;
  const bool shares_tile = rounds.num_blocks(plan) > 1;
  const int round = results.round, span_index = rounds.span_of(round);
  const int span_place = shares_tile ? span_index : 1;

#pragma unroll 1
  for (int i = threadIdx.x;; i += kAttentionThreads) {
    const int of_band = i / Sizes::kPieces, at = i % Sizes::kPieces * kPack;
    const int row =
        of_band / kBandRows * Sizes::kWarpRows + results.band * kBandRows + of_band % kBandRows;
    if (row >= tile.num_rows) break;
    if (at >= params.head_dim) continue;
    const QueryHead place = query_head(plan, tile, kv_head, row);
    const auto address_of = [&](int index) {
      return partial_address(params, plan, index, place.token, place.head);
    };
    const auto take_up = [&](int index, Shared<float> kept, int turn, PartialRow<kPack>& partial) {
      load_partial_values(address_of(index), at, partial);
      partial.maximum = kept[turn % 2 * kRowStats + row * 2];
      partial.weight = kept[turn % 2 * kRowStats + row * 2 + 1];
    };
    const auto keep = [&](int index, Shared<float> kept, int turn,
                          const PartialRow<kPack>& partial) {
      store_partial_values(address_of(index), at, partial);
      if (at != 0) return;
      kept[(turn + 1) % 2 * kRowStats + row * 2] = partial.maximum;
      kept[(turn + 1) % 2 * kRowStats + row * 2 + 1] = partial.weight;
    };

    PartialRow<kPack> span;
    if (!rounds.begins_span(round)) take_up(span_place, of_span, round, span);
#pragma unroll 1
    for (int team = 0; team < tile.num_teams(); ++team) {
      const int warp = team * tile.team_warps() + of_band / kBandRows;
      const Shared<float> values = results.values + warp * Sizes::kResultSize +
                                   of_band % kBandRows * Sizes::kResultStride + at;
      PartialRow<kPack> of_team;
#pragma unroll
      for (int j = 0; j < kPack; j += 4) {
        const Pack<float> pack = shared_load16(values + j);
#pragma unroll
        for (int e = 0; e < 4; ++e) of_team.values[j + e] = pack.values[e];
      }
      const int stat = (warp * kBandRows + of_band % kBandRows) * 2;
      of_team.maximum = results.stats[stat];
      of_team.weight = results.stats[stat + 1];
      span.merge(of_team);
    }
    if (!rounds.ends_span(round)) {
      keep(span_place, of_span, round, span);
      continue;
    }
    if (shares_tile) {
      const PartialAddress to = address_of(span_place);
      store_partial_values(to, at, span);
      if (at == 0) {
        to.stats[0] = span.maximum;
        to.stats[1] = span.weight;
      }
      continue;
    }
    PartialRow<kPack> total;
    if (span_index != rounds.first_span()) take_up(0, of_spans, span_index, total);
    total.merge(span);
    if (span_index + 1 >= rounds.end_span()) {
      store_result<T, C>(params, plan, place, at, total);
    } else {
      keep(0, of_spans, span_index, total);
    }
  }
}

// False for float32 with a bias, which has no registers to spare.
template <typename T, bool kBiased>
constexpr bool kLastBlockMerges = !(kBiased && std::is_same_v<T, float>);

// Merges the results that the blocks of a tile have stored in the workspace, in the last block that
// gets here. All threads of each block call it after storing their results.
template <typename T, int kHeadDim, typename C>
__device__ __forceinline__ void merge_in_last_block(const PagedAttentionParams& params,
                                                    const AttentionPlan& plan,
                                                    const AttentionTile& tile,
                                                    const TileRounds& rounds, int kv_head) {
  EECORE_SHARED(int, is_last, 1);
  __syncthreads();  // the block's results are written
  if (threadIdx.x == 0) {
    // The last block resets the counter to 0. With a fence on each side, the last block sees what
    // the other blocks wrote before they counted, in all its threads after the barrier.
    const auto last = static_cast<unsigned>(rounds.num_blocks(plan) - 1);
    __threadfence();
    is_last[0] = atomicInc(reinterpret_cast<unsigned*>(params.arrivals) + blockIdx.x, last) == last;
    __threadfence();
  }
  __syncthreads();
  if (!is_last[0]) return;
  constexpr int kPieces = kHeadDim / kMergedSize;
#pragma unroll 1
  for (int i = threadIdx.x; i < tile.num_rows * kPieces; i += kAttentionThreads) {
    const int row = i / kPieces, at = i % kPieces * kMergedSize;
    if (at >= params.head_dim) continue;
    const QueryHead place = query_head(plan, tile, kv_head, row);
    store_result<T, C>(params, plan, place, at,
                       merge_partials<8>(params, plan, rounds, place.token, place.head, at));
  }
}

// Grid: (num_tiles * num_kv_heads, num_blocks), heads first, so that neighbours read neighbouring
// memory; tiles backwards, so that the tiles of a causal prefill with the most keys start first.
template <typename T, int kHeadDim, bool kBiased, typename C, int kBands>
__device__ __forceinline__ void attend_tile(const PagedAttentionParams& params,
                                            const AttentionPlan& plan) {
  using Sizes = AttentionSizes<T, kHeadDim, C, kBands>;
  using Rows =
      std::conditional_t<Sizes::kTensorCores, TensorCoreRows<T, kHeadDim, kBiased, C, kBands>,
                         PlainRows<kHeadDim, kBiased, C>>;
  constexpr int kWarpRows = Sizes::kWarpRows, kBandRows = Sizes::kBandRows;
  EECORE_SHARED(int64_t, offsets, kAttentionWarps* Sizes::kStepKeys * 2);
  EECORE_SHARED(float, result_stats, Sizes::kResultStatsSize);
  // If params.constant_places promises it, what the previous kernel does not write is read before
  // that kernel has ended.
  wait_for_previous_kernel(!plan.early_places);

  // The tile of this block.
  const int of_heads = plan.kv_heads.quotient(static_cast<int>(blockIdx.x));
  const int kv_head = static_cast<int>(blockIdx.x) - of_heads * plan.kv_heads.value;
  const int tile_index = plan.num_tiles - 1 - of_heads;
  const auto first_tile = [&](int seq, int token) {
    return static_cast<int>(int64_t{token} * plan.group_size.value / Sizes::kTileRows) + seq;
  };
  const QuerySequence seq = find_sequence(params, tile_index, first_tile);
  const int tile_of_seq = tile_index - first_tile(seq.index, seq.first_token);
  AttentionTile tile =
      make_tile<kBandRows, kBands>(params, plan, seq, tile_of_seq * Sizes::kTileRows);
  // A block waits even where it has nothing to do: its end must imply the end of all earlier
  // kernels.
  if (tile.num_rows <= 0) return wait_for_previous_kernel();

  // The spans of the tile, of which this block takes every num_blocks-th, and their rounds.
  TileRounds rounds = tile.rounds();
  if (static_cast<int>(blockIdx.y) >= rounds.num_blocks(plan)) return wait_for_previous_kernel();
  // The tile is kept in shared memory while keys are processed: registers are scarce.
  EECORE_SHARED(AttentionTile, kept_tile, 1);
  if (threadIdx.x == 0) kept_tile[0] = tile;
  __syncthreads();
  int round = rounds.first_of_span(rounds.first_span() + static_cast<int>(blockIdx.y));
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int team = warp >> (kMaxTeamsShift - tile.teams_shift);
  const int row_of_tile = (warp & (tile.team_warps() - 1)) * kWarpRows;
  const int first_row = tile.first_row + row_of_tile;
  const Shared<C> ring = dynamic_shared<C>(Sizes::kRestBytes + Sizes::kWideBytes);
  const auto bias_table = dynamic_shared<float>(Sizes::kRestBytes + Sizes::kWideBytes +
                                                plan.num_stages * Sizes::kStageBytes);
  Rows rows(params, plan, tile, first_row, bias_table,
            scale_of<T, C>(params.cache_format.key_scales, kv_head));
  KeyStream<T, kHeadDim, C> stream(params, plan, kept_tile, kv_head, round, ring,
                                   offsets + warp * Sizes::kStepKeys * 2);
  stream.start(tile.seq.position(0));
  wait_for_previous_kernel();
  let_next_kernel_start();
  if constexpr (kBiased) {  // while the first keys are in flight
    spread_position_bias(params, plan, kv_head, bias_table);
    __syncthreads();
  }
  {
    const int row = min(first_row + lane % kWarpRows, tile.first_row + tile.num_rows - 1);
    const int query = plan.group_size.quotient(row);
    const int64_t q_offset =
        (tile.seq.first_token + query) * params.q_token_stride +
        ((kv_head - query) * plan.group_size.value + row) * params.q_head_stride;
    rows.load_queries(static_cast<const T*>(params.q), q_offset, params.head_dim, plan.q_aligned,
                      stream.unused(), dynamic_shared<T>() + row_of_tile * Sizes::kRestStride,
                      team == 0 && row_of_tile < Sizes::kTileRows);
  }
  // The stream's first round, if others follow, takes as many stages as the ring has.
  int least_stages = rounds.after(plan, round) < rounds.end ? plan.num_stages : 1;
  while (true) {
    rows.start();
    tile = kept_tile[0];
    const Split split = tile.split(plan, (round << tile.teams_shift) + team);
    int first_key = split.first;
    for (int left = max(tile.num_stages(plan, round), least_stages); left > 0; --left) {
      stream.advance();
#pragma unroll 1
      for (int i = 0; i < tile.team_warps(); ++i) {
        rows.attend(stream.keys(i), stream.values(i), first_key, split.end);
        first_key += 1 << split.stride_shift;
      }
    }

    // The results take the place of the keys that were read last, while the next ones arrive.
    tile = kept_tile[0];
    rounds = tile.rounds();
    const int bands = tile.num_rows > kBandRows ? kBands : 1;
#pragma unroll  // the sums of a band that has been stored take no registers
    for (int band = 0; band < kBands; ++band) {
      if (band >= bands) break;
      if (band == 0) {
        stream.meet();
      } else {
        __syncthreads();  // all threads have read the results of the previous band
      }
      const RoundResults results{stream.reused(), result_stats, band, round, rounds};
      rows.store(band, results.values + warp * Sizes::kResultSize,
                 results.stats + warp * kBandRows * 2);
      __syncthreads();
      finish_round<T, kHeadDim, C, kBands>(params, plan, tile, kv_head, results);
    }
    round = rounds.after(plan, round);
    if (round >= rounds.end) break;
    least_stages = 1;
    __syncthreads();  // all threads have read the results before the ring is filled further
  }
  if constexpr (kLastBlockMerges<T, kBiased>) {
    if (plan.last_merges && rounds.num_blocks(plan) > 1) {
      merge_in_last_block<T, kHeadDim, C>(params, plan, tile, rounds, kv_head);
    }
  }
}

template <typename T, int kHeadDim, bool kBiased>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocksPerMultiprocessor)
    paged_attention_kernel(PagedAttentionParams params, AttentionPlan plan) {
  attend_tile<T, kHeadDim, kBiased, T, 1>(params, plan);
}

// The same for caches in float8.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocksPerMultiprocessor)
    paged_attention_float8_kernel(PagedAttentionParams params, AttentionPlan plan) {
  attend_tile<T, kHeadDim, false, Float8, 1>(params, plan);
}

// The same with two bands of rows a warp, for which it reads each key from shared memory once. Head
// dimensions above 128 would take more registers than there are.
template <typename T, int kHeadDim, typename C>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocksPerMultiprocessor)
    paged_attention_wide_kernel(PagedAttentionParams params, AttentionPlan plan) {
  attend_tile<T, kHeadDim, false, C, 2>(params, plan);
}

constexpr int kAttentionCombineThreads = 32;  // many blocks even for one query
// Blocks per multiprocessor. With so few asked for, ptxas leaves registers to the loads in flight.
constexpr int kAttentionCombineBlocks = 8;

// out = the rows' partial results merged in ascending order, for tiles that blocks share.
// Grid: (num_tokens, ceil(num_q_heads * head_dim / kMergedSize / kAttentionCombineThreads)).
template <typename T, int kBandRows>
__global__ void __launch_bounds__(kAttentionCombineThreads, kAttentionCombineBlocks)
    paged_attention_combine_kernel(PagedAttentionParams params, AttentionPlan plan) {
  constexpr int kTileRows = kAttentionWarps * kBandRows;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int token = static_cast<int>(blockIdx.x);
  const QuerySequence seq =
      find_sequence(params, token, [](int, int first_token) { return first_token; });
  const int pieces = static_cast<int>(params.head_dim) / kMergedSize;
  const int index = static_cast<int>(blockIdx.y) * kAttentionCombineThreads + threadIdx.x;
  const int head = index / pieces, at = index % pieces * kMergedSize;
  if (head >= params.num_q_heads) return;

  const int row =
      (token - seq.first_token) * plan.group_size.value + plan.group_size.remainder(head);
  const AttentionTile tile = make_tile<kBandRows>(params, plan, seq, row / kTileRows * kTileRows);
  const TileRounds rounds = tile.rounds();  // its spans do not depend on the bands of a warp
  if (rounds.num_blocks(plan) == 1) return;
  // Where the caches hold T there are no scales.
  store_result<T, Float8>(params, plan, {token, head}, at,
                          merge_partials<16>(params, plan, rounds, token, head, at));
}

}  // namespace eecore::cuda
