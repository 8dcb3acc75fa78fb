// sigmoid_gate: a block has one head of a row.
#pragma once

#include "eecore/element.cuh"
#include "eecore/params.h"

namespace eecore::cuda {

constexpr int kSigmoidGateThreads = 128;

// Grid: (num_tokens, num_heads).
template <typename T>
__global__ void __launch_bounds__(kSigmoidGateThreads)
    sigmoid_gate_kernel(SigmoidGateParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t token = blockIdx.x, head = blockIdx.y;
  const int64_t at = (token * params.num_heads + head) * params.head_dim;
  const T* x = static_cast<const T*>(params.x) + at;
  const T* gate = static_cast<const T*>(params.gate) + token * params.gate_token_stride +
                  head * params.gate_head_stride;
  T* out = static_cast<T*>(params.out) + at;
  for (int64_t i = threadIdx.x; i < params.head_dim; i += kSigmoidGateThreads) {
    out[i] = from_float<T>(to_float(x[i]) / (1.0f + expf(-to_float(gate[i]))));
  }
}

}  // namespace eecore::cuda
