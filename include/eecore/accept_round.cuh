// accept_round: one block per row; the whole block draws where a sampled draft of the row is
// rejected.
#pragma once

#include "eecore/accept_drafts.cuh"
#include "eecore/params.h"

namespace eecore::cuda {

// Grid: num_rows.
template <int kThreads>
__global__ void __launch_bounds__(kThreads) accept_round_kernel(AcceptRoundParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const int lane = threadIdx.x % 32;
  const int64_t* tokens = params.tokens + row * (params.num_steps + 1);
  // Without a round the row stays where it is.
  int64_t accepted = 0, emitted = 0, token = tokens[0], last = 0;
  if (params.most[row] >= 0) {
    const int64_t* drafts = tokens + 1;
    const int64_t num_drafts = params.num_drafted[row];
    const int64_t first = params.query_start_loc[row];
    const int64_t* targets = params.target + first;
    if (params.sampled == nullptr || params.sampled[row] == 0) {
      accepted = accepted_prefix(num_drafts, lane,
                                 [&](int64_t draft) { return drafts[draft] == targets[draft]; });
      token = targets[accepted];
    } else {
      const int64_t vocab_size = params.vocab_size;
      const float* q = params.draft_probs + row * params.num_steps * vocab_size;
      const float* p = params.target_probs + first * vocab_size;
      const float* uniform = params.uniform + 2 * first;
      accepted = accepted_prefix(num_drafts, lane, [&](int64_t draft) {
        const int64_t at = draft * vocab_size;
        return accepts_draft(drafts[draft], q + at, p + at, vocab_size, uniform[2 * draft]);
      });
      const int64_t at = accepted * vocab_size;
      token = accepted < num_drafts
                  ? draw_next<kThreads>(p + at, q + at, vocab_size, uniform[2 * accepted + 1])
                  : targets[accepted];
    }
    emitted = accepted + 1;
    last = first + accepted;
  }
  if (threadIdx.x != 0) return;
  params.num_accepted[row] = accepted;
  params.next_token[row] = token;
  params.next_position[row] = params.first_position[row] + emitted;
  params.next_left[row] = params.left[row] - emitted;
  if (params.last_row != nullptr) params.last_row[row] = last;
}

}  // namespace eecore::cuda
