// A block draws one of many tokens by the inverse of their cumulative weight, in double: it sums
// one span per warp first, then goes token by token through the span that is hit.
#pragma once

#include <cstdint>

#include "eecore/reduce.cuh"

namespace eecore::cuda {

// Weights: `vocab_size`, at most 2^30, `aligned`, and load<kWhole>(token, end, weights), which
// loads the weights of the kSize tokens from `token` on; tokens from `end` on have weight 0.
// kWhole: all tokens exist, and `aligned`.

// The token of a span of `weights`, from `begin` on and before `end`, at which the cumulative
// weight, starting from `before`, exceeds `target`. Where rounding puts the target past the end,
// the last token with a positive weight; -1 where none has one. The same in every thread of the
// block.
template <int kThreads, typename Weights>
__device__ __forceinline__ int find_in_span(const Weights& weights, int begin, int end,
                                            double before, double target) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kSize = Weights::kSize;
  static_assert(kSize == 4);
  EECORE_SHARED(double, sum_of_warp, kWarps);
  EECORE_SHARED(int, hit_of_warp, kWarps);
  EECORE_SHARED(int, last_of_warp, kWarps);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  double weight[kSize];
  int last = -1;
  for (int first = begin; first < end; first += kThreads * kSize) {
    const int token = first + threadIdx.x * kSize;
    weights.template load<false>(token, end, weight);
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
    int hit = -1, last_positive = -1;
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
      const int of_warp = hit_of_warp[i];
      if (of_warp >= 0) return of_warp;
      last = max(last, int{last_of_warp[i]});
    }
    before = after;
  }
  return last;
}

struct Drawn {
  int token;
  double total;  // sum of all weights
};

// The token that u in [0, 1) hits, the same in every thread of the block; -1 when none has a
// positive weight. Never a token of weight 0: the span that is hit has a positive sum, and where
// rounding puts the target past its end, the last token with a positive weight is taken.
template <int kThreads, typename Weights>
__device__ __forceinline__ Drawn draw(const Weights& weights, double u) {
  constexpr int kWarps = kThreads / 32;
  constexpr int kSize = Weights::kSize;
  static_assert(kSize == 4);
  constexpr int kPerWarp = 32 * kSize;  // tokens that a warp loads at a time
  EECORE_SHARED(double, sum_of_span, kWarps);
  const int vocab_size = static_cast<int>(weights.vocab_size);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;

  // The sum of each warp's span of the vocabulary.
  const int rounds = (vocab_size + kWarps * kPerWarp - 1) / (kWarps * kPerWarp);
  const int span = rounds * kPerWarp;
  const int end_of_span = min((warp + 1) * span, vocab_size);
  double sum = 0.0;
  double weight[kSize];
  int token = warp * span + lane * kSize;
  if (weights.aligned) {
#pragma unroll 2
    for (; token + kSize <= end_of_span; token += kPerWarp) {
      weights.template load<true>(token, end_of_span, weight);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum += weight[i];
    }
  }
  for (; token < end_of_span; token += kPerWarp) {
    weights.template load<false>(token, end_of_span, weight);
#pragma unroll
    for (int i = 0; i < kSize; ++i) sum += weight[i];
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(kWholeWarp, sum, distance);
  }
  __syncthreads();  // all threads have read the sums of an earlier draw
  if (lane == 0) sum_of_span[warp] = sum;
  __syncthreads();

  // Finds the span that is hit. The same additions in the same order end at total > target.
  double total = 0.0;
#pragma unroll 4
  for (int i = 0; i < kWarps; ++i) total += sum_of_span[i];
  if (!(total > 0.0)) return {-1, total};
  const double target = u * total;
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

  return {find_in_span<kThreads>(weights, hit_span * span, min((hit_span + 1) * span, vocab_size),
                                 before, target),
          total};
}

}  // namespace eecore::cuda
