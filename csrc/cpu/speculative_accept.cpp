// speculative_accept on the CPU: greedy matching, and rejection sampling with one thread per
// sequence.
#include "accept_drafts.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

void accept_greedy(const SpeculativeAcceptParams& params, int64_t seq) {
  const int64_t first = params.draft_start_loc[seq];
  const int64_t num_drafts = params.draft_start_loc[seq + 1] - first;
  const int64_t* targets = params.target_tokens + first + seq;
  const int64_t accepted = greedy_prefix(params.draft_tokens + first, targets, num_drafts);
  params.num_accepted[seq] = static_cast<int32_t>(accepted);
  params.next_token[seq] = targets[accepted];
}

void accept_sampled(const SpeculativeAcceptParams& params, int64_t seq) {
  const int64_t vocab_size = params.vocab_size;
  const int64_t first = params.draft_start_loc[seq];
  const int64_t num_drafts = params.draft_start_loc[seq + 1] - first;
  const float* q = params.draft_probs + first * vocab_size;
  const float* p = params.target_probs + (first + seq) * vocab_size;
  const float* uniform = params.uniform + first + seq;
  const int64_t accepted =
      sampled_prefix(params.draft_tokens + first, q, p, uniform, 1, num_drafts, vocab_size);
  const float* row = p + accepted * vocab_size;
  params.num_accepted[seq] = static_cast<int32_t>(accepted);
  params.next_token[seq] =
      accepted < num_drafts
          ? draw_instead(row, q + accepted * vocab_size, vocab_size, uniform[num_drafts])
          : draw_from<false>(row, nullptr, vocab_size, uniform[num_drafts]);
}

}  // namespace

void run_speculative_accept(const SpeculativeAcceptParams& params, const Parallel& parallel) {
  if (params.target_tokens != nullptr) {
    for (int64_t seq = 0; seq < params.num_seqs; ++seq) accept_greedy(params, seq);
    return;
  }
  const int64_t grain = ceil_div(int64_t{1} << 15, max_of(params.vocab_size, 1));
  parallel_for(parallel, params.num_seqs, grain, [&](int64_t begin, int64_t end) {
    for (int64_t seq = begin; seq < end; ++seq) accept_sampled(params, seq);
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
