// speculative_accept on the CPU: greedy matching, and rejection sampling whose emitted tokens have
// the target's distribution exactly. Sums of probabilities are kept in double; one thread per
// sequence.
#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int64_t kMaxBlocks = 512;
constexpr int kLanes = 8;

// The weight that a token is drawn with: the positive part of p - q, or p itself. NaN counts as 0.
template <bool kResidual>
inline double weight_of(const float* p, const float* q, int64_t token) {
  const double weight = kResidual ? static_cast<double>(p[token]) - static_cast<double>(q[token])
                                  : static_cast<double>(p[token]);
  return weight > 0.0 ? weight : 0.0;
}

template <bool kResidual>
double sum_of_weights(const float* p, const float* q, int64_t begin, int64_t end) {
  double lanes[kLanes] = {};
  int64_t token = begin;
  for (; token + kLanes <= end; token += kLanes) {
    for (int i = 0; i < kLanes; ++i) lanes[i] += weight_of<kResidual>(p, q, token + i);
  }
  double total = 0.0;
  for (int i = 0; i < kLanes; ++i) total += lanes[i];
  for (; token < end; ++token) total += weight_of<kResidual>(p, q, token);
  return total;
}

// Draws a token by inverting the cumulative sum of weights at u in [0, 1); -1 when none is
// positive. Never a token of weight 0: the block has a positive sum, and in it the last positive
// weight stands in where rounding puts the target behind the end.
template <bool kResidual>
int64_t draw(const float* p, const float* q, int64_t vocab_size, float u) {
  const int64_t block_size = max_of(256, ceil_div(vocab_size, kMaxBlocks));
  const int64_t num_blocks = ceil_div(vocab_size, block_size);
  double block_sums[kMaxBlocks];
  double total = 0.0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t begin = block * block_size;
    block_sums[block] =
        sum_of_weights<kResidual>(p, q, begin, min_of(begin + block_size, vocab_size));
    total += block_sums[block];
  }
  if (!(total > 0.0)) return -1;

  // The same additions in the same order end at total > target, so a block is always found.
  const double target = static_cast<double>(u) * total;
  double before = 0.0;
  int64_t block = 0;
  while (block + 1 < num_blocks && !(before + block_sums[block] > target)) {
    before += block_sums[block++];
  }
  int64_t last_positive = -1;
  const int64_t end = min_of((block + 1) * block_size, vocab_size);
  for (int64_t token = block * block_size; token < end; ++token) {
    const double weight = weight_of<kResidual>(p, q, token);
    if (weight == 0.0) continue;
    last_positive = token;
    before += weight;
    if (before > target) break;
  }
  return last_positive;
}

void accept_greedy(const SpeculativeAcceptParams& params, int64_t seq) {
  const int64_t first = params.draft_start_loc[seq];
  const int64_t num_drafts = params.draft_start_loc[seq + 1] - first;
  const int64_t* drafts = params.draft_tokens + first;
  const int64_t* targets = params.target_tokens + first + seq;
  int64_t accepted = 0;
  while (accepted < num_drafts && drafts[accepted] == targets[accepted]) ++accepted;
  params.num_accepted[seq] = static_cast<int32_t>(accepted);
  params.next_token[seq] = targets[accepted];
}

void accept_sampled(const SpeculativeAcceptParams& params, int64_t seq) {
  const int64_t vocab_size = params.vocab_size;
  const int64_t first = params.draft_start_loc[seq];
  const int64_t num_drafts = params.draft_start_loc[seq + 1] - first;
  const int64_t* drafts = params.draft_tokens + first;
  const float* q = params.draft_probs + first * vocab_size;
  const float* p = params.target_probs + (first + seq) * vocab_size;
  const float* uniform = params.uniform + first + seq;

  // u * q(x) < p(x) is u < p(x) / q(x) without the division; the products are exact in double.
  int64_t accepted = 0;
  for (; accepted < num_drafts; ++accepted) {
    const int64_t at = accepted * vocab_size + drafts[accepted];
    if (!(static_cast<double>(uniform[accepted]) * static_cast<double>(q[at]) <
          static_cast<double>(p[at]))) {
      break;
    }
  }
  params.num_accepted[seq] = static_cast<int32_t>(accepted);

  const float u = uniform[num_drafts];
  const float* row = p + accepted * vocab_size;
  int64_t token = -1;
  if (accepted < num_drafts) token = draw<true>(row, q + accepted * vocab_size, vocab_size, u);
  // After the last acceptance, and where p and q are equal up to rounding.
  if (token < 0) token = draw<false>(row, nullptr, vocab_size, u);
  params.next_token[seq] = token;
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
