// sample_tokens, first: the statistics of each slice of a row's logits, and the logits as the
// request changes them.
#pragma once

#include "eecore/philox.cuh"
#include "eecore/sample_rows.cuh"

namespace eecore::cuda {

// The changes that a request makes to logits; a mark holds kSeen and how often a token was
// generated.
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

// Marks and biases of a chunk's tokens, from `begin` on: for the tokens of the text, and for drafts
// up to the position. All threads of the block call it.
__device__ __forceinline__ void mark_chunk(const SampleTokensParams& params, int request,
                                           int64_t position, int begin, Shared<int> marks,
                                           Shared<float> biases) {
  __syncthreads();  // all threads have read those of an earlier chunk
  for (int i = threadIdx.x; i < kSampleChunk; i += kSampleThreads) {
    marks[i] = 0;
    biases[i] = 0.0f;
  }
  __syncthreads();
  // An id outside the vocabulary may be within the last chunk, where it is never read.
  const auto exists = [=](int64_t token) { return token >= begin && token < begin + kSampleChunk; };
  const int64_t* seen = params.seen + request * params.num_seen;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < params.num_seen; i += kSampleThreads) {
    if (exists(seen[i])) atomicOr(marks + (seen[i] - begin), Penalties::kSeen);
  }
  const int64_t* generated = params.generated + request * params.num_generated;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < params.num_generated; i += kSampleThreads) {
    if (exists(generated[i])) atomicAdd(marks + (generated[i] - begin), 1);
  }
  if (params.round_tokens != nullptr) {
    const int64_t* drafts = params.round_tokens + request * params.round_width;
    const int64_t end =
        min(position - params.first_position[request] + 1, int64_t{params.round_width});
#pragma unroll 1
    for (int64_t i = 1 + threadIdx.x; i < end; i += kSampleThreads) {
      if (!exists(drafts[i])) continue;
      // An addition for both at once could carry from the count into the mark.
      atomicOr(marks + (drafts[i] - begin), Penalties::kSeen);
      atomicAdd(marks + (drafts[i] - begin), 1);
    }
  }
  const int64_t* ids = params.bias_ids + request * params.num_bias;
  const float* bias = params.bias + request * params.num_bias;
#pragma unroll 1
  for (int64_t i = threadIdx.x; i < params.num_bias; i += kSampleThreads) {
    if (exists(ids[i])) biases[ids[i] - begin] = bias[i];
  }
  __syncthreads();
}

// Whether a is the larger of two values, or the one with the lower id if they are equal. An id of
// -1 comes before all.
__device__ __forceinline__ bool is_ahead(float a, int a_id, float b, int b_id) {
  return a > b || (a == b && static_cast<uint32_t>(a_id) < static_cast<uint32_t>(b_id));
}

__device__ __forceinline__ SliceNumbers no_numbers() {
  return {-INFINITY, -INFINITY, 0.0f, -1, -INFINITY, -1};
}

// The base of sums of exp; never an infinity, which would be subtracted from itself.
__device__ __forceinline__ float base_of(float largest) {
  return largest == -INFINITY ? 0.0f : largest;
}

// Merges two slices.
__device__ __forceinline__ SliceNumbers merged(const SliceNumbers& a, const SliceNumbers& b) {
  SliceNumbers both;
  both.largest = fmaxf(a.largest, b.largest);
  both.second = fmaxf(fmaxf(a.second, b.second), fminf(a.largest, b.largest));
  both.id = is_ahead(a.largest, a.id, b.largest, b.id) ? a.id : b.id;
  // The sum is spelled out: a compiler's choice of fma must not differ between kernels.
  const float base = base_of(both.largest);
  both.sum = fmaf(a.sum, expf(a.largest - base), b.sum * expf(b.largest - base));
  both.changed_largest = fmaxf(a.changed_largest, b.changed_largest);
  both.changed_id = is_ahead(a.changed_largest, a.changed_id, b.changed_largest, b.changed_id)
                        ? a.changed_id
                        : b.changed_id;
  return both;
}

// Merges over groups of kLanes neighbouring lanes; the first lane has the exact result.
template <int kLanes = 32>
__device__ __forceinline__ SliceNumbers merge_lanes(SliceNumbers mine) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const auto shuffled = [=](auto x) { return __shfl_xor_sync(kWholeWarp, x, distance); };
    mine = merged(
        mine, {shuffled(mine.largest), shuffled(mine.second), shuffled(mine.sum), shuffled(mine.id),
               shuffled(mine.changed_largest), shuffled(mine.changed_id)});
  }
  return mine;
}

// Adds a thread's next logits, whose ids ascend.
__device__ __forceinline__ void take(int token, const float (&logits)[kTokensPerThread],
                                     SliceNumbers& numbers) {
  const float before = numbers.largest;
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) {
    numbers.second = fmaxf(numbers.second, fminf(numbers.largest, logits[i]));
    if (logits[i] > numbers.largest) numbers.id = token + i;
    numbers.largest = fmaxf(numbers.largest, logits[i]);
  }
  const float base = base_of(numbers.largest);
  numbers.sum *= expf(before - base);
#pragma unroll
  for (int i = 0; i < kTokensPerThread; ++i) numbers.sum += expf(logits[i] - base);
}

// Grid: num_rows by num_slices. Writes the numbers of each slice, the logits that requests change,
// and `uniform`; clears the counters of the keys' digits.
template <typename T>
__global__ void __launch_bounds__(kSampleThreads)
    sample_measure_kernel(SampleTokensParams params, SampleWorkspace workspace) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const SlicePlace place(params, workspace);
  if (!place.wanted) return;
  EECORE_SHARED(int, marks, kSampleChunk);
  EECORE_SHARED(float, biases, kSampleChunk);
  EECORE_SHARED(SliceNumbers, of_warp, kSampleWarps);
  const int w = place.w, request = place.request;
  const int64_t position = params.positions[w];
  const Logits<T> logits = place.logits<T>(params);
  const bool changes = changes_logits(params, request);
  const Penalties penalties(params, request);
  float* const changed = workspace.values + place.j * workspace.value_stride;
  SliceNumbers numbers = no_numbers();
#pragma unroll 1
  for (int begin = place.begin; begin < place.end; begin += kSampleChunk) {
    const int at = static_cast<int>(threadIdx.x) * kTokensPerThread, token = begin + at;
    float values[kTokensPerThread];
    logits.load(token, place.end, values);
    take(token, values, numbers);
    if (!changes) continue;
    mark_chunk(params, request, position, begin, marks, biases);
#pragma unroll
    for (int i = 0; i < kTokensPerThread; ++i) biases[at + i] += values[i];
    __syncthreads();
    const int count = min(kSampleChunk, place.end - begin);
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += kSampleThreads) {
      const float value = penalties(biases[i], marks[i]);
      changed[begin + i] = value;
      if (value > numbers.changed_largest) {
        numbers.changed_largest = value;
        numbers.changed_id = begin + i;
      }
    }
  }
  if (!changes) {
    numbers.changed_largest = numbers.largest;
    numbers.changed_id = numbers.id;
  }

  if (params.uniform != nullptr && place.slice == 0 && threadIdx.x == 0) {
    const RandomWords random = random_words(params.seed[request], position + 1, kAcceptancePurpose);
    for (int i = 0; i < 2; ++i) params.uniform[2 * w + i] = uniform_float(random, i);
  }
  if (params.temperature[request] > 0.0f && Filters(params, request).by_rank()) {
#pragma unroll 1
    for (int i = place.slice * kSampleThreads + threadIdx.x; i < kNumDigits;
         i += workspace.num_slices * kSampleThreads) {
      workspace.counts[int64_t{place.j} * kNumDigits + i] = 0;
      workspace.masses[int64_t{place.j} * kNumDigits + i] = 0;
    }
  }

  numbers = merge_lanes(numbers);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = numbers;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  numbers = merge_lanes<kSampleWarps>(of_warp[threadIdx.x % kSampleWarps]);
  if (threadIdx.x == 0) workspace.numbers[place.number(workspace)] = numbers;
}

}  // namespace eecore::cuda
