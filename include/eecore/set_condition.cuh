// Sets the condition of an IF node, from a flag that earlier kernels have written.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace eecore::cuda {

// Grid: one block of one thread.
__global__ void set_condition_kernel(cudaGraphConditionalHandle handle, const uint8_t* flag,
                                     bool when) {
  cudaGraphSetConditional(handle, (*flag != 0) == when ? 1u : 0u);
}

}  // namespace eecore::cuda
