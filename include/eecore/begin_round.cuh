// begin_round: one block, because it finds out whether any row drafts; one thread per row.
#pragma once

#include "eecore/graph_condition.cuh"
#include "eecore/params.h"
#include "eecore/ptx.cuh"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kBeginRoundThreads = 128;

// How many of the drafts after the token that a row continues from are likely enough.
__device__ __forceinline__ int64_t sure_drafts(const BeginRoundParams& params, int64_t row,
                                               int64_t source) {
  const int64_t drafted = min(params.num_ahead[source], params.ahead_steps);
  const float* probabilities = params.ahead_probabilities + source * params.ahead_steps;
  const float threshold = params.thresholds[row];
  int64_t sure = 0;
#pragma unroll 1
  while (sure < drafted && probabilities[sure] >= threshold) ++sure;
  return sure;
}

// Sets up the start of a row; returns whether the row drafts.
__device__ __forceinline__ bool begin_row(const BeginRoundParams& params, int64_t row) {
  const int64_t width = params.num_steps + 1;
  const int64_t source = params.sources == nullptr ? -1 : params.sources[row];
  const bool follows = source >= 0;
  const int64_t token = follows ? params.next_token[source] : params.token_ids[row];
  const int64_t position = follows ? params.next_position[source] : params.start[row];
  const int64_t left = follows ? params.next_left[source] : params.tokens_left[row];
  const int64_t most =
      max(min(min(params.max_drafts[row], left - 1), params.num_steps), int64_t{-1});
  int64_t given = params.drafts == nullptr ? -1 : params.num_given[row];
  const int64_t* its_drafts = params.drafts + row * params.num_steps;
  if (follows && given < 0 && params.ahead_tokens != nullptr) {
    its_drafts = params.ahead_tokens + source * (params.ahead_steps + 1) + 1;
    given = sure_drafts(params, row, source);
  }
  const bool drafts = most > 0 && given < 0;
  params.first_position[row] = position;
  params.left[row] = left;
  params.most[row] = most;
  params.tokens[row * width] = token;
  const int64_t num_drafted = max(min(given, most), int64_t{0});
  params.num_drafted[row] = num_drafted;
#pragma unroll 1
  for (int64_t k = 0; k < num_drafted; ++k) {
    params.tokens[row * width + 1 + k] = its_drafts[k];
  }
  params.done[row] = !drafts;

  // The slots of the tokens that the row may have.
  const int32_t* pages = params.page_table + row * params.page_table_stride;
  int64_t first_slot = -1;
#pragma unroll 1
  for (int64_t k = 0; k < width; ++k) {
    const int64_t at = position + k;
    const int64_t page = max(min(at / params.page_size, params.max_pages - 1), int64_t{0});
    const int64_t slot = k <= most ? pages[page] * params.page_size + at % params.page_size : -1;
    params.round_slots[row * width + k] = slot;
    if (k == 0) first_slot = slot;
  }

  params.row[row] = static_cast<int32_t>(row);
  params.active_token_ids[row] = max(token, int64_t{0});  // -1, no token, is not embedded
  params.positions[row] = position;
  params.slot_mapping[row] = drafts ? first_slot : -1;
  params.seq_lens[row] =
      drafts ? static_cast<int32_t>(max(position + params.own_key, int64_t{1})) : 1;
  return drafts;
}

// Grid: one block.
__global__ void __launch_bounds__(kBeginRoundThreads) begin_round_kernel(BeginRoundParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  bool drafts = false;
  for (int64_t row = threadIdx.x; row < params.num_rows; row += kBeginRoundThreads) {
    drafts = begin_row(params, row) || drafts;
  }
  drafts = any_in_block<kBeginRoundThreads>(drafts);
  if (threadIdx.x != 0) return;
  *params.all_done = !drafts;
  decide(params.condition, drafts);
}

}  // namespace eecore::cuda
