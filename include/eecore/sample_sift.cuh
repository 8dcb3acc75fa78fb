// sample_tokens, third, for filters that need the most probable tokens: the first digits of the
// filters' bounds decide which keys are kept and which dropped; the keys in between stay open.
#pragma once

#include "eecore/block_scan.cuh"
#include "eecore/sample_rows.cuh"

namespace eecore::cuda {

// Neighbouring digits of one thread.
constexpr int kDigitsPerThread = kNumDigits / kSampleThreads;

template <typename T>
__device__ __forceinline__ void load_digits(const T* of_row, T (&out)[kDigitsPerThread]) {
  constexpr int kSize = Pack<T>::kSize;
#pragma unroll
  for (int i = 0; i < kDigitsPerThread; i += kSize) {
    const Pack<T> pack = load16(of_row + threadIdx.x * kDigitsPerThread + i);
#pragma unroll
    for (int p = 0; p < kSize; ++p) out[i + p] = pack.values[p];
  }
}

// The digits of a row's bounds; all threads of the block call it. Without a bound, the first and
// the last digit are kNumDigits.
__device__ __forceinline__ Sifted sift(const SampleWorkspace& workspace, int j,
                                       const Filters& filters) {
  EECORE_SHARED(int, digits, 3);  // of top-k, then the first and the last open one
  EECORE_SHARED(uint32_t, count_below, 1);
  EECORE_SHARED(unsigned long long, masses,
                3);  // below the digit of top-k, of that digit, below the first digit
  if (threadIdx.x == 0) {
    digits[0] = -1;
    digits[1] = digits[2] = kNumDigits;
    count_below[0] = 0;
    masses[0] = masses[1] = masses[2] = 0;
  }
  __syncthreads();
  const int mine = static_cast<int>(threadIdx.x) * kDigitsPerThread;
  if (filters.by_count) {
    uint32_t counts[kDigitsPerThread], sum = 0, total;
    load_digits(workspace.counts + int64_t{j} * kNumDigits, counts);
#pragma unroll
    for (int i = 0; i < kDigitsPerThread; ++i) sum += counts[i];
    const uint32_t k = static_cast<uint32_t>(filters.top_k);
    uint32_t before = sum_in_front<kSampleThreads>(sum, total);
#pragma unroll
    for (int i = 0; i < kDigitsPerThread; ++i) {
      if (before < k && k - before <= counts[i]) {
        digits[0] = mine + i;
        count_below[0] = before;
      }
      before += counts[i];
    }
    __syncthreads();
  }
  Sifted sifted;
  sifted.k_digit = digits[0];
  sifted.count_below = count_below[0];
  if (!filters.by_mass) {
    sifted.first_digit = sifted.last_digit = sifted.k_digit < 0 ? kNumDigits : sifted.k_digit;
    sifted.mass_below_k = sifted.mass_below_first = 0;
    return sifted;
  }

  // The mass that top-k keeps is known up to the mass of its digit, and the bound of top-p
  // likewise.
  unsigned long long of_digits[kDigitsPerThread], sum = 0, total;
  load_digits(workspace.masses + int64_t{j} * kNumDigits, of_digits);
#pragma unroll
  for (int i = 0; i < kDigitsPerThread; ++i) sum += of_digits[i];
  const unsigned long long in_front = sum_in_front<kSampleThreads>(sum, total);
  unsigned long long before = in_front;
#pragma unroll
  for (int i = 0; i < kDigitsPerThread; ++i) {
    if (mine + i == sifted.k_digit) {
      masses[0] = before;
      masses[1] = of_digits[i];
    }
    before += of_digits[i];
  }
  __syncthreads();
  const bool is_cut = sifted.k_digit >= 0;
  const unsigned long long least = is_cut ? masses[0] : total;
  const unsigned long long most = is_cut ? least + masses[1] : total;
  const unsigned long long low_target = top_p_target(filters.top_p, least);
  const unsigned long long high_target = top_p_target(filters.top_p, most);
  before = in_front;
#pragma unroll
  for (int i = 0; i < kDigitsPerThread; ++i) {
    if (before < low_target && low_target - before <= of_digits[i]) {
      digits[1] = mine + i;
      masses[2] = before;
    }
    if (before < high_target && high_target - before <= of_digits[i]) digits[2] = mine + i;
    before += of_digits[i];
  }
  __syncthreads();
  sifted.first_digit = digits[1];
  sifted.last_digit = digits[2];
  sifted.mass_below_k = least;
  sifted.mass_below_first = masses[2];
  return sifted;
}

// Grid: num_rows by num_slices. For rows whose filters need the most probable tokens, writes where
// the bounds are, the open keys of each slice in the order of their ids, and the sum of the weights
// that are kept for certain.
__global__ void __launch_bounds__(kSampleThreads)
    sample_sift_kernel(SampleTokensParams params, SampleWorkspace workspace) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const SlicePlace place(params, workspace);
  if (!place.wanted) return;
  const bool draws = workspace.rows[place.j].draws;
  const Filters filters(params, place.request);
  if (!draws || !filters.by_rank()) return;
  EECORE_SHARED(uint32_t, all_of_warp, kSampleWarps);
  EECORE_SHARED(uint32_t, any_of_warp, kSampleWarps);
  const Logits<float> values{workspace.values + place.j * workspace.value_stride, nullptr};
  float scaled[kTokensPerThread];
  const auto load = [&](int begin) {
    values.load(begin + static_cast<int>(threadIdx.x) * kTokensPerThread, place.end, scaled);
  };
  load(place.begin);  // in flight while the digits are found

  const Sifted sifted = sift(workspace, place.j, filters);
  if (place.slice == 0 && threadIdx.x == 0) workspace.rows[place.j].sifted = sifted;
  uint32_t* const open_keys = workspace.open_keys + place.j * workspace.value_stride + place.begin;
  double sum = 0.0;
  int num_open = 0;
  uint32_t all_of = ~0u, any_of = 0;
#pragma unroll 1
  for (int begin = place.begin; begin < place.end; begin += kSampleChunk) {
    if (begin != place.begin) load(begin);
    uint32_t open = 0;
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      const uint32_t key = key_of(scaled[i]);
      const int digit = digit_of(key);
      const float weight = weight_of(scaled[i]);
      if (digit < sifted.first_digit && weight >= filters.least) sum += weight;
      const bool is_open =
          (digit >= sifted.first_digit && digit <= sifted.last_digit) || digit == sifted.k_digit;
      if (!is_open || !(weight > 0.0f)) continue;
      open |= 1u << i;
      all_of &= key;
      any_of |= key;
    }
    int total;
    int at = num_open + sum_in_front<kSampleThreads>(__popc(open), total);
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      if ((open >> i & 1) != 0) open_keys[at++] = key_of(scaled[i]);
    }
    num_open += total;
  }
  sum = sum_of_block<kSampleThreads>(sum);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    all_of &= __shfl_xor_sync(kWholeWarp, all_of, distance);
    any_of |= __shfl_xor_sync(kWholeWarp, any_of, distance);
  }
  if (threadIdx.x % 32 == 0) {
    all_of_warp[threadIdx.x / 32] = all_of;
    any_of_warp[threadIdx.x / 32] = any_of;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int warp = 1; warp < kSampleWarps; ++warp) {
    all_of &= all_of_warp[warp];
    any_of |= any_of_warp[warp];
  }
  workspace.sifted[place.number(workspace)] = {sum, num_open, all_of, any_of};
}

}  // namespace eecore::cuda
