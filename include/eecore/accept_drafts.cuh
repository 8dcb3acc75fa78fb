// Which drafts stand, and the token after them. speculative_accept and accept_round share it. A
// token is drawn by inverting the cumulative sum of its weights in double: the sums of one span a
// warp, then token by token in the span that is hit.
#pragma once

#include "eecore/element.cuh"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kTokensPerWarp = 32 * Pack<float>::kSize;  // that a warp loads at a time

// The number of drafts before the first of which `accepts(draft)` is false, in every lane.
template <typename Accepts>
__device__ __forceinline__ int64_t accepted_prefix(int64_t num_drafts, int lane, Accepts accepts) {
  for (int64_t first = 0; first < num_drafts; first += 32) {
    const int64_t draft = first + lane;
    const unsigned refused = __ballot_sync(kWholeWarp, draft >= num_drafts || !accepts(draft));
    if (refused != 0) return first + __ffs(static_cast<int>(refused)) - 1;
  }
  return num_drafts;
}

// Whether a draft stands, at u in [0, 1), of distributions q [vocab_size] that it was drawn from
// and p [vocab_size] of the target. An id outside the vocabulary does not.
__device__ __forceinline__ bool stands(int64_t token, const float* q, const float* p,
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
  bool p_aligned, q_aligned;

  static constexpr int kSize = Pack<float>::kSize;

  __device__ __forceinline__ DrawWeights(const float* p, const float* q, int64_t vocab_size)
      : p(p),
        q(q),
        vocab_size(vocab_size),
        p_aligned(reinterpret_cast<uintptr_t>(p) % 16 == 0),
        q_aligned(reinterpret_cast<uintptr_t>(q) % 16 == 0) {}

  // Of the tokens from `token` on; those from `end` on weigh nothing. kWhole: all exist, and p and
  // q are aligned.
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

// Draws a token at u in [0, 1), the same in every thread of the block; -1 when none has a positive
// weight. Never a token of weight 0: the span that is hit has a positive sum, and in it the last
// positive weight stands in where rounding puts the target behind the end.
template <int kThreads>
__device__ int64_t draw(const DrawWeights& weights, float u) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kSize = DrawWeights::kSize;
  EECORE_SHARED(double, sum_of_span, kWarps);
  EECORE_SHARED(double, sum_of_warp, kWarps);
  EECORE_SHARED(int64_t, hit_of_warp, kWarps);
  EECORE_SHARED(int64_t, last_of_warp, kWarps);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // The sum of each warp's span of the vocabulary.
  const int64_t rounds =
      (weights.vocab_size + kWarps * kTokensPerWarp - 1) / (kWarps * kTokensPerWarp);
  const int64_t span = rounds * kTokensPerWarp;
  const int64_t end_of_span = min((warp + 1) * span, weights.vocab_size);
  double sum = 0.0;
  double weight[kSize];
  int64_t token = warp * span + lane * kSize;
  if (weights.p_aligned && (weights.q == nullptr || weights.q_aligned)) {
#pragma unroll 2
    for (; token + kSize <= end_of_span; token += kTokensPerWarp) {
      weights.load<true>(token, end_of_span, weight);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum += weight[i];
    }
  }
  for (; token < end_of_span; token += kTokensPerWarp) {
    weights.load<false>(token, end_of_span, weight);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += weight[i];
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kWholeWarp, sum, distance);
  }
  __syncthreads();  // the sums of an earlier draw have been read
  if (lane == 0) sum_of_span[warp] = sum;
  __syncthreads();

  // The span that is hit. The same additions in the same order end at total > target.
  double total = 0.0;
#pragma unroll 4
  for (int i = 0; i < kWarps; ++i) total += sum_of_span[i];
  if (!(total > 0.0)) return -1;
  const double target = static_cast<double>(u) * total;
  double before = 0.0, running = 0.0;
  int hit_span = 0;
#pragma unroll 1
  for (int i = 0; i < kWarps && !(running > target); ++i) {
    const double of_span = sum_of_span[i];
    if (of_span > 0.0) {
      hit_span = i;
      before = running;
    }
    running += of_span;
  }

  // The token that is hit, by a scan of the span's weights.
  const int64_t end = min((hit_span + 1) * span, weights.vocab_size);
  int64_t last = -1;
  for (int64_t first = hit_span * span; first < end; first += kThreads * kSize) {
    token = first + threadIdx.x * kSize;
    weights.load<false>(token, end, weight);
    double inclusive = weight[0] + weight[1] + weight[2] + weight[3];
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const double earlier = __shfl_up_sync(kWholeWarp, inclusive, distance);
      if (lane >= distance) inclusive += earlier;
    }
    double cumulative = __shfl_up_sync(kWholeWarp, inclusive, 1);
    if (lane == 0) cumulative = 0.0;
    if (lane == 31) sum_of_warp[warp] = inclusive;
    __syncthreads();
    double after = before;
#pragma unroll 4
    for (int i = 0; i < kWarps; ++i) {
      if (i == warp) cumulative += after;
      after += sum_of_warp[i];
    }
    int64_t hit = -1, last_positive = -1;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      cumulative += weight[i];
      if (weight[i] > 0.0) {
        last_positive = token + i;
        if (hit < 0 && cumulative > target) hit = token + i;
      }
    }
    const unsigned hits = __ballot_sync(kWholeWarp, hit >= 0);
    const unsigned positives = __ballot_sync(kWholeWarp, last_positive >= 0);
    hit = __shfl_sync(kWholeWarp, hit, hits == 0 ? 0 : __ffs(static_cast<int>(hits)) - 1);
    last_positive = __shfl_sync(kWholeWarp, last_positive,
                                positives == 0 ? 0 : 31 - __clz(static_cast<int>(positives)));
    if (lane == 0) {
      hit_of_warp[warp] = hit;
      last_of_warp[warp] = last_positive;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < kWarps; ++i) {
      const int64_t of_warp = hit_of_warp[i];
      if (of_warp >= 0) return of_warp;
      last = max(last, int64_t{last_of_warp[i]});
    }
    before = after;
  }
  return last;
}

// Draws the token behind the drafts that stand: from the positive part of p - q where q is there,
// the one that does not, and from p else, or where p and q are equal up to rounding.
template <int kThreads>
__device__ __forceinline__ int64_t draw_next(const float* p, const float* q, int64_t vocab_size,
                                             float u) {
  const int64_t token = draw<kThreads>(DrawWeights(p, q, vocab_size), u);
  if (token >= 0 || q == nullptr) return token;
  return draw<kThreads>(DrawWeights(p, nullptr, vocab_size), u);
}

}  // namespace eecore::cuda
