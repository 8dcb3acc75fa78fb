// accept_round on the CPU: one thread per row; rows that sample may read a whole vocabulary.
#include "accept_drafts.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

void accept(const AcceptRoundParams& params, int64_t row) {
  const int64_t* tokens = params.tokens + row * (params.num_steps + 1);
  if (params.most[row] < 0) {  // no round: the row stays where it is
    params.num_accepted[row] = 0;
    params.next_token[row] = tokens[0];
    params.next_position[row] = params.first_position[row];
    params.next_left[row] = params.left[row];
    if (params.last_row != nullptr) params.last_row[row] = 0;
    return;
  }
  const int64_t* drafts = tokens + 1;
  const int64_t num_drafts = params.num_drafted[row];
  const int64_t first = params.query_start_loc[row];
  const int64_t* targets = params.target + first;
  int64_t accepted, token;
  if (params.sampled == nullptr || params.sampled[row] == 0) {
    accepted = greedy_prefix(drafts, targets, num_drafts);
    token = targets[accepted];
  } else {
    const int64_t vocab_size = params.vocab_size;
    const float* q = params.draft_probs + row * params.num_steps * vocab_size;
    const float* p = params.target_probs + first * vocab_size;
    const float* uniform = params.uniform + 2 * first;
    accepted = sampled_prefix(drafts, q, p, uniform, 2, num_drafts, vocab_size);
    const int64_t at = accepted * vocab_size;
    token = accepted < num_drafts
                ? draw_instead(p + at, q + at, vocab_size, uniform[2 * accepted + 1])
                : targets[accepted];
  }
  params.num_accepted[row] = accepted;
  params.next_token[row] = token;
  params.next_position[row] = wrapping_add(params.first_position[row], accepted + 1);
  params.next_left[row] = wrapping_add(params.left[row], -accepted - 1);
  if (params.last_row != nullptr) params.last_row[row] = first + accepted;
}

}  // namespace

void run_accept_round(const AcceptRoundParams& params, const Parallel& parallel) {
  const int64_t grain = params.sampled == nullptr
                            ? max_of(params.num_rows, 1)
                            : ceil_div(int64_t{1} << 15, max_of(params.vocab_size, 1));
  parallel_for(parallel, params.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) accept(params, row);
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
