// Lets measured rows exit, by one block, because whether a row exits depends on the measurements of
// other rows. The block's warps share the states of the exiting rows. exit_rows consists of this
// alone; kernels that measure confidences may end with it.
#pragma once

#include "eecore/copy_row.cuh"
#include "eecore/graph_condition.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kExitRowsSegment = 2048;  // bytes of a state that a warp copies at a time

// Whether `condition` holds for any thread of a block of whole warps.
__device__ __forceinline__ bool any_in_block(bool condition) {
  constexpr int kMaxWarps = 32;
  EECORE_SHARED(int, any_in_warp, kMaxWarps);
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  condition = __any_sync(kWholeWarp, condition) != 0;
  __syncthreads();  // all threads have read the flag of an earlier call
  if (lane == 0) any_in_warp[warp] = condition;
  __syncthreads();
  const bool any = lane < static_cast<int>(blockDim.x) / 32 && any_in_warp[lane] != 0;
  return __any_sync(kWholeWarp, any) != 0;
}

// Whether the measurement of a row of the program counts.
__device__ __forceinline__ bool is_wanted(const ExitRowsParams& params, int32_t r) {
  const bool asked = params.exited[r] == 0 && params.thresholds[r] < INFINITY;
  // With a head, an accepted row keeps the token of the layer that accepted it.
  return asked && (params.token == nullptr || params.accepted[r] == 0);
}

// Records the measurement of the j-th measured row, and whether it accepts the row.
__device__ __forceinline__ void measure_row(const ExitRowsParams& params, int64_t j) {
  const int32_t r = params.row[params.asked == nullptr ? j : params.asked[j]];
  if (!is_wanted(params, r)) return;
  const float threshold = params.thresholds[r];
  float confidence = params.confidence[j];
  if (params.cumulative && params.measured_at[r] > 0) {
    const float before = params.final_confidence[r];
    confidence = before + __fmul_rn(1.0f - before, confidence);
  }
  params.final_confidence[r] = confidence;
  params.measured_at[r] = params.layer;
  if (params.token != nullptr) {
    params.final_token[r] = params.token[j];
    params.final_logprob[r] = params.top_logit[j] - params.logsumexp[j];
    params.token_at[r] = params.layer;
  }
  if (threshold < 1.0f && confidence >= threshold) params.accepted[r] = 1;
}

// Whether a row exits; `held_back`: rows that only exit together cannot exit yet.
__device__ __forceinline__ bool row_exits(const ExitRowsParams& params, int32_t r, bool held_back) {
  const bool goes = params.accepted[r] != 0 && !(held_back && params.together[r] != 0);
  return params.exited[r] == 0 && (goes || params.exit_after[r] <= params.layer);
}

// Records the exit of active row i, except for its state.
__device__ __forceinline__ void record_exit(const ExitRowsParams& params, int64_t i) {
  const int32_t r = params.row[i];
  params.exit_layer[r] = params.layer;
  if (params.fills[r] != 0) params.fill_from[r] = params.layer;
  const int32_t without_token = params.token_at[r] != params.layer;
  params.pending[r] = params.kind[r] == kFromLogits ? kFromLogits : without_token;
  params.exited[r] = 1;
  params.slot_mapping[i] = -1;
  params.seq_lens[i] = 1;
}

// Records the measurements of all rows, and lets rows exit. All threads of the one block call it,
// which are whole warps; the caller orders what they wrote before.
__device__ __forceinline__ void let_rows_exit(const ExitRowsParams& params) {
  const int thread = static_cast<int>(threadIdx.x);
  const int num_threads = static_cast<int>(blockDim.x);
  if (params.confidence != nullptr) {
    for (int64_t j = thread; j < params.num_asked; j += num_threads) measure_row(params, j);
  }
  if (!params.decide) return;
  __syncthreads();  // acceptance is known

  bool held_back = false;
  for (int64_t r = thread; r < params.num_rows; r += num_threads) {
    held_back =
        held_back || (params.together[r] != 0 && params.exited[r] == 0 && params.accepted[r] == 0);
  }
  held_back = any_in_block(held_back);

  // States are copied in segments: all warps have work even where one row exits.
  const unsigned segments =
      static_cast<unsigned>((params.row_bytes + kExitRowsSegment - 1) / kExitRowsSegment);
  const unsigned items = static_cast<unsigned>(params.num_active) * segments;
  for (unsigned item = threadIdx.x / 32; item < items; item += num_threads / 32) {
    const int64_t i = item / segments, begin = int64_t{item % segments} * kExitRowsSegment;
    const int32_t r = params.row[i];
    if (!row_exits(params, r, held_back)) continue;
    const int64_t rest = params.row_bytes - begin;
    copy_row<4>(static_cast<const char*>(params.hidden) + i * params.hidden_stride + begin,
                static_cast<char*>(params.final_hidden) + r * params.final_hidden_stride + begin,
                rest < kExitRowsSegment ? rest : kExitRowsSegment, thread % 32, 32);
  }
  __syncthreads();  // all threads have read `exited` before it is written

  for (int64_t i = thread; i < params.num_active; i += num_threads) {
    if (row_exits(params, params.row[i], held_back)) record_exit(params, i);
  }
  __syncthreads();  // `exited` is written

  bool stays = false;
  for (int64_t r = thread; r < params.num_rows; r += num_threads) {
    stays = stays || params.exited[r] == 0;
  }
  stays = any_in_block(stays);
  if (thread != 0) return;
  *params.all_exited = !stays;
  decide(params.condition, stays);
}

}  // namespace eecore::cuda
