// speculative_accept: one warp compares a sequence's greedy drafts with their targets; one block
// samples for a sequence.
#pragma once

#include "eecore/accept_drafts.cuh"
#include "eecore/params.h"

namespace eecore::cuda {

constexpr int kGreedyThreads = 128;

// Grid: num_seqs by the block's warps.
__global__ void __launch_bounds__(kGreedyThreads)
    speculative_accept_greedy_kernel(SpeculativeAcceptParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int lane = threadIdx.x % 32;
  const int64_t seq = static_cast<int64_t>(blockIdx.x) * (kGreedyThreads / 32) + threadIdx.x / 32;
  if (seq >= params.num_seqs) return;
  const int64_t first = params.draft_start_loc[seq];
  const int64_t* drafts = params.draft_tokens + first;
  const int64_t* targets = params.target_tokens + first + seq;
  const int64_t accepted =
      accepted_prefix(params.draft_start_loc[seq + 1] - first, lane,
                      [&](int64_t draft) { return drafts[draft] == targets[draft]; });
  if (lane != 0) return;
  params.num_accepted[seq] = static_cast<int32_t>(accepted);
  params.next_token[seq] = targets[accepted];
}

// Grid: num_seqs.
template <int kThreads>
__global__ void __launch_bounds__(kThreads)
    speculative_accept_sampling_kernel(SpeculativeAcceptParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t vocab_size = params.vocab_size;
  const int64_t seq = blockIdx.x;
  const int64_t first = params.draft_start_loc[seq];
  const int64_t num_drafts = params.draft_start_loc[seq + 1] - first;
  const int64_t* drafts = params.draft_tokens + first;
  const float* q = params.draft_probs + first * vocab_size;
  const float* p = params.target_probs + (first + seq) * vocab_size;
  const float* uniform = params.uniform + first + seq;

  const int64_t accepted = accepted_prefix(num_drafts, threadIdx.x % 32, [&](int64_t draft) {
    const int64_t at = draft * vocab_size;
    return accepts_draft(drafts[draft], q + at, p + at, vocab_size, uniform[draft]);
  });
  const int64_t at = accepted * vocab_size;
  const int64_t token = draw_next<kThreads>(p + at, accepted < num_drafts ? q + at : nullptr,
                                            vocab_size, uniform[num_drafts]);
  if (threadIdx.x == 0) {
    params.num_accepted[seq] = static_cast<int32_t>(accepted);
    params.next_token[seq] = token;
  }
}

}  // namespace eecore::cuda
