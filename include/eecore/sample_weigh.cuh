// sample_tokens, second: merges the statistics of the slices, scales the rows that draw, and counts
// their keys by the first digit.
#pragma once

#include "eecore/block_scan.cuh"
#include "eecore/sample_measure.cuh"

namespace eecore::cuda {

// The numbers of a row that every block needs; cheaper than all of the row's numbers.
struct RowLargest {
  float raw, changed;
  bool known;  // the softmax is defined

  __device__ __forceinline__ RowLargest(const SampleWorkspace& workspace, int j) {
    const SliceNumbers* of_row = workspace.numbers + int64_t{j} * workspace.num_slices;
    float sum = 0.0f;  // NaN where a logit is NaN
    raw = changed = -INFINITY;
#pragma unroll 1
    for (int slice = threadIdx.x % 32; slice < workspace.num_slices; slice += 32) {
      const SliceNumbers numbers = of_row[slice];
      raw = fmaxf(raw, numbers.largest);
      changed = fmaxf(changed, numbers.changed_largest);
      sum += numbers.sum;
    }
    raw = reduce_lanes(raw, Max{});
    changed = reduce_lanes(changed, Max{});
    sum = reduce_lanes(sum);
    known = is_finite(raw) && sum == sum;
  }
  __device__ __forceinline__ bool chooses() const { return known && is_finite(changed); }
};

// Writes the numbers of the raw distribution over allowed tokens, and the token of a row that does
// not draw. A warp calls it.
__device__ __forceinline__ void write_numbers(const SampleTokensParams& params,
                                              const SampleWorkspace& workspace,
                                              const RowPlace& place) {
  const RowLargest largest(workspace, place.j);
  const bool samples = params.temperature[place.request] > 0.0f;
  const SliceNumbers* of_row = workspace.numbers + int64_t{place.j} * workspace.num_slices;
  SliceNumbers numbers = no_numbers();
#pragma unroll 1
  for (int slice = threadIdx.x % 32; slice < workspace.num_slices; slice += 32) {
    numbers = merged(numbers, of_row[slice]);
  }
  numbers = merge_lanes(numbers);
  if (threadIdx.x % 32 != 0) return;
  const int w = place.w;
  const bool known = largest.known;
  const float logsumexp = known ? numbers.largest + logf(numbers.sum) : NAN;
  const int token = largest.chooses() && !samples ? numbers.changed_id : -1;
  const float logprob = token >= 0 ? logit_of(params, place.j, token) - logsumexp : NAN;
  const float gap = (0.0f - expm1f(numbers.second - numbers.largest)) / numbers.sum;
  params.token[w] = token;
  params.logprob[w] = logprob;
  params.logsumexp[w] = logsumexp;
  params.confidence[w] = params.as_probability ? expf(logprob) : (known ? gap : NAN);
  workspace.rows[place.j].draws = largest.chooses() && samples;
  workspace.rows[place.j].token = token;
}

// The number of keys and the sum of their weights, by the first digit of the key.
struct DigitSums {
  Shared<uint32_t> counts, low, high;  // [kNumDigits]

  __device__ __forceinline__ void clear() const {
    for (int i = threadIdx.x; i < kNumDigits; i += kSampleThreads) {
      counts[i] = 0;
      low[i] = 0;
      high[i] = 0;
    }
  }
  __device__ __forceinline__ void add(int digit, uint32_t count, unsigned long long mass,
                                      const Filters& filters) const {
    if (filters.by_count) atomicAdd(counts + digit, count);
    if (filters.by_mass) add_mass(low + digit, high + digit, mass);
  }
};

// Adds a thread's tokens. If they are all alike, as in flat distributions, one addition does for
// all of them: lanes that change the same number wait for each other.
__device__ __forceinline__ void add_tokens(const float (&scaled)[kTokensPerThread],
                                           const float (&weights)[kTokensPerThread],
                                           const Filters& filters, float mass_scale,
                                           const DigitSums& sums) {
  const int first = digit_of(key_of(scaled[0]));
  bool alike = true;
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    const int digit = digit_of(key_of(scaled[i]));
    alike = alike && digit == first && weights[i] > 0.0f;
  }
  if (alike) {
    unsigned long long mass = 0;
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) mass += mass_of(weights[i], mass_scale);
    sums.add(first, kTokensPerThread, mass, filters);
    return;
  }
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    if (!(weights[i] > 0.0f)) continue;
    const int digit = digit_of(key_of(scaled[i]));
    sums.add(digit, 1, mass_of(weights[i], mass_scale), filters);
  }
}

// Blocks per multiprocessor. Without it ptxas chooses more blocks and spills registers.
constexpr int kWeighBlocks = 4;

// Grid: num_rows by num_slices + 1; the last block of a row writes its numbers. Writes the scaled
// values of rows that draw, and the sums of their slices' weights or, where filters need the most
// probable tokens, counts and masses of digits. Tokens of weight 0 do not count: they come after
// all other tokens.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads, kWeighBlocks)
    sample_weigh_kernel(SampleTokensParams params, SampleWorkspace workspace) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const SlicePlace place(params, workspace, 1);
  if (!place.wanted) return;
  if (place.slice == workspace.num_slices) {
    if (threadIdx.x < 32) write_numbers(params, workspace, place);
    return;
  }
  EECORE_SHARED(uint32_t, counts, kNumDigits);
  EECORE_SHARED(uint32_t, low, kNumDigits);
  EECORE_SHARED(uint32_t, high, kNumDigits);
  float* const values = workspace.values + place.j * workspace.value_stride;
  const bool changes = changes_logits(params, place.request);
  const Logits<T> logits = place.logits<T>(params);
  float scaled[kTokensPerThread];
  const auto load = [&](int begin) {
    const int token = begin + static_cast<int>(threadIdx.x) * kTokensPerThread;
    if (changes) {
      Logits<float>{values, nullptr}.load(token, place.end, scaled);
    } else {
      logits.load(token, place.end, scaled);
    }
  };
  load(place.begin);  // in flight while slices are merged

  const RowLargest largest(workspace, place.j);
  const float temperature = params.temperature[place.request];
  const bool samples = temperature > 0.0f;
  if (!samples || !largest.chooses()) return;

  const Filters filters(params, place.request);
  const DigitSums sums{counts, low, high};
  const bool by_rank = filters.by_rank();
  if (by_rank) {
    sums.clear();
    __syncthreads();
  }
  const float divisor = fmaxf(temperature, kMinTemperature);
  double sum = 0.0;
#pragma unroll 1
  for (int begin = place.begin; begin < place.end; begin += kSampleChunk) {
    const int token = begin + static_cast<int>(threadIdx.x) * kTokensPerThread;
    if (token >= place.end) break;
    if (begin != place.begin) load(begin);
    float weights[kTokensPerThread];
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      scaled[i] = (scaled[i] - largest.changed) / divisor;
      weights[i] = weight_of(scaled[i]);
    }
#pragma unroll
    for (int i = 0; i < kTokensPerThread; i += Pack<float>::kSize) {
      Pack<float> pack;
#pragma unroll
      for (int p = 0; p < Pack<float>::kSize; ++p) pack.values[p] = scaled[i + p];
      store16(values + token + i, pack);  // the end of a row is padded
    }
    if (by_rank) {
      add_tokens(scaled, weights, filters, workspace.mass_scale, sums);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      sum += weights[i] >= filters.least ? weights[i] : 0.0f;
    }
  }
  if (!by_rank) {
    sum = sum_of_block<kSampleThreads>(sum);
    if (threadIdx.x == 0) workspace.sifted[place.number(workspace)].sum = sum;
    return;
  }
  __syncthreads();
  uint32_t* const all_counts = workspace.counts + int64_t{place.j} * kNumDigits;
  unsigned long long* const all_masses = workspace.masses + int64_t{place.j} * kNumDigits;
  for (int i = threadIdx.x; i < kNumDigits; i += kSampleThreads) {
    const uint32_t count = counts[i];
    const unsigned long long mass =
        static_cast<unsigned long long>(uint32_t{high[i]}) << 32 | uint32_t{low[i]};
    if (count != 0) atomicAdd(all_counts + i, count);
    if (mass != 0) atomicAdd(all_masses + i, mass);
  }
}

}  // namespace eecore::cuda
