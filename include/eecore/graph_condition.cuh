// Sets the condition of an IF node, from the kernel that knows it.
#pragma once

#include <cuda_runtime.h>

#include "eecore/params.h"

namespace eecore::cuda {

// One thread of the grid calls it.
__device__ __forceinline__ void decide(const GraphCondition& condition, bool holds) {
  if (condition.is_set) cudaGraphSetConditional(condition.handle, holds ? 1u : 0u);
}

}  // namespace eecore::cuda
