// append_drafts: one block decides for all rows, because it also finds out whether any row drafts
// on; the other blocks copy states. States copied for rows that draft no more are never read.
#pragma once

#include "eecore/copy_row.cuh"
#include "eecore/graph_condition.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kAppendDraftsThreads = 128;

// Appends the draft of an active row; returns whether the row drafts another.
__device__ __forceinline__ bool append_draft(const AppendDraftsParams& params, int64_t i) {
  const int64_t row = params.row[i];
  if (params.done[row] != 0) return false;
  const int64_t step = params.step, width = params.num_steps + 1;
  const int64_t token = params.token[i];
  const float confidence = params.confidence[i];
  const int64_t* stops = params.stop_tokens + row * params.num_stop_tokens;
  bool goes_on = confidence >= params.thresholds[row] && step + 1 < params.most[row];
#pragma unroll 1
  for (int64_t k = 0; k < params.num_stop_tokens && goes_on; ++k) goes_on = stops[k] != token;

  const int64_t position = params.positions[i] + 1;
  params.tokens[row * width + step + 1] = token;
  params.confidences[row * params.num_steps + step] = confidence;
  params.num_drafted[row] = step + 1;
  params.done[row] = !goes_on;
  params.active_token_ids[i] = max(token, int64_t{0});  // -1, no token, is not embedded
  params.positions[i] = position;
  params.slot_mapping[i] = goes_on ? params.round_slots[row * width + step + 1] : -1;
  if (!goes_on) {
    params.seq_lens[i] = 1;
  } else if (params.own_key != 0) {
    params.seq_lens[i] = static_cast<int32_t>(position + 1);
  }
  return goes_on;
}

// Grid: 1 + num_active; one block where there are no states.
__global__ void __launch_bounds__(kAppendDraftsThreads)
    append_drafts_kernel(AppendDraftsParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (blockIdx.x != 0) {
    const int64_t i = int64_t{blockIdx.x} - 1;
    copy_row(static_cast<const char*>(params.hidden) + i * params.hidden_stride,
             static_cast<char*>(params.states) + params.row[i] * params.states_row_stride +
                 params.step * params.states_step_stride,
             params.row_bytes, threadIdx.x, kAppendDraftsThreads);
    return;
  }
  bool goes_on = false;
  for (int64_t i = threadIdx.x; i < params.num_active; i += kAppendDraftsThreads) {
    goes_on = append_draft(params, i) || goes_on;
  }
  goes_on = any_in_block<kAppendDraftsThreads>(goes_on);
  if (threadIdx.x != 0) return;
  *params.all_done = !goes_on;
  decide(params.condition, goes_on);
}

}  // namespace eecore::cuda
