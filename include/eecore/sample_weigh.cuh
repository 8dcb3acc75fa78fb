// sample_tokens, second: what slices know is merged, rows that draw are scaled, and their keys
// counted by the first digit.
#pragma once

#include "eecore/block_scan.cuh"
#include "eecore/sample_measure.cuh"

namespace eecore::cuda {

// Of a row, by each warp on its own.
__device__ __forceinline__ SliceNumbers merge_slices(const SampleWorkspace& workspace, int j) {
  const SliceNumbers* of_row = workspace.numbers + int64_t{j} * workspace.num_slices;
  SliceNumbers numbers = no_numbers();
  for (int slice = threadIdx.x % 32; slice < workspace.num_slices; slice += 32) {
    numbers = merged(numbers, of_row[slice]);
  }
  return merge_lanes(numbers);
}

// Writes the numbers of the raw distribution over allowed tokens, and the token of a row that draws
// none.
__device__ __forceinline__ void write_numbers(const SampleTokensParams& params,
                                              const RowPlace& place, const SliceNumbers& numbers,
                                              bool known, bool samples, SampleRow& row) {
  const int w = place.w;
  const bool chooses = known && is_finite(numbers.changed_largest);
  const float logsumexp = known ? numbers.largest + logf(numbers.sum) : NAN;
  const int token = chooses && !samples ? numbers.changed_id : -1;
  const float logprob = token >= 0 ? logit_of(params, place.j, token) - logsumexp : NAN;
  const float gap = (0.0f - expm1f(numbers.second - numbers.largest)) / numbers.sum;
  params.token[w] = token;
  params.logprob[w] = logprob;
  params.logsumexp[w] = logsumexp;
  params.confidence[w] = params.as_probability ? expf(logprob) : (known ? gap : NAN);
  row.largest = numbers.changed_largest;
  row.draws = chooses && samples;
  row.token = token;
}

// How many of the keys, and what their weights come to, by the first digit of the key.
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

// Adds a thread's tokens. Where they are all alike, as in flat distributions, it is done once for
// all of them: lanes that change the same number wait for each other.
__device__ __forceinline__ void add_tokens(const float (&scaled)[kTokensPerThread],
                                           const float (&weights)[kTokensPerThread],
                                           const Filters& filters, float mass_scale,
                                           const DigitSums& sums) {
  const int first = static_cast<int>(key_of(scaled[0]) >> kRestBits);
  bool alike = true;
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    const int digit = static_cast<int>(key_of(scaled[i]) >> kRestBits);
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
    const int digit = static_cast<int>(key_of(scaled[i]) >> kRestBits);
    sums.add(digit, 1, mass_of(weights[i], mass_scale), filters);
  }
}

// Grid: num_rows by num_slices. Writes the scaled values of rows that draw; the sums of their
// slices' weights, or where filters ask for the most probable tokens, counts and masses of digits.
// Tokens of no weight count for nothing: they are behind all others.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads)
    sample_weigh_kernel(SampleTokensParams params, SampleWorkspace workspace) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const SlicePlace place(params, workspace);
  if (!place.wanted) return;
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
  load(place.begin);  // under way while slices are merged

  const SliceNumbers numbers = merge_slices(workspace, place.j);
  // NaN is the largest of all.
  const bool known = is_finite(numbers.largest) && numbers.sum == numbers.sum;
  const float temperature = params.temperature[place.request];
  const bool samples = temperature > 0.0f;
  if (place.slice == 0 && threadIdx.x == 0) {
    write_numbers(params, place, numbers, known, samples, workspace.rows[place.j]);
  }
  const float largest = numbers.changed_largest;
  if (!samples || !known || !is_finite(largest)) return;

  const Filters filters(params, place.request);
  const DigitSums sums{counts, low, high};
  const bool by_rank = filters.by_rank();
  if (by_rank) {
    sums.clear();
    __syncthreads();
  }
  const float divisor = fmaxf(temperature, kMinTemperature);
  double sum = 0.0;
  for (int begin = place.begin; begin < place.end; begin += kSampleChunk) {
    const int token = begin + static_cast<int>(threadIdx.x) * kTokensPerThread;
    if (token >= place.end) break;
    if (begin != place.begin) load(begin);
    float weights[kTokensPerThread];
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      scaled[i] = (scaled[i] - largest) / divisor;
      weights[i] = weight_of(scaled[i]);
    }
#pragma unroll
    for (int i = 0; i < kTokensPerThread; i += Pack<float>::kSize) {
      Pack<float> pack;
#pragma unroll
      for (int p = 0; p < Pack<float>::kSize; ++p) pack.values[p] = scaled[i + p];
      store16(values + token + i, pack);  // a row's end is padded
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
