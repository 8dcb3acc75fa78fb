// exit_rows: one block, as leave_rows requires.
#pragma once

#include "eecore/leave_rows.cuh"
#include "eecore/ptx.cuh"

namespace eecore::cuda {

constexpr int kExitRowsThreads = 512;

// Grid: one block of kExitRowsThreads.
__global__ void __launch_bounds__(kExitRowsThreads, 1) exit_rows_kernel(ExitRowsParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  leave_rows(params);
}

}  // namespace eecore::cuda
