// Which drafts are accepted, and the token after them: rejection sampling whose emitted tokens have
// exactly the target's distribution. Sums of probabilities are kept in double. Used by
// speculative_accept and accept_round.
#pragma once

#include "draw.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// The length of the prefix of drafts that equal their targets.
inline int64_t greedy_prefix(const int64_t* drafts, const int64_t* targets, int64_t num_drafts) {
  int64_t accepted = 0;
  while (accepted < num_drafts && drafts[accepted] == targets[accepted]) ++accepted;
  return accepted;
}

// The length of the accepted prefix of drafts, given the distributions q [num_drafts, vocab_size]
// that they were drawn from and the target's p [num_drafts, vocab_size]. An id outside the
// vocabulary is rejected.
inline int64_t sampled_prefix(const int64_t* drafts, const float* q, const float* p,
                              const float* uniform, int64_t uniform_stride, int64_t num_drafts,
                              int64_t vocab_size) {
  // u * q(x) < p(x) is u < p(x) / q(x) without the division; the products are exact in double.
  for (int64_t draft = 0; draft < num_drafts; ++draft) {
    const int64_t token = drafts[draft], at = draft * vocab_size + token;
    if (token < 0 || token >= vocab_size ||
        !(static_cast<double>(uniform[draft * uniform_stride]) * static_cast<double>(q[at]) <
          static_cast<double>(p[at]))) {
      return draft;
    }
  }
  return num_drafts;
}

// The weight of a token in a draw: the positive part of p - q, or p itself. NaN counts as 0.
template <bool kResidual>
inline double weight_of(const float* p, const float* q, int64_t token) {
  const double weight = kResidual ? static_cast<double>(p[token]) - static_cast<double>(q[token])
                                  : static_cast<double>(p[token]);
  return weight > 0.0 ? weight : 0.0;
}

template <bool kResidual>
inline int64_t draw_from(const float* p, const float* q, int64_t vocab_size, float u) {
  return draw([=](int64_t token) { return weight_of<kResidual>(p, q, token); }, vocab_size,
              static_cast<double>(u));
}

// Draws the replacement of a rejected draft: from the positive part of p - q, or from p where p and
// q are equal up to rounding. -1 when no token has a positive probability.
inline int64_t draw_instead(const float* p, const float* q, int64_t vocab_size, float u) {
  const int64_t token = draw_from<true>(p, q, vocab_size, u);
  return token >= 0 ? token : draw_from<false>(p, nullptr, vocab_size, u);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
