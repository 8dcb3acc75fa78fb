// append_drafts: one block decides for all rows, as somebody has to know whether any goes on; the
// others copy states, of which those of rows that draft no more are not looked at again.
#pragma once

#include "eecore/copy_row.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"
#include "eecore/shared.cuh"

namespace eecore::cuda {

constexpr int kAppendDraftsThreads = 128;

// Takes over a row's draft; returns whether it drafts another.
__device__ __forceinline__ bool append_draft(const AppendDraftsParams& params, int64_t row) {
  if (params.drafting[row] == 0) return false;
  const int64_t step = params.step, width = params.num_steps + 1;
  const int64_t token = params.token[row];
  const float confidence = params.confidence[row];
  const int64_t* stops = params.stop_tokens + row * params.num_stop_tokens;
  bool goes_on = confidence >= params.thresholds[row] && step + 1 < params.max_drafts[row];
  for (int64_t i = 0; i < params.num_stop_tokens; ++i) goes_on = goes_on && stops[i] != token;

  const int64_t position = params.positions[row] + 1;
  params.tokens[row * width + step + 1] = token;
  params.confidences[row * params.num_steps + step] = confidence;
  params.num_drafted[row] = step + 1;
  params.last_token[row] = token;
  params.positions[row] = position;
  params.drafting[row] = goes_on;
  params.slot_mapping[row] = goes_on ? params.round_slots[row * width + step + 1] : -1;
  params.seq_lens[row] = goes_on ? static_cast<int32_t>(position + 1) : 1;
  return goes_on;
}

// Grid: 1 + num_seqs.
__global__ void __launch_bounds__(kAppendDraftsThreads)
    append_drafts_kernel(AppendDraftsParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (blockIdx.x != 0) {
    const int64_t row = int64_t{blockIdx.x} - 1;
    copy_row(static_cast<const char*>(params.hidden) + row * params.hidden_stride,
             static_cast<char*>(params.states) + row * params.states_seq_stride +
                 params.step * params.states_step_stride,
             params.row_bytes, threadIdx.x, kAppendDraftsThreads);
    return;
  }
  constexpr int kWarps = kAppendDraftsThreads / 32;
  EECORE_SHARED(int, goes_on_in_warp, kWarps);
  bool goes_on = false;
  for (int64_t row = threadIdx.x; row < params.num_seqs; row += kAppendDraftsThreads) {
    goes_on = append_draft(params, row) || goes_on;
  }
  goes_on = __any_sync(kWholeWarp, goes_on) != 0;
  if (threadIdx.x % 32 == 0) goes_on_in_warp[threadIdx.x / 32] = goes_on;
  __syncthreads();
  if (threadIdx.x != 0) return;
  int any = 0;
  for (int warp = 0; warp < kWarps; ++warp) any |= goes_on_in_warp[warp];
  *params.all_done = any == 0;
}

}  // namespace eecore::cuda
