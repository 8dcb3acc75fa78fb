// sample_tokens: a block for each row of logits, which goes through it again and again; what is not
// the logit itself lies in the workspace. Filters are bounds on (probability, id), found digit by
// digit of their bits from sums over the block, whose order is fixed.
#pragma once

#include "eecore/draw.cuh"
#include "eecore/element.cuh"
#include "eecore/params.h"
#include "eecore/philox.cuh"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr float kMinTemperature = 1e-30f;  // with the largest logit at 0 no other infinity arises

// Logits of a row, and which of its tokens are allowed: null for all.
template <typename T>
struct Logits {
  const T* values;         // [vocab_size]
  const int32_t* allowed;  // [ceil(vocab_size / 32)]

  __device__ __forceinline__ float operator[](int64_t id) const {
    const bool is_allowed = allowed == nullptr || (allowed[id / 32] >> (id % 32) & 1) != 0;
    return is_allowed ? to_float(values[id]) : -INFINITY;
  }
};

// visit(id, value) for each of the row's values, a thread's own every time; -infinity for tokens
// that are not allowed.
template <int kThreads, typename T, typename Visit>
__device__ __forceinline__ void for_each(Logits<T> row, int count, Visit visit) {
  constexpr int kSize = Pack<T>::kSize;
  static_assert(32 % kSize == 0, "a pack's bits lie in one word");
  const bool aligned = reinterpret_cast<uintptr_t>(row.values) % 16 == 0;
  for (int first = threadIdx.x * kSize; first < count; first += kThreads * kSize) {
    const Pack<T> pack = load_pack(row.values + first, count - first, aligned);
    const int32_t allowed = row.allowed == nullptr ? -1 : row.allowed[first / 32] >> (first % 32);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (first + i >= count) continue;
      visit(first + i, (allowed >> i & 1) != 0 ? to_float(pack.values[i]) : -INFINITY);
    }
  }
}

template <int kThreads, typename Visit>
__device__ __forceinline__ void for_each(const float* row, int count, Visit visit) {
  for_each<kThreads>(Logits<float>{row, nullptr}, count, visit);
}

// Sums over a block; every thread gets them. All threads of the block call it.
template <int kThreads, int kCount>
__device__ __forceinline__ void sum_block(double (&sums)[kCount]) {
  constexpr int kWarps = kThreads / 32;
  EECORE_SHARED(double, of_warp, kWarps* kCount);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      sums[i] += __shfl_xor_sync(kWholeWarp, sums[i], distance);
    }
  }
  __syncthreads();  // an earlier call's sums have been read
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) of_warp[threadIdx.x / 32 * kCount + i] = sums[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = 0.0;
#pragma unroll 4
  for (int warp = 0; warp < kWarps; ++warp) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] += of_warp[warp * kCount + i];
  }
}

// The two largest values, and the id of the largest, the lowest among equals. NaN counts for
// nothing.
struct TopTwo {
  float largest, second;
  int id;  // -1: none

  __device__ __forceinline__ void take(int other, float value) {
    if (value > largest || (value == largest && other < id) || (id < 0 && value == value)) {
      second = largest;
      largest = value;
      id = other;
    } else if (value > second) {
      second = value;
    }
  }
  __device__ __forceinline__ void merge(float other_largest, float other_second, int other) {
    if (other < 0) return;
    take(other, other_largest);
    if (other_second > second) second = other_second;
  }
};

// Over a block, of what its threads know; every thread gets it. All threads of the block call it.
template <int kThreads>
__device__ __forceinline__ TopTwo merge_block(TopTwo top) {
  constexpr int kWarps = kThreads / 32;
  EECORE_SHARED(float, largest_of_warp, kWarps);
  EECORE_SHARED(float, second_of_warp, kWarps);
  EECORE_SHARED(int, id_of_warp, kWarps);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const float largest = __shfl_xor_sync(kWholeWarp, top.largest, distance);
    const float second = __shfl_xor_sync(kWholeWarp, top.second, distance);
    const int id = __shfl_xor_sync(kWholeWarp, top.id, distance);
    top.merge(largest, second, id);
  }
  __syncthreads();  // an earlier call's have been read
  if (threadIdx.x % 32 == 0) {
    largest_of_warp[threadIdx.x / 32] = top.largest;
    second_of_warp[threadIdx.x / 32] = top.second;
    id_of_warp[threadIdx.x / 32] = top.id;
  }
  __syncthreads();
  TopTwo merged{-INFINITY, -INFINITY, -1};
#pragma unroll 1
  for (int warp = 0; warp < kWarps; ++warp) {
    merged.merge(largest_of_warp[warp], second_of_warp[warp], id_of_warp[warp]);
  }
  return merged;
}

template <int kThreads, typename T>
__device__ __forceinline__ TopTwo top_two(Logits<T> row, int count) {
  TopTwo top{-INFINITY, -INFINITY, -1};
  for_each<kThreads>(row, count, [&](int id, float value) { top.take(id, value); });
  return merge_block<kThreads>(top);
}

// The next largest value behind one of (value, id), equals by ascending id.
template <int kThreads, typename T>
__device__ __forceinline__ TopTwo next_largest(Logits<T> row, int count, TopTwo last) {
  TopTwo top{-INFINITY, -INFINITY, -1};
  for_each<kThreads>(row, count, [&](int id, float value) {
    if (value < last.largest || (value == last.largest && id > last.id)) top.take(id, value);
  });
  return merge_block<kThreads>(top);
}

struct Bound {
  uint32_t key;
  double below;  // what keys below it weigh
};

// The smallest key of `bits` bits, an even number, up to which values weigh `target` or more.
// weigh(id, value, key) gives a value's weight and its key.
template <int kThreads, typename Weigh>
__device__ __forceinline__ Bound find_bound(const float* values, int count, int bits, double target,
                                            Weigh weigh) {
  Bound bound{0, 0.0};
#pragma unroll 1
  for (int shift = bits - 2; shift >= 0; shift -= 2) {
    double sums[4] = {};  // of the keys that have the bound's digits so far, by the next one
    for_each<kThreads>(values, count, [&](int id, float value) {
      uint32_t key;
      const double weight = weigh(id, value, key);
      const uint32_t digit = (key - bound.key) >> shift;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) sums[i] += digit == i ? weight : 0.0;
    });
    sum_block<kThreads>(sums);
    // Where rounding puts the target behind the end, the last of them.
    uint32_t next = 0;
    double below = bound.below;
    bool found = false;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      if (found) continue;
      if (sums[i] > 0.0) {
        next = i;
        bound.below = below;
      }
      below += sums[i];
      found = below >= target;
    }
    bound.key += next << shift;
  }
  return bound;
}

// Of a scaled logit, which is 0 or less: the smaller the key, the more probable the token.
__device__ __forceinline__ uint32_t key_of(float scaled) {
  return float_to_bits(scaled) & 0x7fffffffu;
}

// What filters leave of scaled logits.
struct Kept {
  const float* values;  // [vocab_size], aligned
  int vocab_size;
  uint32_t last_key;  // the largest that is left
  int end_of_last;    // tokens of the last key are left below this id
  float least;        // weight

  static constexpr int kSize = Pack<float>::kSize;
  static constexpr bool aligned = true;

  __device__ __forceinline__ float weight(int id, float scaled) const {
    const uint32_t key = key_of(scaled);
    if (key > last_key || (key == last_key && id >= end_of_last)) return 0.0f;
    const float weight = expf(scaled);
    return weight >= least ? weight : 0.0f;
  }

  // As draw wants it.
  template <bool kWhole>
  __device__ __forceinline__ void load(int token, int end, double (&weights)[kSize]) const {
    const Pack<float> pack =
        kWhole ? load16(values + token) : load_pack(values + token, end - token, aligned);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const bool exists = kWhole || token + i < end;
      weights[i] = exists ? weight(token + i, pack.values[i]) : 0.0f;
    }
  }
};

// Leaves the k largest and what equals the last of them.
template <int kThreads>
__device__ __forceinline__ void keep_top_k(int k, Kept& kept) {
  const int count = kept.vocab_size;
  kept.last_key =
      find_bound<kThreads>(kept.values, count, 32, k, [](int, float value, uint32_t& key) {
        key = key_of(value);
        return 1.0;
      }).key;
}

// Leaves the most probable tokens, lower ids first among equals, while those before a token have
// less than top_p of the mass.
template <int kThreads>
__device__ __forceinline__ void keep_top_p(float top_p, Kept& kept) {
  const int count = kept.vocab_size;
  double total[1] = {};
  for_each<kThreads>(kept.values, count,
                     [&](int id, float value) { total[0] += kept.weight(id, value); });
  sum_block<kThreads>(total);
  const double share = static_cast<double>(top_p) * kTopPShare * total[0];
  const double target = share > 0.0 ? share : 0x1p-1000;  // the first always stays
  const Bound bound =
      find_bound<kThreads>(kept.values, count, 32, target, [&](int id, float value, uint32_t& key) {
        key = key_of(value);
        return static_cast<double>(kept.weight(id, value));
      });

  // How many of the bound's equals stay, and where they end.
  double equals[1] = {};
  for_each<kThreads>(kept.values, count, [&](int, float value) {
    equals[0] += key_of(value) == bound.key ? 1.0 : 0.0;
  });
  sum_block<kThreads>(equals);
  const double weight = expf(-bits_to_float(bound.key));
  double staying = floor((target - bound.below) / weight);
  if (!(staying >= 1.0)) staying = 1.0;
  if (bound.below + staying * weight < target) staying += 1.0;
  kept.last_key = bound.key;
  if (staying >= equals[0]) return;
  int bits = 2;
  while (bits < 32 && (count >> bits) != 0) bits += 2;
  const Bound last = find_bound<kThreads>(kept.values, count, bits, staying,
                                          [&](int id, float value, uint32_t& key) {
                                            key = static_cast<uint32_t>(id);
                                            return key_of(value) == bound.key ? 1.0 : 0.0;
                                          });
  kept.end_of_last = static_cast<int>(last.key) + 1;
}

// The mask of output row w; null where all tokens are allowed.
__device__ __forceinline__ const int32_t* mask_of(const SampleTokensParams& params, int64_t w,
                                                  int64_t request) {
  if (params.allowed == nullptr) return nullptr;
  const int64_t step =
      params.first_position == nullptr ? 0 : params.positions[w] - params.first_position[request];
  if (step < 0 || step >= params.num_masks) return nullptr;
  return params.allowed + (request * params.num_masks + step) * ((params.vocab_size + 31) / 32);
}

// What a request does to logits; a mark holds kSeen and how often a token was generated.
struct Penalties {
  static constexpr int kSeen = 1 << 30;
  float repetition, presence, frequency;

  __device__ __forceinline__ Penalties(const SampleTokensParams& params, int request)
      : repetition(params.repetition_penalty[request]),
        presence(params.presence_penalty != nullptr ? params.presence_penalty[request] : 0.0f),
        frequency(params.frequency_penalty != nullptr ? params.frequency_penalty[request] : 0.0f) {}

  __device__ __forceinline__ bool any() const {
    return repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
  }
  __device__ __forceinline__ float operator()(float logit, int mark) const {
    if ((mark & kSeen) != 0) logit = logit > 0.0f ? logit / repetition : logit * repetition;
    const int count = mark & (kSeen - 1);
    logit -= frequency * static_cast<float>(count);
    return count > 0 ? logit - presence : logit;
  }
};

// Whether a request's logits may change.
__device__ __forceinline__ bool changes_logits(const SampleTokensParams& params, int request) {
  return params.num_bias > 0 || Penalties(params, request).any();
}

// marks [vocab_size] become those of the text, with drafts up to the position.
template <int kThreads>
__device__ __forceinline__ void mark_tokens(const SampleTokensParams& params, int request,
                                            int64_t position, int* marks) {
  const int vocab_size = static_cast<int>(params.vocab_size);
  for (int id = threadIdx.x; id < vocab_size; id += kThreads) marks[id] = 0;
  __syncthreads();
  const auto exists = [=](int64_t token) { return token >= 0 && token < vocab_size; };
  const int64_t* seen = params.seen + request * params.num_seen;
  for (int64_t i = threadIdx.x; i < params.num_seen; i += kThreads) {
    if (exists(seen[i])) atomicOr(marks + seen[i], Penalties::kSeen);
  }
  const int64_t* generated = params.generated + request * params.num_generated;
  for (int64_t i = threadIdx.x; i < params.num_generated; i += kThreads) {
    if (exists(generated[i])) atomicAdd(marks + generated[i], 1);
  }
  if (params.round_tokens != nullptr) {
    const int64_t* drafts = params.round_tokens + request * params.round_width;
    const int64_t end =
        min(position - params.first_position[request] + 1, int64_t{params.round_width});
    for (int64_t i = 1 + threadIdx.x; i < end; i += kThreads) {
      if (!exists(drafts[i])) continue;
      atomicOr(marks + drafts[i], Penalties::kSeen);
      atomicAdd(marks + drafts[i], 1);
    }
  }
  __syncthreads();
}

// values [vocab_size + num_bias] become the logits with biases added, then penalties taken; marks
// lie there before, each read by the thread that puts a value in its place.
template <int kThreads, typename T>
__device__ __forceinline__ void change_logits(const SampleTokensParams& params, Logits<T> logits,
                                              int request, int64_t position, float* values) {
  const int vocab_size = static_cast<int>(params.vocab_size);
  const int num_bias = static_cast<int>(params.num_bias);
  const Penalties penalties(params, request);
  int* marks = reinterpret_cast<int*>(values);
  mark_tokens<kThreads>(params, request, position, marks);
  const int64_t* ids = params.bias_ids + int64_t{request} * num_bias;
  const float* bias = params.bias + int64_t{request} * num_bias;
  const auto exists = [=](int64_t token) { return token >= 0 && token < vocab_size; };
  for (int i = threadIdx.x; i < num_bias; i += kThreads) {
    const int64_t id = ids[i];
    if (exists(id)) values[vocab_size + i] = penalties(logits[id] + bias[i], marks[id]);
  }
  __syncthreads();
  for_each<kThreads>(logits, vocab_size,
                     [&](int id, float logit) { values[id] = penalties(logit, marks[id]); });
  __syncthreads();
  for (int i = threadIdx.x; i < num_bias; i += kThreads) {
    if (exists(ids[i])) values[ids[i]] = values[vocab_size + i];
  }
  __syncthreads();
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

struct Chosen {
  int token;  // -1: none
  float probability;
};

// Draws from what the filters leave of scaled logits; writes the distribution to `probs` where that
// is not null.
template <int kThreads>
__device__ __forceinline__ Chosen draw_token(const SampleTokensParams& params, int request,
                                             double u, const float* values, float* probs) {
  const int vocab_size = static_cast<int>(params.vocab_size);
  Kept kept{values, vocab_size, ~uint32_t{0}, vocab_size, fminf(params.min_p[request], 1.0f)};
  const float least = kept.least;
  kept.least = 0.0f;  // min-p comes last
  const int top_k = params.top_k[request];
  const float top_p = params.top_p[request];
  if (top_k > 0 && top_k < vocab_size) keep_top_k<kThreads>(top_k, kept);
  if (top_p < 1.0f) keep_top_p<kThreads>(top_p, kept);
  kept.least = least;
  const auto [token, total] = draw<kThreads>(kept, u);
  if (token < 0) return {-1, 0.0f};
  if (probs != nullptr) {
    for_each<kThreads>(values, vocab_size, [&](int id, float value) {
      probs[id] = static_cast<float>(kept.weight(id, value) / total);
    });
  }
  const float weight = kept.weight(token, values[token]);
  return {token, static_cast<float>(weight / total)};
}

// Writes the numbers of the raw distribution over allowed tokens of output row w, for a request
// that has no token yet, and what top_logprobs asks for. Returns the first of the largest logits,
// or none (id -1) where the softmax is not defined: for NaN among the logits, and where the largest
// is not finite.
template <int kThreads, typename T>
__device__ __forceinline__ TopTwo measure(const SampleTokensParams& params, Logits<T> logits,
                                          int w) {
  const int vocab_size = static_cast<int>(params.vocab_size);
  const TopTwo top = top_two<kThreads>(logits, vocab_size);
  double sums[1] = {};
  for_each<kThreads>(logits, vocab_size,
                     [&](int, float logit) { sums[0] += expf(logit - top.largest); });
  sum_block<kThreads>(sums);
  const float total = static_cast<float>(sums[0]);
  const bool known = total == total;
  const float logsumexp = known ? top.largest + logf(total) : NAN;
  if (threadIdx.x == 0) {
    params.token[w] = -1;
    params.logprob[w] = NAN;
    params.logsumexp[w] = logsumexp;
    params.confidence[w] =
        known && !params.as_probability ? (0.0f - expm1f(top.second - top.largest)) / total : NAN;
  }
  TopTwo next = top;
  for (int k = 0; k < params.num_top; ++k) {
    if (k > 0 && next.id >= 0) next = next_largest<kThreads>(logits, vocab_size, next);
    if (threadIdx.x != 0) continue;
    const bool exists = known && next.id >= 0;
    params.top_ids[w * params.num_top + k] = exists ? next.id : -1;
    params.top_logprobs[w * params.num_top + k] = exists ? next.largest - logsumexp : -INFINITY;
  }
  return known ? top : TopTwo{NAN, NAN, -1};
}

// Grid: num_rows. workspace: [num_rows, value_stride] float32, aligned rows of vocab_size values
// and num_bias more.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads)
    sample_tokens_kernel(SampleTokensParams params, int64_t value_stride) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int j = static_cast<int>(blockIdx.x);
  const int w = params.index != nullptr ? params.index[j] : j;
  const int request = params.row != nullptr ? params.row[w] : w;
  if (params.kind != nullptr && params.kind[request] != params.wanted) return;
  const int vocab_size = static_cast<int>(params.vocab_size);
  const Logits<T> logits{static_cast<const T*>(params.logits) + j * params.logits_stride,
                         mask_of(params, w, request)};
  float* values = static_cast<float*>(params.workspace) + j * value_stride;
  const int64_t position = params.positions[w] + 1;
  if (params.uniform != nullptr && threadIdx.x == 0) {
    const RandomWords random = random_words(params.seed[request], position, kAcceptancePurpose);
    for (int i = 0; i < 2; ++i) params.uniform[2 * w + i] = uniform_float(random, i);
  }

  TopTwo best = measure<kThreads>(params, logits, w);
  const bool known = best.id >= 0;
  const bool changes = changes_logits(params, request);
  if (known && changes) {
    change_logits<kThreads>(params, logits, request, position - 1, values);
    best = top_two<kThreads>(Logits<float>{values, nullptr}, vocab_size);
  }
  const float temperature = params.temperature[request];
  const bool samples = temperature > 0.0f;
  float* probs = probs_row(params, w, request);
  Chosen chosen{-1, 0.0f};
  if (known && best.largest > -INFINITY && best.largest < INFINITY) {
    if (samples) {
      const auto scale = [&](int id, float value) {
        values[id] = (value - best.largest) / fmaxf(temperature, kMinTemperature);
      };
      if (changes) {
        for_each<kThreads>(values, vocab_size, scale);
      } else {
        for_each<kThreads>(logits, vocab_size, scale);
      }
      __syncthreads();
      const double u = uniform_double(random_words(params.seed[request], position, params.purpose));
      chosen = draw_token<kThreads>(params, request, u, values, probs);
    } else {
      chosen.token = best.id;
    }
  }
  if (probs != nullptr && (!samples || chosen.token < 0)) {
    for (int id = threadIdx.x; id < vocab_size; id += kThreads) {
      probs[id] = id == chosen.token ? 1.0f : 0.0f;
    }
  }
  if (threadIdx.x != 0 || chosen.token < 0) return;
  const float logprob = logits[chosen.token] - params.logsumexp[w];
  params.token[w] = chosen.token;
  params.logprob[w] = logprob;
  if (params.as_probability) params.confidence[w] = samples ? chosen.probability : expf(logprob);
}

}  // namespace eecore::cuda
