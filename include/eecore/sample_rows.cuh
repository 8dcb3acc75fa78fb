// What the kernels of sample_tokens share: rows of logits, the slices of the vocabulary that blocks
// have of them, filters, and the workspace.
#pragma once

#include "eecore/element.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr float kMinTemperature = 1e-30f;  // with the largest logit at 0 no other infinity arises

constexpr int kSampleThreads = 256;
constexpr int kSampleWarps = kSampleThreads / 32;
constexpr int kTokensPerThread = 8;  // neighbours; the mask of them is a byte
constexpr int kSampleChunk = kSampleThreads * kTokensPerThread;  // that a block takes at a time
constexpr int kMostSlices = 128;                                 // of a row

// The slices of a vocabulary; they depend on nothing else, and so does the order of sums.
struct SampleSlices {
  int num_slices, slice_size;  // whole chunks

  __host__ __device__ explicit SampleSlices(int64_t vocab_size) {
    const int64_t num_chunks = (vocab_size + kSampleChunk - 1) / kSampleChunk;
    const int64_t chunks_per_slice = (num_chunks + kMostSlices - 1) / kMostSlices;
    slice_size = static_cast<int>(chunks_per_slice * kSampleChunk);
    num_slices = static_cast<int>((vocab_size + slice_size - 1) / slice_size);
  }
};

// What is known of the logits of a slice, or of more of them.
struct alignas(16) SliceNumbers {
  float largest, second;  // -infinity at first
  float sum;              // of exp(logit - largest); NaN for NaN among them and for infinity
  int id;                 // of the largest, the lowest among equals; -1: all are -infinity
  float changed_largest;  // of the logits as the request changes them
  int changed_id;
};

// What is left open by the digits of keys that are known already.
struct SiftedSlice {
  double sum;       // weights of what stays for sure
  int num_open;     // keys
  uint32_t all_of;  // bits that every open key has
  uint32_t any_of;  // that some have
};

// Where the bounds of a row's filters lie: digits of keys.
struct Sifted {
  int k_digit;                          // of the last key that top-k keeps; -1: of any
  int first_digit, last_digit;          // between which the last key that top-p keeps is, or top-k
  uint32_t count_below;                 // keys below k_digit
  unsigned long long mass_below_k;      // weights of keys below k_digit; of all where that is -1
  unsigned long long mass_below_first;  // below first_digit
};

// What is known of a row.
struct SampleRow {
  bool draws;         // a token is drawn
  int token;          // the chosen one; -1: none
  Sifted sifted;      // where filters are on
  uint32_t last_key;  // from here on: what is kept of a row that draws
  int end_of_last;
  float least;
  double total;
};

struct SampleWorkspace {
  int num_slices, slice_size;
  int64_t value_stride;   // whole 32-byte accesses
  float mass_scale;       // of weights in fixed point: those of a whole vocabulary fit in 63 bits
  SampleRow* rows;        // [num_rows]
  SliceNumbers* numbers;  // [num_rows, num_slices]
  SiftedSlice* sifted;    // [num_rows, num_slices]
  unsigned long long* masses;  // [num_rows, kNumDigits], weights by the first digit of their keys
  uint32_t* counts;            // [num_rows, kNumDigits]
  float* values;            // [num_rows, value_stride]: logits as requests change them, then scaled
  uint32_t* open_keys;      // [num_rows, value_stride], a slice's from where it begins
  unsigned long long* top;  // [num_rows, num_slices, num_top]
};

// Logits of a row, and which of its tokens are allowed: null for all.
template <typename T>
struct Logits {
  const T* values;         // [vocab_size]
  const int32_t* allowed;  // [ceil(vocab_size / 32)]

  __device__ __forceinline__ float operator[](int64_t id) const {
    const bool is_allowed = allowed == nullptr || (allowed[id / 32] >> (id % 32) & 1) != 0;
    return is_allowed ? to_float(values[id]) : -INFINITY;
  }

  // The values of a thread's tokens from `token` on; -infinity from `end` on, and where a token is
  // not allowed.
  __device__ __forceinline__ void load(int token, int end, float (&out)[kTokensPerThread]) const {
    constexpr int kSize = Pack<T>::kSize;
    const bool aligned = reinterpret_cast<uintptr_t>(values) % 16 == 0;
    Pack<T> packs[kTokensPerThread / kSize];
#pragma unroll
    for (int p = 0; p < kTokensPerThread / kSize; ++p) {
      const int first = token + p * kSize;
      packs[p] = load_pack(values + first, end - first, aligned);
    }
    uint32_t exist = (1u << max(0, min(end - token, kTokensPerThread))) - 1;
    if (allowed != nullptr && token < end) exist &= allowed[token / 32] >> (token % 32);
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) {
      const float value = to_float(packs[i / kSize].values[i % kSize]);
      out[i] = (exist >> i & 1) != 0 ? value : -INFINITY;
    }
  }
};

// The mask of output row w; null where all tokens are allowed.
__device__ __forceinline__ const int32_t* mask_of(const SampleTokensParams& params, int64_t w,
                                                  int64_t request) {
  if (params.allowed == nullptr) return nullptr;
  const int64_t step =
      params.first_position == nullptr ? 0 : params.positions[w] - params.first_position[request];
  if (step < 0 || step >= params.num_masks) return nullptr;
  return params.allowed + (request * params.num_masks + step) * ((params.vocab_size + 31) / 32);
}

// Where the distribution of output row w goes; null where nobody wants it.
__device__ __forceinline__ float* probs_row(const SampleTokensParams& params, int64_t w,
                                            int64_t request) {
  if (params.probs == nullptr) return nullptr;
  if (params.probs_by_step == 0) return params.probs + w * params.vocab_size;
  const int64_t step = params.positions[w] - params.first_position[request];
  if (step < 0 || step >= params.probs_by_step) return nullptr;
  return params.probs + (request * params.probs_by_step + step) * params.vocab_size;
}

// A logit as it came.
__device__ __forceinline__ float logit_of(const SampleTokensParams& params, int j, int id) {
  const int64_t at = j * params.logits_stride + id;
  if (params.dtype == DType::kFloat32) return static_cast<const float*>(params.logits)[at];
  if (params.dtype == DType::kBFloat16) {
    return to_float(static_cast<const BFloat16*>(params.logits)[at]);
  }
  return to_float(static_cast<const Float16*>(params.logits)[at]);
}

// A row of logits, and whom it is for.
struct RowPlace {
  int j, w, request;
  bool wanted;

  __device__ __forceinline__ RowPlace(const SampleTokensParams& params, int j)
      : j(j),
        w(params.index != nullptr ? params.index[j] : j),
        request(params.row != nullptr ? params.row[w] : w),
        wanted(params.kind == nullptr || params.kind[request] == params.wanted) {}

  template <typename T>
  __device__ __forceinline__ Logits<T> logits(const SampleTokensParams& params) const {
    return {static_cast<const T*>(params.logits) + j * params.logits_stride,
            mask_of(params, w, request)};
  }
};

// What a block has of a row. Grid: num_rows by num_slices, and maybe a few more for each row.
struct SlicePlace : RowPlace {
  int slice, begin, end;  // tokens

  __device__ __forceinline__ SlicePlace(const SampleTokensParams& params,
                                        const SampleWorkspace& workspace, int more = 0)
      : RowPlace(params, static_cast<int>(blockIdx.x) / (workspace.num_slices + more)),
        slice(static_cast<int>(blockIdx.x) % (workspace.num_slices + more)),
        begin(slice * workspace.slice_size),
        end(static_cast<int>(
            min(int64_t{begin} + workspace.slice_size, int64_t{params.vocab_size}))) {}

  __device__ __forceinline__ int64_t number(const SampleWorkspace& workspace) const {
    return int64_t{j} * workspace.num_slices + slice;
  }
};

// What a request leaves of the distribution.
struct Filters {
  int top_k;
  float top_p, least;  // a weight, of those of which the largest is 1
  bool by_count, by_mass;

  __device__ __forceinline__ Filters(const SampleTokensParams& params, int request)
      : top_k(params.top_k[request]),
        top_p(params.top_p[request]),
        least(fminf(params.min_p[request], 1.0f)),
        by_count(top_k > 0 && top_k < params.vocab_size),
        by_mass(top_p < 1.0f) {}

  // Some of them needs to know which tokens are the most probable.
  __device__ __forceinline__ bool by_rank() const { return by_count || by_mass; }
};

// Of a scaled logit, which is 0 or less: the smaller the key, the more probable the token.
__device__ __forceinline__ uint32_t key_of(float scaled) {
  return float_to_bits(scaled) & 0x7fffffffu;
}

// What a token is drawn with: 1 for the most probable one, 0 for NaN.
constexpr float kNoWeight = -104.0f;  // exp of which is 0
__device__ __forceinline__ float weight_of(float scaled) {
  return scaled > kNoWeight ? expf(scaled) : 0.0f;
}
__device__ __forceinline__ float weight_of_key(uint32_t key) {
  return weight_of(-bits_to_float(key));
}

// The first digit of a key whose token has a weight: exponent and the highest bits of the mantissa.
// Scaled logits next to 0, those below 2^-121, share one.
constexpr int kNumDigits = 1024;
constexpr int kRestBits = 20;
constexpr int kFirstDigits = 0x42d - kNumDigits;  // 0x42d00000 is the key of kNoWeight
__device__ __forceinline__ int digit_of(uint32_t key) {
  return max(static_cast<int>(key >> kRestBits) - kFirstDigits, 0);
}
// The keys of a digit: from the first on, before the end.
__device__ __forceinline__ uint32_t first_key(int digit) {
  return digit == 0 ? 0 : static_cast<uint32_t>(digit + kFirstDigits) << kRestBits;
}
__device__ __forceinline__ uint32_t end_key(int digit) {
  return static_cast<uint32_t>(digit + kFirstDigits + 1) << kRestBits;
}

// A weight in fixed point, whose sums are the same in any order.
__device__ __forceinline__ unsigned long long mass_of(float weight, float scale) {
  return static_cast<unsigned long long>(weight * scale + 0.5f);
}

// Adds to a number of 64 bits of which shared memory holds the halves.
__device__ __forceinline__ void add_mass(Shared<uint32_t> low, Shared<uint32_t> high,
                                         unsigned long long mass) {
  if (mass == 0) return;
  const uint32_t of_low = static_cast<uint32_t>(mass);
  uint32_t of_high = static_cast<uint32_t>(mass >> 32);
  const uint32_t before = atomicAdd(low, of_low);
  if (before + of_low < before) ++of_high;
  if (of_high != 0) atomicAdd(high, of_high);
}

// The least mass of which what is left may be dropped by top-p; the first token always stays.
__device__ __forceinline__ unsigned long long top_p_target(float top_p, unsigned long long total) {
  const double share = static_cast<double>(top_p) * kTopPShare * static_cast<double>(total);
  return share > 1.0 ? static_cast<unsigned long long>(ceil(share)) : 1;
}

}  // namespace eecore::cuda
