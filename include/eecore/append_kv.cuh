// append_kv: a few lanes of a warp hold one head of q, k or v in registers, as pairs of packs that
// the rotary embedding mixes; norm and rotary in float32, rounded once on the way out.
#pragma once

#include "eecore/cache_slot.cuh"
#include "eecore/element.cuh"
#include "eecore/float8.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kAppendKvThreads = 128;

// How a head is cut into items of two packs each, which one lane holds. The packs of a rotary item
// are rotary_dim / 2 elements apart; after them come the elements that are not rotated, in two
// halves.
struct HeadItems {
  int head_dim;
  int half;       // of rotary_dim
  int num_pairs;  // rotary items
  int rest_half;  // elements between the two packs of an item that is not rotated

  template <typename T>
  __host__ __device__ static HeadItems of(int64_t head_dim, int64_t rotary_dim) {
    constexpr int kSize = Pack<T>::kSize;
    HeadItems items;
    items.head_dim = static_cast<int>(head_dim);
    items.half = static_cast<int>(rotary_dim / 2);
    items.num_pairs = (items.half + kSize - 1) / kSize;
    const int rest = items.head_dim - 2 * items.half;
    items.rest_half = ((rest + 1) / 2 + kSize - 1) / kSize * kSize;
    return items;
  }
  template <typename T>
  __host__ __device__ int count() const {
    return num_pairs + rest_half / Pack<T>::kSize;
  }
};

// Where the two packs of one item start, and how many elements of each exist.
struct HeadItem {
  int first, first_count;
  int second, second_count;
  bool is_rotary;
};

template <typename T>
__device__ __forceinline__ HeadItem head_item(const HeadItems& items, int index) {
  constexpr int kSize = Pack<T>::kSize;
  HeadItem item;
  item.is_rotary = index < items.num_pairs;
  if (item.is_rotary) {
    item.first = index * kSize;
    item.second = items.half + item.first;
    item.first_count = item.second_count = items.half - item.first;
  } else {
    const int offset = (index - items.num_pairs) * kSize;
    item.first = 2 * items.half + offset;
    item.second = item.first + items.rest_half;
    item.first_count = items.head_dim - item.first;
    item.second_count = items.head_dim - item.second;
    if (item.first_count > items.rest_half - offset) item.first_count = items.rest_half - offset;
  }
  return item;
}

__device__ __forceinline__ bool is_aligned16(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % 16 == 0;
}

// The head of a thread, and the thread's place among the lanes that hold the head.
struct AppendLane {
  int64_t head;  // of q, then of k, then of v
  int lane, num_lanes;
};

// 1 / rms over all heads of a token; below 0: each head has its own.
struct HeadScales {
  float q, k;
};

// Appends a token's heads. A head is held by a power of two of at most 32 lanes, kItems items each.
// C: the element type of the caches, T or float8.
template <typename T, int kItems, typename C>
__device__ __forceinline__ void append_heads(const AppendKvParams& params, const HeadItems& items,
                                             int64_t token, const AppendLane& at,
                                             const HeadScales& of_all) {
  constexpr int kSize = Pack<T>::kSize;
  constexpr bool kNarrows = !std::is_same_v<T, C>;

  // This thread's head: where it is read, where it is written and what is applied to it.
  const int64_t slot = params.slot_mapping[token];
  const float* cos_sin = params.rotary_dim > 0
                             ? params.cos_sin + params.positions[token] * params.rotary_dim
                             : nullptr;
  const int64_t q_head = at.head;
  const int64_t k_head = q_head - params.num_q_heads;
  const int64_t v_head = k_head - params.num_kv_heads;
  const T* in = nullptr;  // stays null where there is no head or nothing to do for it
  T* out = nullptr;
  Float8* narrow_out = nullptr;  // the destination instead, for float8
  float factor = 1.0f;
  const T* weight = nullptr;
  float scale = -1.0f;  // 1 / rms over all heads, where they are normed at once
  if (k_head < 0) {
    weight = static_cast<const T*>(params.q_norm_weight);
    if (params.norms_all_q) weight += q_head * params.head_dim;
    scale = of_all.q;
    if (cos_sin != nullptr && params.q_cos_sin != nullptr) {
      cos_sin = params.q_cos_sin + params.positions[token] * params.rotary_dim;
    }
    if (weight != nullptr || cos_sin != nullptr) {
      out =
          static_cast<T*>(params.q) + token * params.q_token_stride + q_head * params.q_head_stride;
      in = out;
    }
  } else if (slot >= 0 && v_head < 0) {
    weight = static_cast<const T*>(params.k_norm_weight);
    if (params.norms_all_k) weight += k_head * params.head_dim;
    scale = of_all.k;
    in = static_cast<const T*>(params.k) + token * params.k_token_stride +
         k_head * params.k_head_stride;
    const int64_t to =
        cache_offset(params.k_cache_strides, cache_slot(slot, params.page_size), k_head);
    if constexpr (kNarrows) {
      narrow_out = static_cast<Float8*>(params.k_cache) + to;
      factor = float8_factor(params.cache_format.key_scales, k_head);
    } else {
      out = static_cast<T*>(params.k_cache) + to;
    }
  } else if (slot >= 0 && v_head < params.num_kv_heads) {
    cos_sin = nullptr;
    in = static_cast<const T*>(params.v) + token * params.v_token_stride +
         v_head * params.v_head_stride;
    const int64_t to =
        cache_offset(params.v_cache_strides, cache_slot(slot, params.page_size), v_head);
    if constexpr (kNarrows) {
      narrow_out = static_cast<Float8*>(params.v_cache) + to;
      factor = float8_factor(params.cache_format.value_scales, v_head);
    } else {
      out = static_cast<T*>(params.v_cache) + to;
    }
  }
  const bool is_whole = items.half % kSize == 0;  // every pack starts on a multiple of its size
  const bool in_aligned = is_whole && is_aligned16(in);
  const bool out_aligned = is_whole && is_aligned16(out);
  const bool weight_aligned = is_whole && is_aligned16(weight);
  const bool cos_sin_aligned = is_whole && is_aligned16(cos_sin);

  // The head, and all factors of its elements, in registers.
  constexpr int kQuads = kSize / Pack<float>::kSize;
  HeadItem item[kItems];
  Pack<T> first[kItems], second[kItems], first_weight[kItems], second_weight[kItems];
  Pack<float> cosine[kItems][kQuads], sine[kItems][kQuads];
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    const int index = at.lane + i * at.num_lanes;
    item[i] = head_item<T>(items, index);
    if (in == nullptr || index >= items.count<T>()) {
      item[i].first_count = item[i].second_count = 0;
    }
    first[i] = load_pack(in + item[i].first, item[i].first_count, in_aligned);
    second[i] = load_pack(in + item[i].second, item[i].second_count, in_aligned);
    if (weight != nullptr) {
      first_weight[i] = load_pack(weight + item[i].first, item[i].first_count, weight_aligned);
      second_weight[i] = load_pack(weight + item[i].second, item[i].second_count, weight_aligned);
    }
    item[i].is_rotary = item[i].is_rotary && cos_sin != nullptr;
    if (!item[i].is_rotary) continue;
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) {
      const int offset = quad * Pack<float>::kSize;
      const float* from = cos_sin + item[i].first + offset;
      const int count = item[i].first_count - offset;
      cosine[i][quad] = load_pack(from, count, cos_sin_aligned);
      sine[i][quad] = load_pack(from + items.half, count, cos_sin_aligned);
    }
  }

  // 1 / rms of the head. Every lane of the warp takes part, also lanes whose head has no norm.
  if (params.q_norm_weight != nullptr || params.k_norm_weight != nullptr) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const float x = to_float(first[i].values[j]), y = to_float(second[i].values[j]);
        squares = fmaf(x, x, squares);
        squares = fmaf(y, y, squares);
      }
    }
    for (int distance = at.num_lanes / 2; distance > 0; distance /= 2) {
      squares += __shfl_xor_sync(kWholeWarp, squares, distance);
    }
    const float of_head = rsqrtf(squares / static_cast<float>(params.head_dim) + params.eps);
    if (scale < 0.0f) scale = of_head;
  }

  // Norm, rotary and store; a head with neither is copied bit by bit.
#pragma unroll
  for (int i = 0; i < kItems; ++i) {
    if (weight != nullptr || item[i].is_rotary || (kNarrows && narrow_out != nullptr)) {
      float x[kSize], y[kSize];
      to_floats(first[i], x);
      to_floats(second[i], y);
      if (weight != nullptr) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          x[j] *= scale * to_float(first_weight[i].values[j]);
          y[j] *= scale * to_float(second_weight[i].values[j]);
        }
      }
      if (item[i].is_rotary) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          const float a = x[j], b = y[j];
          const float c = cosine[i][j / 4].values[j % 4], s = sine[i][j / 4].values[j % 4];
          x[j] = fmaf(a, c, -(b * s));
          y[j] = fmaf(b, c, a * s);
        }
      }
      if constexpr (kNarrows) {
        if (narrow_out != nullptr) {
          const bool aligned = is_whole && reinterpret_cast<uintptr_t>(narrow_out) % 4 == 0;
          store_float8(narrow_out + item[i].first, x, factor, item[i].first_count, aligned);
          store_float8(narrow_out + item[i].second, y, factor, item[i].second_count, aligned);
          continue;
        }
      }
      first[i] = from_floats<T>(x);
      second[i] = from_floats<T>(y);
    }
    store_pack(out + item[i].first, first[i], item[i].first_count, out_aligned);
    store_pack(out + item[i].second, second[i], item[i].second_count, out_aligned);
  }
}

// Grid: (num_tokens, heads of q, k and v by the block's rows). Block: (lanes, heads).
template <typename T, int kItems, typename C>
__device__ __forceinline__ void append_some_heads(const AppendKvParams& params,
                                                  const HeadItems& items) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t head = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y;
  append_heads<T, kItems, C>(params, items, blockIdx.x,
                             {head, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x)},
                             {-1.0f, -1.0f});
}

template <typename T, int kItems>
__global__ void __launch_bounds__(kAppendKvThreads)
    append_kv_kernel(AppendKvParams params, HeadItems items) {
  append_some_heads<T, kItems, T>(params, items);
}

template <typename T, int kItems>
__global__ void __launch_bounds__(kAppendKvThreads)
    append_kv_float8_kernel(AppendKvParams params, HeadItems items) {
  append_some_heads<T, kItems, Float8>(params, items);
}

// 1 / rms over num_heads heads, head_stride apart. All threads of the block call it.
template <typename T>
__device__ __forceinline__ float inverse_rms_of_heads(const T* heads, int64_t num_heads,
                                                      int64_t head_stride, int head_dim,
                                                      float eps) {
  const int size = static_cast<int>(num_heads) * head_dim;
  float squares = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kAppendKvThreads) {
    const float x = to_float(heads[i / head_dim * head_stride + i % head_dim]);
    squares = fmaf(x, x, squares);
  }
  squares = reduce_block<kAppendKvThreads>(squares);
  return rsqrtf(squares / static_cast<float>(size) + eps);
}

// For norms over all heads of a token: one block has all of them. Grid: num_tokens. Block:
// kAppendKvThreads, num_lanes of which hold a head.
template <typename T, int kItems, typename C>
__global__ void __launch_bounds__(kAppendKvThreads, 1)
    append_normed_kv_kernel(AppendKvParams params, HeadItems items, int num_lanes) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t token = blockIdx.x;
  const int head_dim = static_cast<int>(params.head_dim);
  HeadScales scales = {-1.0f, -1.0f};
  if (params.norms_all_q && params.num_q_heads > 0) {
    scales.q = inverse_rms_of_heads(static_cast<const T*>(params.q) + token * params.q_token_stride,
                                    params.num_q_heads, params.q_head_stride, head_dim, params.eps);
  }
  if (params.norms_all_k) {
    scales.k =
        inverse_rms_of_heads(static_cast<const T*>(params.k) + token * params.k_token_stride,
                             params.num_kv_heads, params.k_head_stride, head_dim, params.eps);
  }
  const int thread = static_cast<int>(threadIdx.x);
  const int num_heads = static_cast<int>(params.num_q_heads + 2 * params.num_kv_heads);
#pragma unroll 1
  for (int first = 0; first < num_heads; first += kAppendKvThreads / num_lanes) {
    append_heads<T, kItems, C>(params, items, token,
                               {first + thread / num_lanes, thread % num_lanes, num_lanes}, scales);
  }
}

}  // namespace eecore::cuda
