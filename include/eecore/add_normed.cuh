// add_normed: one block per row, which reads the row twice, the second time from the cache.
#pragma once

#include "eecore/params.h"
#include "eecore/rms_norm.cuh"

namespace eecore::cuda {

// Which of the tensors allow 16-byte accesses to their rows.
struct AlignedRows {
  bool x, norm_weight, residual, out;
};

// Grid: num_tokens. Rounds as a model rounds: the norm, its multiple, and the sum.
template <typename T>
__global__ void __launch_bounds__(kRmsNormThreads)
    add_normed_kernel(AddNormedParams params, AlignedRows aligned) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  constexpr int kSize = Pack<T>::kSize;
  const int64_t row = blockIdx.x, size = params.hidden_size;
  const T* x = static_cast<const T*>(params.x) + row * params.x_stride;
  const T* weight = static_cast<const T*>(params.norm_weight);
  const T* residual = static_cast<const T*>(params.residual);
  if (residual != nullptr) residual += row * params.residual_stride;
  T* out = static_cast<T*>(params.out) + row * params.out_stride;
  const float scale = inverse_rms(x, size, aligned.x, params.eps);
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kSize; i < size;
       i += kRmsNormThreads * kSize) {
    Pack<T> given = load_pack(x + i, size - i, aligned.x);
    Pack<T> sum{};
    if (residual != nullptr) sum = load_pack(residual + i, size - i, aligned.residual);
    scale_pack(given, load_pack(weight + i, size - i, aligned.norm_weight), scale);
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      const float multiple = rounded<T>(__fmul_rn(to_float(given.values[j]), params.multiplier));
      sum.values[j] = from_float<T>(to_float(sum.values[j]) + multiple);
    }
    store_pack(out + i, sum, size - i, aligned.out);
  }
}

}  // namespace eecore::cuda
