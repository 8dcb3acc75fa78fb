// Which drafts are accepted, and the token after them; for speculative_accept and accept_round.
#pragma once

#include "eecore/draw.cuh"
#include "eecore/element.cuh"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

// The number of drafts before the first one that `accepts(draft)` rejects, in every lane.
template <typename Accepts>
__device__ __forceinline__ int64_t accepted_prefix(int64_t num_drafts, int lane, Accepts accepts) {
  for (int64_t first = 0; first < num_drafts; first += 32) {
    const int64_t draft = first + lane;
    const unsigned refused = __ballot_sync(kWholeWarp, draft >= num_drafts || !accepts(draft));
    if (refused != 0) return first + __ffs(static_cast<int>(refused)) - 1;
  }
  return num_drafts;
}

// Whether a draft is accepted, given u in [0, 1), the distribution q [vocab_size] that it was drawn
// from and the target's p [vocab_size]. An id outside the vocabulary is rejected.
__device__ __forceinline__ bool accepts_draft(int64_t token, const float* q, const float* p,
                                              int64_t vocab_size, float u) {
  // u * q(x) < p(x) is u < p(x) / q(x) without the division; the products are exact in double.
  return token >= 0 && token < vocab_size &&
         static_cast<double>(u) * static_cast<double>(q[token]) < static_cast<double>(p[token]);
}

// The weights that tokens are drawn with: the positive part of p - q, or of p where q is null. NaN
// counts as 0.
struct DrawWeights {
  const float* p;  // [vocab_size]
  const float* q;
  int64_t vocab_size;
  bool p_aligned, q_aligned, aligned;

  static constexpr int kSize = Pack<float>::kSize;

  __device__ __forceinline__ DrawWeights(const float* p, const float* q, int64_t vocab_size)
      : p(p),
        q(q),
        vocab_size(vocab_size),
        p_aligned(reinterpret_cast<uintptr_t>(p) % 16 == 0),
        q_aligned(reinterpret_cast<uintptr_t>(q) % 16 == 0),
        aligned(p_aligned && (q == nullptr || q_aligned)) {}

  // Loads the weights of the tokens from `token` on; tokens from `end` on have weight 0. kWhole:
  // all tokens exist, and p and q are aligned.
  template <bool kWhole>
  __device__ __forceinline__ void load(int64_t token, int64_t end, double (&weights)[kSize]) const {
    const auto pack = [&](const float* row, bool aligned) {
      return kWhole ? load16(row + token) : load_pack(row + token, end - token, aligned);
    };
    const Pack<float> from_p = pack(p, p_aligned);
    Pack<float> from_q{};
    if (q != nullptr) from_q = pack(q, q_aligned);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const double weight =
          static_cast<double>(from_p.values[i]) - static_cast<double>(from_q.values[i]);
      weights[i] = weight > 0.0 ? weight : 0.0;
    }
  }
};

// Draws the token after the accepted drafts: from the positive part of p - q where q is given, the
// distribution of the rejected draft; from p otherwise, or where p and q are equal up to rounding.
template <int kThreads>
__device__ __forceinline__ int64_t draw_next(const float* p, const float* q, int64_t vocab_size,
                                             float u) {
  const int64_t token = draw<kThreads>(DrawWeights(p, q, vocab_size), u).token;
  if (token >= 0 || q == nullptr) return token;
  return draw<kThreads>(DrawWeights(p, nullptr, vocab_size), u).token;
}

}  // namespace eecore::cuda
