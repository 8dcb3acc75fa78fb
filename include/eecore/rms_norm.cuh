// Rows of x in the format that the skinny products read: normed if there is a norm weight, at
// multiples of 16 bytes and padded with zeros to whole chunks.
#pragma once

#include "eecore/element.cuh"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kRmsNormThreads = 256;

template <typename T>
__device__ __forceinline__ void add_squares(const Pack<T>& pack, float& squares) {
  float values[Pack<T>::kSize];
  to_floats(pack, values);
#pragma unroll
  for (int i = 0; i < Pack<T>::kSize; ++i) squares = fmaf(values[i], values[i], squares);
}

// 1 / rms of a row whose squares sum to `squares`.
__device__ __forceinline__ float inverse_rms(float squares, int size, float eps) {
  return 1.0f / sqrtf(squares / static_cast<float>(size) + eps);
}

// 1 / sqrt(mean(x^2) + eps) of x: [size]; all threads of the block call it.
template <typename T>
__device__ __forceinline__ float inverse_rms(const T* x, int64_t size, bool aligned, float eps) {
  constexpr int kSize = Pack<T>::kSize;
  float squares = 0.0f;
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kSize; i < size;
       i += kRmsNormThreads * kSize) {
    add_squares(load_pack(x + i, size - i, aligned), squares);
  }
  return inverse_rms(reduce_block<kRmsNormThreads>(squares), static_cast<int>(size), eps);
}

// weight * T(x * scale), rounded to T.
template <typename T>
__device__ __forceinline__ void scale_pack(Pack<T>& x, const Pack<T>& weight, float scale) {
#pragma unroll
  for (int i = 0; i < Pack<T>::kSize; ++i) {
    const float scaled = rounded<T>(to_float(x.values[i]) * scale);
    x.values[i] = from_float<T>(to_float(weight.values[i]) * scaled);
  }
}

// out: [padded_size], x times scale, then zeros; without a weight, a copy of x.
template <typename T>
__device__ __forceinline__ void scale_row(const T* x, const T* weight, float scale, int64_t size,
                                          bool x_aligned, bool weight_aligned, int64_t padded_size,
                                          T* out) {
  constexpr int kSize = Pack<T>::kSize;
  constexpr int kBatch = 4;  // packs whose loads are in flight together
  constexpr int kStep = kRmsNormThreads * kSize;
  for (int64_t first = static_cast<int64_t>(threadIdx.x) * kSize; first < padded_size;
       first += kBatch * kStep) {
    Pack<T> packs[kBatch], factors[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t i = first + j * kStep, count = i < size ? size - i : 0;
      packs[j] = load_pack(x + i, count, x_aligned);
      if (weight != nullptr) factors[j] = load_pack(weight + i, count, weight_aligned);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int64_t i = first + j * kStep;
      if (i >= padded_size) break;
      if (weight != nullptr) scale_pack(packs[j], factors[j], scale);
      store16(out + i, packs[j]);
    }
  }
}

struct RmsNormRows {
  const void* x;            // [num_rows, size], row stride x_stride
  const void* norm_weight;  // [size]; may be null: rows are copied as they are
  void* out;                // [num_rows, padded_size]
  int64_t size, padded_size, x_stride;
  float eps;
  bool x_aligned, weight_aligned;
};

// Does what scale_row does, with or without a norm, for rows of at most kMaxKept packs per thread:
// the packs stay in registers, and all loads are in flight together. kWhole: loads of 16 bytes.
constexpr int kMaxKept = 4;
template <bool kWhole, typename T>
__device__ __forceinline__ void norm_kept_row(const RmsNormRows& params, const T* x, T* out) {
  constexpr int kSize = Pack<T>::kSize, kStep = kRmsNormThreads * kSize;
  const bool is_normed = params.norm_weight != nullptr;
  const T* weight = is_normed ? static_cast<const T*>(params.norm_weight) : x;
  const int size = static_cast<int>(params.size);
  const int padded_size = static_cast<int>(params.padded_size);
  const int first = static_cast<int>(threadIdx.x) * kSize;
  const auto load = [&](const T* row, int i) {
    if constexpr (kWhole) {
      return i < size ? load16(reinterpret_cast<const uint32_t*>(row + i)) : Words{};
    } else {
      return load_words(row + i, size - i, params.x_aligned && params.weight_aligned);
    }
  };
  Words words[kMaxKept], factors[kMaxKept];
#pragma unroll
  for (int j = 0; j < kMaxKept; ++j) {
    words[j] = load(x, first + j * kStep);
    factors[j] = load(weight, first + j * kStep);
  }
  float scale = 1.0f;
  if (is_normed) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kMaxKept; ++j) add_squares(elements_of<T>(words[j]), squares);
    scale = inverse_rms(reduce_block<kRmsNormThreads>(squares), size, params.eps);
  }
#pragma unroll
  for (int j = 0; j < kMaxKept; ++j) {
    const int i = first + j * kStep;
    if (i >= padded_size) break;
    Pack<T> pack = elements_of<T>(words[j]);
    if (is_normed) scale_pack(pack, elements_of<T>(factors[j]), scale);
    store16(out + i, pack);
  }
}

// Grid: one block per row.
template <typename T>
__global__ void __launch_bounds__(kRmsNormThreads) rms_norm_kernel(RmsNormRows params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(params.x) + row * params.x_stride;
  T* out = static_cast<T*>(params.out) + row * params.padded_size;
  if (params.padded_size <= kMaxKept * kRmsNormThreads * Pack<T>::kSize) {
    if (params.x_aligned && params.weight_aligned && params.size % Pack<T>::kSize == 0) {
      norm_kept_row<true>(params, x, out);
    } else {
      norm_kept_row<false>(params, x, out);
    }
    return;
  }
  const T* weight = static_cast<const T*>(params.norm_weight);
  float scale = 1.0f;
  if (weight != nullptr) scale = inverse_rms(x, params.size, params.x_aligned, params.eps);
  scale_row(x, weight, scale, params.size, params.x_aligned, params.weight_aligned,
            params.padded_size, out);
}

}  // namespace eecore::cuda
