// accept_mask: one block, so the survivors' order and the flag need no second pass.
#pragma once

#include "eecore/accept_rows.cuh"
#include "eecore/ptx.cuh"

namespace eecore::cuda {

constexpr int kAcceptMaskThreads = 256;

// Grid: one block of kAcceptMaskThreads.
__global__ void __launch_bounds__(kAcceptMaskThreads) accept_mask_kernel(AcceptMaskParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  accept_rows(params);
}

}  // namespace eecore::cuda
