// The end of a block that has measured all rows of a batch.
#pragma once

#include "eecore/accept_rows.cuh"
#include "eecore/let_rows_exit.cuh"

namespace eecore::cuda {

// Accepts the rows, or lets them exit, where that is asked for. All threads of the one block call
// it, which are whole warps.
__device__ __forceinline__ void go_on(const AcceptMaskParams& accept, const ExitRowsParams& exit) {
  const bool accepts = accept.num_survivors != nullptr, lets_exit = exit.all_exited != nullptr;
  if (!accepts && !lets_exit) return;
  __syncthreads();  // the confidences of all rows are written
  if (accepts) accept_rows(accept);
  if (lets_exit) let_rows_exit(exit);
}

}  // namespace eecore::cuda
