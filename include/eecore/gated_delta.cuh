// gated_delta: a block takes one value head of a sequence through its positions, in order, with S
// in registers: a thread has a part of the key features of one column. What a chunk of positions
// needs is computed before its positions run, which read it from shared memory.
#pragma once

#include "eecore/element.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

// Key and value dimensions that a kernel is built for; smaller ones are padded with zeros.
template <int kKeys, int kValues>
struct DeltaSizes {
  static constexpr int kParts = 4;  // of the key features, each with a thread for every column
  static constexpr int kPartKeys = kKeys / kParts;
  static constexpr int kThreads = kParts * kValues;
  static constexpr int kBlocks = kKeys * kValues <= 128 * 128 ? 2 : 1;  // of a multiprocessor
  static constexpr int kChunk = 4096 / kThreads;                        // positions
  static constexpr int kTogether = 4;                      // positions convolved together
  static constexpr int kFeatures = 2 * (kKeys + kValues);  // query, key, value, gate of the output
};
constexpr int kDeltaKeepThreads = 512;

// The positions of a sequence that a call is about, and where their rows are.
template <typename T>
struct DeltaText {
  int entry;           // of the caches; -1: none, and the text begins with the call
  int first, end;      // the positions of the call's rows; the same where nothing is to be done
  int oldest;          // the first position that the convolution sees
  int applied;         // positions in S
  int certain, stop;   // positions that S shall have, and that the call runs up to
  int conv_size;       // of q, k and v
  int row;             // of position `first`
  const T *qkvz, *ba;  // rows of position 0, if the call had it
  T* kept;             // [num_kept, kept_size]
  int kept_size;

  __device__ __forceinline__ T* kept_row(const GatedDeltaParams& params, int position) const {
    const unsigned at = static_cast<unsigned>(position) % static_cast<unsigned>(params.num_kept);
    return kept + int64_t{at} * kept_size;
  }
  // A feature of q, k, v, z of a position; z only of the call's rows.
  __device__ __forceinline__ float input(const GatedDeltaParams& params, int position,
                                         int feature) const {
    const T* from =
        position < first ? kept_row(params, position) : qkvz + position * params.qkvz_stride;
    return to_float(from[feature]);
  }
  // Feature `gate` of b, a of a position.
  __device__ __forceinline__ float gate(const GatedDeltaParams& params, int position,
                                        int gate) const {
    const T* from = position < first ? kept_row(params, position) + conv_size
                                     : ba + position * params.ba_stride;
    return to_float(from[gate]);
  }
};

template <typename T>
__device__ __forceinline__ DeltaText<T> delta_text(const GatedDeltaParams& params, int64_t seq,
                                                   int64_t key_head) {
  const bool fills = params.out == nullptr;
  const int32_t* number = params.states + seq * params.states_stride;
  const int num_kept = static_cast<int>(params.num_kept);
  DeltaText<T> text{};
  text.row = params.query_start_loc[seq];
  const int num_rows = params.query_start_loc[seq + 1] - text.row;
  text.entry = number[0] - 1;
  text.certain = number[1];
  text.end = params.seq_lens[seq];
  text.first = text.end - num_rows;
  if (num_rows <= 0 || (fills && params.exit_layer[text.row] > params.layer)) {
    text.first = text.end;
    return text;
  }
  if (params.slot_mapping != nullptr && params.slot_mapping[text.row] < 0) text.entry = -1;
  text.conv_size = static_cast<int>(2 * params.num_key_heads * params.key_dim +
                                    params.num_value_heads * params.value_dim);
  text.kept_size = text.conv_size + 2 * static_cast<int>(params.num_value_heads);
  text.qkvz = static_cast<const T*>(params.qkvz) + (text.row - text.first) * params.qkvz_stride;
  text.ba = static_cast<const T*>(params.ba) + (text.row - text.first) * params.ba_stride;
  text.kept = static_cast<T*>(params.rows) + text.entry * params.num_kept * text.kept_size;
  if (text.entry < 0) {
    text.oldest = text.applied = text.certain = text.first;
  } else {
    const int held = params.applied[text.entry * params.num_key_heads + key_head];
    const int least = text.first - num_kept + static_cast<int>(kMaxDeltaTaps);
    text.applied = text.first > 0 ? min(max(held, least), text.first) : 0;
    text.certain = min(max(text.certain, text.applied), text.end);
    // Without an output S may follow later, as long as the rows after it are kept.
    if (fills && text.certain - text.applied <= num_kept / 4) text.certain = text.applied;
  }
  text.stop = fills ? text.certain : text.end;
  return text;
}

__device__ __forceinline__ float delta_silu(float x) { return x / (1.0f + expf(-x)); }

// Element f of each position's vectors, [kChunk, kFeatures]: the convolution of a feature of q, k
// or v with SiLU, or the norm's weight times SiLU of z.
template <typename T, int kKeys, int kValues>
__device__ __forceinline__ void convolve_delta(const GatedDeltaParams& params,
                                               const DeltaText<T>& text, int begin, int count,
                                               int key_head, int value_head, int f,
                                               const Shared<float>& vectors) {
  using Sizes = DeltaSizes<kKeys, kValues>;
  constexpr int kTaps = static_cast<int>(kMaxDeltaTaps);
  const bool is_value = f >= 2 * kKeys, is_gate = f >= 2 * kKeys + kValues;
  const int at = is_value ? f % kValues : f % kKeys;
  const int second = is_value ? is_gate : f >= kKeys;  // k after q, or z after v
  const int size = static_cast<int>(is_value ? params.value_dim : params.key_dim);
  const int num_heads = static_cast<int>(is_value ? params.num_value_heads : params.num_key_heads);
  const int key_size = static_cast<int>(params.num_key_heads * params.key_dim);
  const bool exists = at < size;
  const int feature = (is_value ? 2 * key_size : 0) +
                      (second * num_heads + (is_value ? value_head : key_head)) * size + at;
  const int num_taps = is_gate ? 1 : static_cast<int>(params.num_taps);
  const int oldest = is_gate ? text.first : text.oldest;
  float factor = 1.0f, taps[kTaps];
  if (is_gate && exists) factor = to_float(static_cast<const T*>(params.norm)[at]);
#pragma unroll
  for (int j = 0; j < kTaps; ++j) {
    const int tap = j - (kTaps - num_taps);
    taps[j] = 1.0f;
    if (!is_gate && exists && tap >= 0) {
      taps[j] = to_float(static_cast<const T*>(params.taps)[tap * text.conv_size + feature]);
    }
  }
  // The inputs of some positions are in flight together. They end with the last position's.
#pragma unroll 1
  for (int done = 0; done < count; done += Sizes::kTogether) {
    float inputs[Sizes::kTogether + kTaps - 1];
#pragma unroll
    for (int j = 0; j < Sizes::kTogether + kTaps - 1; ++j) {
      const int position = begin + done + j - (kTaps - 1);
      const bool is_read =
          exists && position >= oldest && position < begin + count && j >= kTaps - num_taps;
      inputs[j] = is_read ? text.input(params, position, feature) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < Sizes::kTogether; ++i) {
      if (done + i >= count) break;
      float sum = 0.0f;
#pragma unroll
      for (int j = 0; j < kTaps; ++j) {
        if (j >= kTaps - num_taps) sum = fmaf(taps[j], inputs[i + j], sum);
      }
      vectors[(done + i) * Sizes::kFeatures + f] = delta_silu(sum) * factor;
    }
  }
}

// Scales a vector of kSize numbers to a length; a warp calls it.
template <int kSize>
__device__ __forceinline__ void set_delta_length(const Shared<float>& vector, float length) {
  float x[kSize / 32], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kSize / 32; ++j) {
    x[j] = vector[j * 32 + static_cast<int>(threadIdx.x) % 32];
    squares = fmaf(x[j], x[j], squares);
  }
  const float scale = length / sqrtf(reduce_lanes(squares) + 1e-6f);
#pragma unroll
  for (int j = 0; j < kSize / 32; ++j) {
    vector[j * 32 + static_cast<int>(threadIdx.x) % 32] = x[j] * scale;
  }
}

// The sum of an element over the parts of the key features, [kParts, kValues].
template <int kKeys, int kValues>
__device__ __forceinline__ float sum_of_parts(const Shared<float>& parts, int column) {
  float sum = parts[column];
#pragma unroll
  for (int part = 1; part < DeltaSizes<kKeys, kValues>::kParts; ++part) {
    sum += parts[part * kValues + column];
  }
  return sum;
}

// Writes a head's output of a row: what it read, normed, times the gate [kValues]; a warp calls it.
template <typename T, int kKeys, int kValues>
__device__ __forceinline__ void put_delta_row(const GatedDeltaParams& params, int row,
                                              int value_head, const Shared<float>& parts,
                                              const Shared<float>& gate) {
  const int lane = threadIdx.x % 32, size = static_cast<int>(params.value_dim);
  float read[kValues / 32], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kValues / 32; ++j) {
    const int column = j * 32 + lane;
    read[j] = column < size ? sum_of_parts<kKeys, kValues>(parts, column) : 0.0f;
    squares = fmaf(read[j], read[j], squares);
  }
  const float mean = reduce_lanes(squares) / static_cast<float>(size);
  const float scale = 1.0f / sqrtf(mean + params.eps);
  T* out = static_cast<T*>(params.out) + int64_t{row} * params.out_stride + value_head * size;
#pragma unroll
  for (int j = 0; j < kValues / 32; ++j) {
    const int column = j * 32 + lane;
    if (column < size) out[column] = from_float<T>(read[j] * scale * gate[column]);
  }
}

// Keeps the inputs of a key head and of its value heads of the call's last rows, and the number of
// positions in S. All threads of the block call it; no other block reads or writes them any more.
template <typename T>
__device__ __forceinline__ void keep_delta_rows(const GatedDeltaParams& params,
                                                const DeltaText<T>& text, int key_head,
                                                int num_threads) {
  __syncthreads();  // all threads have read what was kept before
  if (text.entry < 0) return;
  const int num_key_heads = static_cast<int>(params.num_key_heads);
  const int num_value_heads = static_cast<int>(params.num_value_heads);
  const int group = num_value_heads / num_key_heads, key_dim = static_cast<int>(params.key_dim);
  const int value_dim = static_cast<int>(params.value_dim), values = group * value_dim;
  const auto value_head = [&](int i) {
    return params.has_tiled_heads ? i * num_key_heads + key_head : key_head * group + i;
  };
  const int first = max(max(text.first, text.end - static_cast<int>(params.num_kept)), 0);
  for (int f = threadIdx.x; f < 2 * key_dim + values + 2 * group; f += num_threads) {
    const bool is_gate = f >= 2 * key_dim + values;
    int feature;
    if (f < 2 * key_dim) {
      const int second = f >= key_dim;
      feature = (second * num_key_heads + key_head - second) * key_dim + f;
    } else if (!is_gate) {
      const int i = (f - 2 * key_dim) / value_dim;
      feature = 2 * num_key_heads * key_dim + (value_head(i) - i) * value_dim + f - 2 * key_dim;
    } else {
      const int gate = f - 2 * key_dim - values, second = gate >= group;
      feature = second * num_value_heads + value_head(gate - second * group);
    }
    const int64_t stride = is_gate ? params.ba_stride : params.qkvz_stride;
    const T* from = (is_gate ? text.ba : text.qkvz) + feature;
    if (is_gate) feature += text.conv_size;
#pragma unroll 4
    for (int position = first; position < text.end; ++position) {
      text.kept_row(params, position)[feature] = from[position * stride];
    }
  }
  if (threadIdx.x == 0) {
    params.applied[text.entry * params.num_key_heads + key_head] = text.certain;
  }
}

// What positions begin .. begin + count - 1 need: their vectors, [kChunk, kFeatures], with queries
// and keys of their lengths, and beta and decay of each, [kChunk, 2]. All threads of the block call
// it.
template <typename T, int kKeys, int kValues>
__device__ __forceinline__ void prepare_delta(const GatedDeltaParams& params,
                                              const DeltaText<T>& text, int begin, int count,
                                              int key_head, int value_head,
                                              const Shared<float>& vectors,
                                              const Shared<float>& factors) {
  using Sizes = DeltaSizes<kKeys, kValues>;
  constexpr int kThreads = Sizes::kThreads, kFeatures = Sizes::kFeatures;
  const int thread = threadIdx.x, num_value_heads = static_cast<int>(params.num_value_heads);
  float b = 0.0f, a = 0.0f;  // they arrive while the convolution is computed
  if (thread < count) {
    b = text.gate(params, begin + thread, value_head);
    a = text.gate(params, begin + thread, num_value_heads + value_head);
  }
  for (int f = thread; f < kFeatures; f += kThreads) {
    convolve_delta<T, kKeys, kValues>(params, text, begin, count, key_head, value_head, f, vectors);
  }
  if (thread < count) {
    const float x = a + params.dt_bias[value_head];
    const float softplus = x > 20.0f ? x : log1pf(expf(x));
    factors[2 * thread] = 1.0f / (1.0f + expf(-b));
    factors[2 * thread + 1] = expf(-expf(params.log_rate[value_head]) * softplus);
  }
  __syncthreads();
  const float query_length = 1.0f / sqrtf(static_cast<float>(params.key_dim));
  for (int v = thread / 32; v < 2 * count; v += kThreads / 32) {
    set_delta_length<kKeys>(vectors + v / 2 * kFeatures + v % 2 * kKeys,
                            v % 2 == 0 ? query_length : 1.0f);
  }
  __syncthreads();
}

// A part of S^T key of a column.
template <int kPartKeys>
__device__ __forceinline__ float multiply_delta(const float (&state)[kPartKeys],
                                                const Shared<float>& key) {
  float sum = 0.0f;
#pragma unroll
  for (int j = 0; j < kPartKeys; j += 4) {
    const Pack<float> keys = shared_load16(key + j);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum = fmaf(state[j + e], keys.values[e], sum);
  }
  return sum;
}

// S = decay * S + key * delta for a part of a column, and its part of S^T query.
template <int kPartKeys>
__device__ __forceinline__ float update_delta(float (&state)[kPartKeys], const Shared<float>& key,
                                              const Shared<float>& query, float decay,
                                              float delta) {
  float read = 0.0f;
#pragma unroll
  for (int j = 0; j < kPartKeys; j += 4) {
    const Pack<float> keys = shared_load16(key + j), queries = shared_load16(query + j);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      state[j + e] = fmaf(keys.values[e], delta, decay * state[j + e]);
      read = fmaf(state[j + e], queries.values[e], read);
    }
  }
  return read;
}

// Grid: (num_seqs, num_value_heads). A value head that has its key head for itself keeps its rows;
// otherwise keep_delta_rows_kernel does, when no block reads them any more.
template <typename T, int kKeys, int kValues>
__global__ void __launch_bounds__(DeltaSizes<kKeys, kValues>::kThreads,
                                  DeltaSizes<kKeys, kValues>::kBlocks)
    gated_delta_kernel(GatedDeltaParams params) {
  using Sizes = DeltaSizes<kKeys, kValues>;
  constexpr int kThreads = Sizes::kThreads, kChunk = Sizes::kChunk, kFeatures = Sizes::kFeatures;
  constexpr int kPartKeys = Sizes::kPartKeys, kTile = static_cast<int>(kDeltaTile);
  EECORE_SHARED(float, vectors, kChunk* kFeatures);
  EECORE_SHARED(float, factors, kChunk * 2);
  EECORE_SHARED(float, products, 2 * kThreads);   // parts of S^T k, of two positions in turn
  EECORE_SHARED(float, reads, kChunk* kThreads);  // parts of S^T q
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int group = static_cast<int>(params.num_value_heads / params.num_key_heads);
  const int value_head = blockIdx.y;
  const int key_head = params.has_tiled_heads ? value_head % static_cast<int>(params.num_key_heads)
                                              : value_head / group;
  const auto text = delta_text<T>(params, blockIdx.x, key_head);
  if (text.first == text.end) return;

  // This thread's part of S, of a column of a tile. A text that begins with the call begins with 0.
  const int thread = threadIdx.x, column = thread % kValues, key_dim = params.key_dim;
  const int first_key = thread / kValues * kPartKeys;
  const int num_tiles = static_cast<int>((params.value_dim + kTile - 1) / kTile);
  const bool has_column = column < num_tiles * kTile, begins = text.first <= 0;
  const int num_keys = has_column && text.entry >= 0 ? min(key_dim - first_key, kPartKeys) : 0;
  const int64_t tile =
      (text.entry * params.num_value_heads + value_head) * num_tiles + column / kTile;
  float* kept = params.state + (tile * key_dim + first_key) * kTile + column % kTile;
  float state[kPartKeys];
#pragma unroll
  for (int j = 0; j < kPartKeys; ++j) {
    state[j] = j < num_keys && !begins ? kept[j * kTile] : 0.0f;
  }
  for (int j = 0; j < num_keys && begins; ++j) kept[j * kTile] = 0.0f;

  for (int begin = text.applied; begin < text.stop; begin += kChunk) {
    const int count = min(kChunk, text.stop - begin);
    prepare_delta<T, kKeys, kValues>(params, text, begin, count, key_head, value_head, vectors,
                                     factors);
    for (int i = 0; i < count; ++i) {
      const Shared<float> query = vectors + i * kFeatures + first_key, key = query + kKeys;
      const Shared<float> parts = products + i % 2 * kThreads;
      if (has_column) parts[thread] = multiply_delta(state, key);
      __syncthreads();  // the parts of the position before the previous one have also been read
      if (!has_column) continue;
      const float beta = factors[2 * i], decay = factors[2 * i + 1];
      const float value = vectors[i * kFeatures + 2 * kKeys + column];
      const float delta = beta * (value - decay * sum_of_parts<kKeys, kValues>(parts, column));
      reads[i * kThreads + thread] = update_delta(state, key, query, decay, delta);
      if (begin + i + 1 != text.certain) continue;
#pragma unroll
      for (int j = 0; j < kPartKeys; ++j) {
        if (j < num_keys) kept[j * kTile] = state[j];
      }
    }
    __syncthreads();
    for (int i = thread / 32; i < count && params.out != nullptr; i += kThreads / 32) {
      if (begin + i < text.first) continue;
      put_delta_row<T, kKeys, kValues>(params, text.row + begin + i - text.first, value_head,
                                       reads + i * kThreads,
                                       vectors + i * kFeatures + 2 * kKeys + kValues);
    }
    __syncthreads();  // vectors and reads have been read
  }
  if (group == 1) keep_delta_rows<T>(params, text, key_head, kThreads);
}

// Grid: (num_seqs, num_key_heads).
template <typename T>
__global__ void __launch_bounds__(kDeltaKeepThreads)
    keep_delta_rows_kernel(GatedDeltaParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int key_head = blockIdx.y;
  const auto text = delta_text<T>(params, blockIdx.x, key_head);
  if (text.first != text.end) keep_delta_rows<T>(params, text, key_head, kDeltaKeepThreads);
}

}  // namespace eecore::cuda
