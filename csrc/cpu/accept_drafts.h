// Which drafts stand, and the token after them: rejection sampling whose emitted tokens have the
// target's distribution exactly. Sums of probabilities are kept in double. speculative_accept and
// accept_round share it.
#pragma once

#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// The length of the prefix of drafts that are their targets.
inline int64_t greedy_prefix(const int64_t* drafts, const int64_t* targets, int64_t num_drafts) {
  int64_t accepted = 0;
  while (accepted < num_drafts && drafts[accepted] == targets[accepted]) ++accepted;
  return accepted;
}

// The length of the prefix of drafts that stand, of distributions q [num_drafts, vocab_size] they
// were drawn from and p [num_drafts, vocab_size] of the target. An id outside the vocabulary does
// not.
inline int64_t sampled_prefix(const int64_t* drafts, const float* q, const float* p,
                              const float* uniform, int64_t num_drafts, int64_t vocab_size) {
  // u * q(x) < p(x) is u < p(x) / q(x) without the division; the products are exact in double.
  for (int64_t draft = 0; draft < num_drafts; ++draft) {
    const int64_t token = drafts[draft], at = draft * vocab_size + token;
    if (token < 0 || token >= vocab_size ||
        !(static_cast<double>(uniform[draft]) * static_cast<double>(q[at]) <
          static_cast<double>(p[at]))) {
      return draft;
    }
  }
  return num_drafts;
}

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
inline double sum_of_weights(const float* p, const float* q, int64_t begin, int64_t end) {
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
inline int64_t draw(const float* p, const float* q, int64_t vocab_size, float u) {
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

// Draws what stands in for a draft that does not: from the positive part of p - q, or from p where
// p and q are equal up to rounding. -1 when no token has a positive probability.
inline int64_t draw_instead(const float* p, const float* q, int64_t vocab_size, float u) {
  const int64_t token = draw<true>(p, q, vocab_size, u);
  return token >= 0 ? token : draw<false>(p, nullptr, vocab_size, u);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
