// The peak rates of the machine, measured by the simplest loops: read memory, multiply and add.
// Benchmarks report their share of these, measured in the same run.
#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

void run_read_ceiling(const ReadCeilingParams& params, const Parallel& parallel) {
  // Each thread reads four streams at once, like kernels that walk several rows: one stream alone
  // does not keep the memory busy. Every line of 64 bytes is prefetched.
  constexpr int64_t kBlock = 1024;
  constexpr int kStreams = 4, kStep = 2 * kWidth, kAhead = 128;
  const float* data = params.data;
  parallel_for(parallel, params.num_floats / kBlock, 64, [&](int64_t begin, int64_t end) {
    const int64_t length = (end - begin) / kStreams * kBlock;
    const float* start = data + begin * kBlock;
    Vec sums[2 * kStreams];
    for (Vec& s : sums) s = zero();
    for (int64_t i = 0; i < length; i += kStep) {
#pragma GCC unroll 4
      for (int stream = 0; stream < kStreams; ++stream) {
        const float* p = start + stream * length + i;
        for (int line = 0; line < kStep; line += 16) __builtin_prefetch(p + line + kAhead);
        sums[2 * stream] = sums[2 * stream] + load(p);
        sums[2 * stream + 1] = sums[2 * stream + 1] + load(p + kWidth);
      }
    }
    Vec total = zero();
    for (const Vec& s : sums) total = total + s;
    if (sum(total) == 1.2345e30f) *params.sink = 1.0f;  // keeps the loads alive
  });
}

void run_multiply_ceiling(const MultiplyCeilingParams& params, const Parallel& parallel) {
  // Twelve independent chains cover the latency of two multiply-add ports.
  constexpr int kChains = 12;
  parallel_for(parallel, parallel.num_threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      Vec chains[kChains];
      // Different starts, or the compiler would merge the chains into one.
      for (int j = 0; j < kChains; ++j) chains[j] = broadcast(1.0f + static_cast<float>(j));
#if defined(__AVX512BF16__)
      if (params.dtype == DType::kBFloat16) {
        const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
        const __m512bh b = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x2edc));
        for (int64_t i = 0; i < params.steps; ++i) {
#pragma GCC unroll 12
          for (Vec& c : chains) c.v = _mm512_dpbf16_ps(c.v, a, b);
        }
      } else
#endif
      {
        const Vec a = broadcast(0.999999f), b = broadcast(1e-7f);
        for (int64_t i = 0; i < params.steps; ++i) {
#pragma GCC unroll 12
          for (Vec& c : chains) c = fma(c, a, b);
        }
      }
      Vec total = zero();
      for (const Vec& c : chains) total = total + c;
      if (sum(total) == 1.2345e30f) *params.sink = 1.0f;
    }
  });
#if defined(__AVX512BF16__)
  const int per_lane = params.dtype == DType::kBFloat16 ? 2 : 1;
#else
  const int per_lane = 1;
#endif
  *params.flops =
      2.0 * per_lane * kWidth * kChains * static_cast<double>(params.steps) * parallel.num_threads;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
