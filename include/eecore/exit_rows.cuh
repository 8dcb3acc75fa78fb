// exit_rows: one block, as let_rows_exit requires.
#pragma once

#include "eecore/let_rows_exit.cuh"
#include "eecore/ptx.cuh"

namespace eecore::cuda {

constexpr int kExitRowsThreads = 512;

// Grid: one block of kExitRowsThreads.
__global__ void __launch_bounds__(kExitRowsThreads, 1) exit_rows_kernel(ExitRowsParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  let_rows_exit(params);
}

}  // namespace eecore::cuda
