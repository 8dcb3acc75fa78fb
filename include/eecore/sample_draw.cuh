// sample_tokens, last: one block per row finds the bounds of the row's filters among the open keys,
// digit by digit, and draws from the tokens that the filters keep.
#pragma once

#include "eecore/block_scan.cuh"
#include "eecore/draw.cuh"
#include "eecore/philox.cuh"
#include "eecore/sample_rows.cuh"

namespace eecore::cuda {

constexpr int kDrawThreads = 1024;
constexpr int kDrawWarps = kDrawThreads / 32;
constexpr int kOpenDigitBits = 10;  // of open keys: one digit per thread
static_assert(1 << kOpenDigitBits == kDrawThreads && kMaxSlices <= kDrawThreads);

// The scaled logits that the filters keep.
struct Kept {
  const float* values;  // [vocab_size], aligned
  uint32_t last_key;    // the largest that is kept
  int end_of_last;      // tokens of the last key are kept below this id
  float least;          // weight

  static constexpr int kSize = Pack<float>::kSize;

  __device__ __forceinline__ float weight(int id, float scaled) const {
    const uint32_t key = key_of(scaled);
    if (key > last_key || (key == last_key && id >= end_of_last)) return 0.0f;
    const float weight = weight_of(scaled);
    return weight >= least ? weight : 0.0f;
  }

  // The weights in the form that draw reads.
  template <bool kWhole>
  __device__ __forceinline__ void load(int token, int end, double (&weights)[kSize]) const {
    const Pack<float> pack =
        kWhole ? load16(values + token) : load_pack(values + token, end - token, true);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const bool exists = kWhole || token + i < end;
      weights[i] = exists ? weight(token + i, pack.values[i]) : 0.0f;
    }
  }
};

// The open keys of a row, by slice.
struct OpenKeys {
  const uint32_t* keys;       // [value_stride]
  const SiftedSlice* sifted;  // [num_slices]
  int num_slices, slice_size;

  static constexpr int kSize = Pack<uint32_t>::kSize;

  // Calls visit(keys, count) with a few keys of a slice at a time, of which `count` exist; for one
  // warp.
  template <typename Visit>
  __device__ __forceinline__ void for_packs_of(int slice, Visit visit) const {
    const uint32_t* of_slice = keys + int64_t{slice} * slice_size;
    const int count = sifted[slice].num_open;
#pragma unroll 1
    for (int i = threadIdx.x % 32 * kSize; i < count; i += 32 * kSize) {
      visit(load16(of_slice + i), min(count - i, kSize));
    }
  }
  template <typename Visit>
  __device__ __forceinline__ void for_packs(Visit visit) const {
#pragma unroll 1
    for (int slice = threadIdx.x / 32; slice < num_slices; slice += kDrawWarps) {
      for_packs_of(slice, visit);
    }
  }
};

// Calls visit(key) for a few keys of which `count` exist.
template <typename Visit>
__device__ __forceinline__ void for_each(const Pack<uint32_t>& keys, int count, Visit visit) {
#pragma unroll
  for (int i = 0; i < OpenKeys::kSize; ++i) {
    if (i < count) visit(keys.values[i]);
  }
}

// The bits in which keys may differ: from `low` on, below `high`. `key` has the other bits.
struct OpenBits {
  uint32_t key;
  int high, low;
};

// The bits of all open keys, or with a `digit` above 0 of the keys with that first digit.
__device__ __forceinline__ OpenBits open_bits(uint32_t all_of, uint32_t any_of, int digit) {
  constexpr uint32_t kRest = (1u << kRestBits) - 1;
  uint32_t differ = any_of & ~all_of;
  if (digit > 0) {
    any_of = first_key(digit) | (any_of & kRest);
    differ &= kRest;
  }
  if (differ == 0) return {any_of, 0, 0};
  const int high = 32 - __clz(static_cast<int>(differ));
  const int low = __ffs(static_cast<int>(differ)) - 1;
  return {any_of & ~((1u << high) - (1u << low)), high, low};
}

// A bound among keys, and the sum over the keys below it.
struct KeyBound {
  uint32_t key;
  unsigned long long below;
};

// Sums over open keys, by a digit. Lanes that change the same number wait for each other, so there
// are several copies of each, in different banks.
struct OpenSums {
  static constexpr int kCopies = 4, kStride = kDrawThreads + 32 / kCopies;
  Shared<uint32_t> low, high;              // [kCopies, kStride]
  Shared<uint32_t> found_digit;            // [1]
  Shared<unsigned long long> found_below;  // [1]

  __device__ __forceinline__ void clear() const {
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      low[copy * kStride + threadIdx.x] = 0;
      high[copy * kStride + threadIdx.x] = 0;
    }
  }
  // The sum of the thread's digit.
  __device__ __forceinline__ unsigned long long sum() const {
    unsigned long long sum = 0;
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) {
      const int at = copy * kStride + static_cast<int>(threadIdx.x);
      sum += static_cast<unsigned long long>(uint32_t{high[at]}) << 32 | uint32_t{low[at]};
    }
    return sum;
  }
};

// The smallest open key up to which keys sum to `target` or more: by number, or with kByMass by
// weight. `below`: the sum over the keys before the open ones. Keys below `least` or above `most`
// do not count. All threads of the block call it.
template <bool kByMass>
__device__ __forceinline__ KeyBound find_bound(const OpenKeys& open, OpenBits bits, uint32_t least,
                                               uint32_t most, unsigned long long below,
                                               unsigned long long target, float mass_scale,
                                               const OpenSums& sums) {
  const int my_copy = static_cast<int>(threadIdx.x) % OpenSums::kCopies * OpenSums::kStride;
#pragma unroll 1
  while (bits.high > bits.low) {
    const int shift = max(bits.high - kOpenDigitBits, bits.low);
    const uint32_t mask = (1u << (bits.high - shift)) - 1;
    sums.clear();
    if (threadIdx.x == 0) {
      sums.found_digit[0] = 0;
      sums.found_below[0] = below;
    }
    __syncthreads();
    open.for_packs([&](const Pack<uint32_t>& keys, int count) {
      const auto belongs = [&](uint32_t key) {
        return (key ^ bits.key) >> bits.high == 0 && key >= least && key <= most;
      };
      const auto add = [&](uint32_t key, uint32_t times) {
        const int at = my_copy + static_cast<int>(key >> shift & mask);
        if constexpr (kByMass) {
          const unsigned long long mass = mass_of(weight_of_key(key), mass_scale);
          add_mass(sums.low + at, sums.high + at, times * mass);
        } else {
          atomicAdd(sums.low + at, times);
        }
      };
      const uint32_t first = keys.values[0];
      bool alike = count == OpenKeys::kSize;
#pragma unroll
      for (int i = 1; i < OpenKeys::kSize; ++i) alike = alike && keys.values[i] == first;
      if (alike) {
        if (belongs(first)) add(first, OpenKeys::kSize);
        return;
      }
      for_each(keys, count, [&](uint32_t key) {
        if (belongs(key)) add(key, 1);
      });
    });
    __syncthreads();
    const unsigned long long sum = sums.sum();
    unsigned long long total;
    const unsigned long long before = below + sum_in_front<kDrawThreads>(sum, total);
    if (before < target && target - before <= sum) {
      sums.found_digit[0] = threadIdx.x;
      sums.found_below[0] = before;
    }
    __syncthreads();
    bits.key |= sums.found_digit[0] << shift;
    bits.high = shift;
    below = sums.found_below[0];
    __syncthreads();  // all threads have read both
  }
  return {bits.key, below};
}

// The bits that all of a row's open keys have, and the bits that any has.
struct CommonBits {
  uint32_t all_of, any_of;
};

__device__ __forceinline__ CommonBits common_bits(const OpenKeys& open) {
  CommonBits bits{~0u, 0};
#pragma unroll 1
  for (int slice = threadIdx.x % 32; slice < open.num_slices; slice += 32) {
    bits.all_of &= open.sifted[slice].all_of;
    bits.any_of |= open.sifted[slice].any_of;
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    bits.all_of &= __shfl_xor_sync(kWholeWarp, bits.all_of, distance);
    bits.any_of |= __shfl_xor_sync(kWholeWarp, bits.any_of, distance);
  }
  return bits;
}

// The last key that is kept, and how many tokens with that key are kept, in the order of their ids.
struct LastKey {
  uint32_t key;
  unsigned long long staying;
};

// The last key of a row with filters by rank. All threads of the block call it.
__device__ __forceinline__ LastKey last_key_of(const OpenKeys& open, const Sifted& sifted,
                                               const Filters& filters, float mass_scale) {
  EECORE_SHARED(uint32_t, low_sums, OpenSums::kCopies* OpenSums::kStride);
  EECORE_SHARED(uint32_t, high_sums, OpenSums::kCopies* OpenSums::kStride);
  EECORE_SHARED(uint32_t, found_digit, 1);
  EECORE_SHARED(unsigned long long, found_below, 1);
  const OpenSums sums{low_sums, high_sums, found_digit, found_below};
  constexpr uint32_t kAll = ~0u;
  constexpr unsigned long long kEvery = ~0ull;
  const CommonBits common = common_bits(open);
  LastKey last{kAll, kEvery};
  if (sifted.k_digit >= 0) {
    const OpenBits bits = open_bits(common.all_of, common.any_of, sifted.k_digit);
    last.key = find_bound<false>(open, bits, first_key(sifted.k_digit), end_key(sifted.k_digit) - 1,
                                 sifted.count_below, static_cast<unsigned long long>(filters.top_k),
                                 mass_scale, sums)
                   .key;
  }
  if (!filters.by_mass) return last;

  unsigned long long total = sifted.mass_below_k;
  if (sifted.k_digit >= 0) {
    unsigned long long mass = 0;
    open.for_packs([&](const Pack<uint32_t>& keys, int count) {
      for_each(keys, count, [&](uint32_t key) {
        if (digit_of(key) != sifted.k_digit || key > last.key) return;
        mass += mass_of(weight_of_key(key), mass_scale);
      });
    });
    total += sum_of_block<kDrawThreads>(mass);
  }
  const unsigned long long target = top_p_target(filters.top_p, total);
  const bool one_digit = sifted.first_digit == sifted.last_digit;
  const KeyBound bound = find_bound<true>(
      open, open_bits(common.all_of, common.any_of, one_digit ? sifted.first_digit : 0),
      first_key(sifted.first_digit), min(last.key, end_key(sifted.last_digit) - 1),
      sifted.mass_below_first, target, mass_scale, sums);
  // Rounded up, and at least one.
  const unsigned long long mass = mass_of(weight_of_key(bound.key), mass_scale);
  const unsigned long long left = target - bound.below;
  return {bound.key, mass == 0 ? kEvery : max((left + mass - 1) / mass, 1ull)};
}

// The sum of weights of each slice, held by the thread of the slice's number, and the bounds.
struct KeptSlices {
  double of_slice;
  uint32_t last_key;
  int end_of_last;
};

// The end of the first `rank` tokens of a key in a slice. All threads of the block call it.
__device__ __forceinline__ int end_of_equals(const float* values, int begin, int end, uint32_t key,
                                             int rank) {
  EECORE_SHARED(int, found, 1);
#pragma unroll 1
  for (int first = begin; first < end; first += kDrawThreads) {
    const int id = first + static_cast<int>(threadIdx.x);
    const bool equal = id < end && key_of(values[id]) == key;
    int total;
    const int before = sum_in_front<kDrawThreads>(equal ? 1 : 0, total);
    if (rank > total) {
      rank -= total;
      continue;
    }
    if (equal && before + 1 == rank) found[0] = id + 1;
    __syncthreads();
    return found[0];
  }
  return end;
}

// The slices of a row with filters by rank. All threads of the block call it.
__device__ __forceinline__ KeptSlices filtered_slices(const OpenKeys& open, LastKey last,
                                                      float least, const float* values,
                                                      int vocab_size) {
  EECORE_SHARED(double, sum_of_slice, kMaxSlices);
  EECORE_SHARED(int, equals_of_slice, kMaxSlices);
  EECORE_SHARED(int, edge,
                2);  // the slice of the last tokens that are kept; how many are kept there
#pragma unroll 1
  for (int slice = threadIdx.x / 32; slice < open.num_slices; slice += kDrawWarps) {
    double sum = 0.0;
    int equals = 0;
    open.for_packs_of(slice, [&](const Pack<uint32_t>& keys, int count) {
      for_each(keys, count, [&](uint32_t key) {
        equals += key == last.key ? 1 : 0;
        const float weight = key < last.key ? weight_of_key(key) : 0.0f;
        sum += weight >= least ? weight : 0.0f;
      });
    });
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sum += __shfl_xor_sync(kWholeWarp, sum, distance);
      equals += __shfl_xor_sync(kWholeWarp, equals, distance);
    }
    if (threadIdx.x % 32 != 0) continue;
    sum_of_slice[slice] = open.sifted[slice].sum + sum;
    equals_of_slice[slice] = equals;
  }
  if (threadIdx.x == 0) edge[0] = -1;
  __syncthreads();

  // Tokens of the last key are kept slice by slice.
  const int mine = static_cast<int>(threadIdx.x);
  const bool exists = mine < open.num_slices;
  const long long equals = exists ? int{equals_of_slice[mine]} : 0;
  long long total;
  const long long before = sum_in_front<kDrawThreads>(equals, total);
  const long long staying =
      static_cast<long long>(min(last.staying, static_cast<unsigned long long>(total)));
  const long long here = max(0ll, min(staying - before, equals));
  const float weight = weight_of_key(last.key);
  KeptSlices kept{0.0, last.key, vocab_size};
  if (exists) {
    kept.of_slice = sum_of_slice[mine];
    if (weight >= least) kept.of_slice += static_cast<double>(here) * weight;
  }
  if (staying == total) return kept;
  if (here > 0 && before + here == staying) {
    edge[0] = mine;
    edge[1] = static_cast<int>(here);
  }
  __syncthreads();
  const int begin = edge[0] * open.slice_size;
  kept.end_of_last =
      end_of_equals(values, begin, min(begin + open.slice_size, vocab_size), last.key, edge[1]);
  return kept;
}

struct SliceHit {
  int slice;      // -1: none, all have weight 0
  double before;  // sum of the slices before it
  double target, total;
};

// The slice that u in [0, 1) hits, where each thread holds the sum of the slice of its number. All
// threads of the block call it.
__device__ __forceinline__ SliceHit find_slice(double of_slice, double u) {
  EECORE_SHARED(double, sum_in_front_of, kMaxSlices);
  EECORE_SHARED(int, hits,
                2);  // the first that ends past the target; the last with a positive weight
  if (threadIdx.x == 0) {
    hits[0] = kMaxSlices;
    hits[1] = -1;
  }
  SliceHit hit;
  const double before = sum_in_front<kDrawThreads>(of_slice, hit.total);
  hit.target = u * hit.total;
  const int mine = static_cast<int>(threadIdx.x);
  if (of_slice > 0.0) {
    sum_in_front_of[mine] = before;
    if (before + of_slice > hit.target) atomicMin(hits, mine);
    atomicMax(hits + 1, mine);
  }
  __syncthreads();
  hit.slice = hits[0] < kMaxSlices ? hits[0] : hits[1];
  hit.before = hit.slice >= 0 ? double{sum_in_front_of[hit.slice]} : 0.0;
  return hit;
}

// Grid: num_rows. Draws the tokens of the rows that draw.
__global__ void __launch_bounds__(kDrawThreads)
    sample_draw_kernel(SampleTokensParams params, SampleWorkspace workspace) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const RowPlace place(params, static_cast<int>(blockIdx.x));
  if (!place.wanted) return;
  SampleRow& row = workspace.rows[place.j];
  const bool draws = row.draws;
  const Filters filters(params, place.request);
  const int64_t seed = params.seed[place.request], position = params.positions[place.w] + 1;
  if (!draws) return;
  const int vocab_size = static_cast<int>(params.vocab_size);
  const int64_t first_value = place.j * workspace.value_stride;
  const float* values = workspace.values + first_value;
  const OpenKeys open{workspace.open_keys + first_value,
                      workspace.sifted + int64_t{place.j} * workspace.num_slices,
                      workspace.num_slices, workspace.slice_size};

  const int mine = static_cast<int>(threadIdx.x);
  KeptSlices slices{0.0, ~0u, vocab_size};
  if (filters.by_rank()) {
    const LastKey last = last_key_of(open, row.sifted, filters, workspace.mass_scale);
    slices = filtered_slices(open, last, filters.least, values, vocab_size);
  } else if (mine < workspace.num_slices) {
    slices.of_slice = open.sifted[mine].sum;
  }
  const Kept kept{values, slices.last_key, slices.end_of_last, filters.least};

  const double u = uniform_double(random_words(seed, position, params.purpose));
  const SliceHit hit = find_slice(slices.of_slice, u);
  int token = -1;
  if (hit.slice >= 0) {
    const int begin = hit.slice * workspace.slice_size;
    token = find_in_span<kDrawThreads>(kept, begin, min(begin + workspace.slice_size, vocab_size),
                                       hit.before, hit.target);
  }
  if (threadIdx.x != 0) return;
  row.token = token;
  row.last_key = kept.last_key;
  row.end_of_last = kept.end_of_last;
  row.least = kept.least;
  row.total = hit.total;
  if (token < 0) return;
  const float logprob = logit_of(params, place.j, token) - params.logsumexp[place.w];
  params.token[place.w] = token;
  params.logprob[place.w] = logprob;
  if (params.as_probability) {
    params.confidence[place.w] = static_cast<float>(kept.weight(token, values[token]) / hit.total);
  }
}

// Grid: num_rows by num_slices. Writes the distributions that the tokens were drawn from.
__global__ void __launch_bounds__(kSampleThreads)
    sample_probs_kernel(SampleTokensParams params, SampleWorkspace workspace) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const SlicePlace place(params, workspace);
  if (!place.wanted) return;
  float* const probs = probs_row(params, place.w, place.request);
  if (probs == nullptr) return;
  const SampleRow row = workspace.rows[place.j];
  const float* values = workspace.values + place.j * workspace.value_stride;
  const Kept kept{values, row.last_key, row.end_of_last, row.least};
  const bool drawn = row.draws && row.token >= 0;
#pragma unroll 4
  for (int id = place.begin + static_cast<int>(threadIdx.x); id < place.end; id += kSampleThreads) {
    float prob = id == row.token ? 1.0f : 0.0f;
    if (drawn) prob = static_cast<float>(kept.weight(id, values[id]) / row.total);
    probs[id] = prob;
  }
}

}  // namespace eecore::cuda
