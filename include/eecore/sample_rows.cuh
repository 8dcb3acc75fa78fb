// Shared by the kernels of sample_tokens: rows of logits, the slices of the vocabulary that blocks
// take, filters, and the workspace.
#pragma once

#include "eecore/element.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr float kMinTemperature = 1e-30f;  // with the largest logit at 0 no other infinity arises

constexpr int kSampleThreads = 256;
constexpr int kSampleWarps = kSampleThreads / 32;
constexpr int kTokensPerThread = 8;  // neighbours; their mask is one byte
constexpr int kSampleChunk =
    kSampleThreads * kTokensPerThread;  // tokens that a block takes at a time
constexpr int kMaxSlices = 128;         // of a row

// The slices of a vocabulary. They depend on its size alone, and so does the order of sums.
struct SampleSlices {
  int num_slices, slice_size;  // whole chunks

  __host__ __device__ explicit SampleSlices(int64_t vocab_size) {
    const int64_t num_chunks = (vocab_size + kSampleChunk - 1) / kSampleChunk;
    const int64_t chunks_per_slice = (num_chunks + kMaxSlices - 1) / kMaxSlices;
    slice_size = static_cast<int>(chunks_per_slice * kSampleChunk);
    num_slices = static_cast<int>((vocab_size + slice_size - 1) / slice_size);
  }
};

// Statistics of the logits of one or more slices.
struct alignas(16) SliceNumbers {
  float largest, second;  // -infinity at first
  float sum;              // of exp(logit - largest); NaN for NaN among them and for infinity
  int id;                 // of the largest, the lowest among equals; -1: all are -infinity
  float changed_largest;  // of the logits as the request changes them
  int changed_id;
};

// The keys that the known digits leave open, in one slice.
struct SiftedSlice {
  double sum;       // weights of the tokens that are kept for certain
  int num_open;     // keys
  uint32_t all_of;  // bits that every open key has
  uint32_t any_of;  // bits that any open key has
};

// The digits of keys between which the bounds of a row's filters are.
struct Sifted {
  int k_digit;                  // of the last key that top-k keeps; -1: top-k is off
  int first_digit, last_digit;  // the last key that top-p keeps, or top-k, is between them
  uint32_t count_below;         // keys below k_digit
  unsigned long long
      mass_below_k;  // weights of keys below k_digit; of all keys where k_digit is -1
  unsigned long long mass_below_first;  // weights of keys below first_digit
};

// The results for a row.
struct SampleRow {
  bool draws;         // a token is drawn
  int token;          // the chosen one; -1: none
  Sifted sifted;      // where filters are on
  uint32_t last_key;  // from here on: for a row that draws
  int end_of_last;
  float least;
  double total;
};

struct SampleWorkspace {
  int num_slices, slice_size;
  int64_t value_stride;  // whole 32-byte accesses
  float mass_scale;  // for weights in fixed point: the sum over a whole vocabulary fits in 63 bits
  SampleRow* rows;   // [num_rows]
  SliceNumbers* numbers;       // [num_rows, num_slices]
  SiftedSlice* sifted;         // [num_rows, num_slices]
  unsigned long long* masses;  // [num_rows, kNumDigits], weights by the first digit of the keys
  uint32_t* counts;            // [num_rows, kNumDigits]
  float* values;            // [num_rows, value_stride]: logits as requests change them, then scaled
  uint32_t* open_keys;      // [num_rows, value_stride], those of a slice from its beginning on
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

  // The values of a thread's tokens from `token` on; -infinity from `end` on, and for tokens that
  // are not allowed.
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

// The destination of the distribution of output row w; null where it is not asked for.
__device__ __forceinline__ float* probs_row(const SampleTokensParams& params, int64_t w,
                                            int64_t request) {
  if (params.probs == nullptr) return nullptr;
  if (params.probs_by_step == 0) return params.probs + w * params.vocab_size;
  const int64_t step = params.positions[w] - params.first_position[request];
  if (step < 0 || step >= params.probs_by_step) return nullptr;
  return params.probs + (request * params.probs_by_step + step) * params.vocab_size;
}

// A logit before the request's changes.
__device__ __forceinline__ float logit_of(const SampleTokensParams& params, int j, int id) {
  const int64_t at = j * params.logits_stride + id;
  if (params.dtype == DType::kFloat32) return static_cast<const float*>(params.logits)[at];
  if (params.dtype == DType::kBFloat16) {
    return to_float(static_cast<const BFloat16*>(params.logits)[at]);
  }
  return to_float(static_cast<const Float16*>(params.logits)[at]);
}

// A row of logits, and the request and output row that it is for.
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

// The part of a row that a block has. Grid: num_rows by num_slices, possibly with a few more for
// each row.
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

// The filters of a request.
struct Filters {
  int top_k;
  float top_p, least;  // least: a weight, relative to the largest, which is 1
  bool by_count, by_mass;

  __device__ __forceinline__ Filters(const SampleTokensParams& params, int request)
      : top_k(params.top_k[request]),
        top_p(params.top_p[request]),
        least(fminf(params.min_p[request], 1.0f)),
        by_count(top_k > 0 && top_k < params.vocab_size),
        by_mass(top_p < 1.0f) {}

  // Whether a filter needs to know which tokens are the most probable.
  __device__ __forceinline__ bool by_rank() const { return by_count || by_mass; }
};

// The key of a scaled logit, which is at most 0: the smaller the key, the more probable the token.
__device__ __forceinline__ uint32_t key_of(float scaled) {
  return float_to_bits(scaled) & 0x7fffffffu;
}

// The weight that a token is drawn with: 1 for the most probable token, 0 for NaN.
constexpr float kNoWeight = -104.0f;  // exp of which is 0
__device__ __forceinline__ float weight_of(float scaled) {
  return scaled > kNoWeight ? expf(scaled) : 0.0f;
}
__device__ __forceinline__ float weight_of_key(uint32_t key) {
  return weight_of(-bits_to_float(key));
}

// The first digit of a key whose token has a weight: the exponent and the highest bits of the
// mantissa. Scaled logits near 0, above -2^-121, share one digit.
constexpr int kNumDigits = 1024;
constexpr int kRestBits = 20;
constexpr int kFirstDigits = 0x42d - kNumDigits;  // 0x42d00000 is the key of kNoWeight
__device__ __forceinline__ int digit_of(uint32_t key) {
  return max(static_cast<int>(key >> kRestBits) - kFirstDigits, 0);
}
// The keys of a digit: from the first one on, before the end.
__device__ __forceinline__ uint32_t first_key(int digit) {
  return digit == 0 ? 0 : static_cast<uint32_t>(digit + kFirstDigits) << kRestBits;
}
__device__ __forceinline__ uint32_t end_key(int digit) {
  return static_cast<uint32_t>(digit + kFirstDigits + 1) << kRestBits;
}

// A weight in fixed point, so that sums are the same in any order.
__device__ __forceinline__ unsigned long long mass_of(float weight, float scale) {
  return static_cast<unsigned long long>(weight * scale + 0.5f);
}

// Adds to a number of 64 bits whose halves are in shared memory.
__device__ __forceinline__ void add_mass(Shared<uint32_t> low, Shared<uint32_t> high,
                                         unsigned long long mass) {
  if (mass == 0) return;
  const uint32_t of_low = static_cast<uint32_t>(mass);
  uint32_t of_high = static_cast<uint32_t>(mass >> 32);
  const uint32_t before = atomicAdd(low, of_low);
  if (before + of_low < before) ++of_high;
  if (of_high != 0) atomicAdd(high, of_high);
}

// The smallest mass at which top-p may drop the rest; the first token is always kept.
__device__ __forceinline__ unsigned long long top_p_target(float top_p, unsigned long long total) {
  const double share = static_cast<double>(top_p) * kTopPShare * static_cast<double>(total);
  return share > 1.0 ? static_cast<unsigned long long>(ceil(share)) : 1;
}

}  // namespace eecore::cuda
