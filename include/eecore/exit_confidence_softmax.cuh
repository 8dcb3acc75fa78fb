// exit_confidence_softmax: each thread keeps, for its columns of the products of the LM head, what
// is to be known of the logits that it has seen; the logits themselves never leave its registers.
#pragma once

#include "eecore/params.h"
#include "eecore/skinny_gemm.cuh"

namespace eecore::cuda {

constexpr int kHeadMTiles = 2;

// What is known of some of a row's logits. NaN among them shows as a NaN in `total`.
struct alignas(16) LogitSummary {
  float largest;  // -infinity at first
  float second;   // the largest of the others
  float total;    // sum of exp(logit - largest)
  int32_t index;  // of the largest, the lowest among equals; kNoIndex where all are -infinity

  static constexpr int32_t kNoIndex = INT32_MAX;
  __device__ __forceinline__ static LogitSummary none() {
    return {-INFINITY, -INFINITY, 0.0f, kNoIndex};
  }
};

// exp(x - largest), where there is anything larger than -infinity.
__device__ __forceinline__ float exp_below(float x, float largest) {
  return x > -INFINITY ? expf(x - largest) : 0.0f;
}

// Both together, in either order.
__device__ __forceinline__ LogitSummary merged(const LogitSummary& a, const LogitSummary& b) {
  LogitSummary both;
  both.largest = fmaxf(a.largest, b.largest);
  const bool a_wins = a.largest > b.largest || (a.largest == b.largest && a.index < b.index);
  both.index = a_wins ? a.index : b.index;
  both.second = fmaxf(a_wins ? b.largest : a.largest, fmaxf(a.second, b.second));
  // A summary of nothing but -infinity adds its total of 0, or NaN, as it is.
  const float a_scale = a.largest > -INFINITY ? expf(a.largest - both.largest) : 1.0f;
  const float b_scale = b.largest > -INFINITY ? expf(b.largest - both.largest) : 1.0f;
  both.total = a.total * a_scale + b.total * b_scale;
  return both;
}

// Adds logits of ascending indices; those with `valid` false do not exist.
template <int kCount>
__device__ __forceinline__ void add_logits(LogitSummary& summary, const float (&logits)[kCount],
                                           const int32_t (&indices)[kCount],
                                           const bool (&valid)[kCount]) {
  const float before = summary.largest;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!valid[i]) continue;
    if (logits[i] > summary.largest) {
      summary.second = summary.largest;
      summary.largest = logits[i];
      summary.index = indices[i];
    } else if (logits[i] > summary.second) {
      summary.second = logits[i];
    }
  }
  const float largest = summary.largest;
  if (largest > before) summary.total *= exp_below(before, largest);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (!valid[i]) continue;
    const bool is_nan = logits[i] != logits[i];
    summary.total += is_nan ? logits[i] : exp_below(logits[i], largest);
  }
}

__device__ __forceinline__ LogitSummary shuffled(const LogitSummary& summary, int distance) {
  return {__shfl_xor_sync(kWholeWarp, summary.largest, distance),
          __shfl_xor_sync(kWholeWarp, summary.second, distance),
          __shfl_xor_sync(kWholeWarp, summary.total, distance),
          __shfl_xor_sync(kWholeWarp, summary.index, distance)};
}

// Grid: (blocks that share the tiles of the vocabulary, groups of 8 * kNTiles rows). The number of
// blocks must not depend on the rows: it is part of the order of the sums. params.hidden holds rows
// as SkinnyRows wants them. Writes summaries: [num_seqs, blocks]. Dynamic shared memory: the ring.
template <typename T, int kNTiles>
__global__ void __launch_bounds__(kSkinnyThreads, 1)
    exit_confidence_softmax_kernel(ExitConfidenceSoftmaxParams params, SkinnyPlan plan,
                                   LogitSummary* summaries) {
  const SkinnyLane lane(plan);
  const int tile_rows = skinny_tile_rows(plan, kHeadMTiles);
  const int my_tiles = tiles_of_block(plan.num_tiles);
  const int num_rows = static_cast<int>(params.vocab_size);
  // Of the thread's first row; past the last row it may pass INT32_MAX.
  const auto first_row = [&](int tile) {
    return (blockIdx.x + static_cast<int64_t>(tile) * gridDim.x) * tile_rows +
           lane.group * (16 * kHeadMTiles) + lane.row;
  };
  const auto rows_of = [&](int tile, const T*(&rows)[2 * kHeadMTiles]) {
#pragma unroll
    for (int i = 0; i < 2 * kHeadMTiles; ++i) {
      int64_t row = first_row(tile) + 8 * i;
      if (row >= num_rows) row = num_rows - 1;
      rows[i] = static_cast<const T*>(params.lm_head) + row * params.lm_head_stride;
    }
  };

  WeightStream<T, kHeadMTiles> weight(plan, lane, my_tiles);
  if (!plan.early_weight) wait_for_previous_kernel();
  weight.start(rows_of);
  if (plan.early_weight) wait_for_previous_kernel();
  let_next_kernel_start();

  // Summaries of this thread's columns: 8 * n + 2 * lane.piece and the next.
  LogitSummary mine[kNTiles][2];
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) mine[n][0] = mine[n][1] = LogitSummary::none();
  const int64_t first_seq = static_cast<int64_t>(blockIdx.y) * (8 * kNTiles);
  const auto x = skinny_rows<kNTiles>(static_cast<const T*>(params.hidden), params.hidden_stride,
                                      params.num_seqs, first_seq);
  for (int tile = 0; tile < my_tiles; ++tile) {
    float sums[kHeadMTiles][kNTiles][4];
    multiply_tile(plan, lane, weight, rows_of, x, sums);
    int32_t indices[2 * kHeadMTiles];
    bool valid[2 * kHeadMTiles];
#pragma unroll
    for (int i = 0; i < 2 * kHeadMTiles; ++i) {
      const int64_t row = first_row(tile) + 8 * i;
      indices[i] = static_cast<int32_t>(row);
      valid[i] = row < num_rows;
    }
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float logits[2 * kHeadMTiles];
#pragma unroll
        for (int i = 0; i < 2 * kHeadMTiles; ++i) logits[i] = sums[i / 2][n][i % 2 * 2 + j];
        add_logits(mine[n][j], logits, indices, valid);
      }
    }
  }

  // One summary for each warp and row, then for the block, in the order of the warps.
  EECORE_SHARED(float, of_warps, kSkinnyWarps * 8 * kNTiles * 4);
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      LogitSummary summary = mine[n][j];
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        summary = merged(summary, shuffled(summary, distance));
      }
      if (lane.row == 0) {
        const int column = 8 * n + 2 * lane.piece + j;
        const Shared<float> to =
            of_warps + (static_cast<int>(threadIdx.x) / 32 * (8 * kNTiles) + column) * 4;
        to[0] = summary.largest;
        to[1] = summary.second;
        to[2] = summary.total;
        to[3] = bits_to_float(static_cast<uint32_t>(summary.index));
      }
    }
  }
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column >= x.count) return;
  LogitSummary whole = LogitSummary::none();
  for (int warp = 0; warp < kSkinnyWarps; ++warp) {
    const Shared<float> from = of_warps + (warp * (8 * kNTiles) + column) * 4;
    const LogitSummary summary{from[0], from[1], from[2],
                               static_cast<int32_t>(float_to_bits(from[3]))};
    whole = merged(whole, summary);
  }
  summaries[(first_seq + column) * gridDim.x + blockIdx.x] = whole;
}

constexpr int kSummaryWarps = 4;

// Grid: one warp for each row, kSummaryWarps of them in a block.
__global__ void __launch_bounds__(32 * kSummaryWarps)
    logit_summary_kernel(ExitConfidenceSoftmaxParams params, const LogitSummary* summaries,
                         int num_summaries) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSummaryWarps + threadIdx.x / 32;
  if (row >= params.num_seqs) return;
  LogitSummary whole = LogitSummary::none();
  for (int i = lane; i < num_summaries; i += 32) {
    whole = merged(whole, summaries[row * num_summaries + i]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    whole = merged(whole, shuffled(whole, distance));
  }
  if (lane != 0) return;

  const float largest = whole.largest, total = whole.total;
  const bool finite = largest > -INFINITY && largest < INFINITY;
  const bool not_a_number = total != total && !(largest == INFINITY);
  // The softmax of infinite logits is not defined.
  params.confidence[row] = finite ? (0.0f - expm1f(whole.second - largest)) / total : NAN;
  params.token[row] = whole.index == LogitSummary::kNoIndex ? 0 : whole.index;
  if (params.logsumexp != nullptr) {
    params.logsumexp[row] = finite || not_a_number ? largest + logf(total) : largest;
  }
  if (params.top_logit != nullptr) params.top_logit[row] = not_a_number ? total : largest;
}

}  // namespace eecore::cuda
