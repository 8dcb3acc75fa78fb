// The end of a block that has measured all rows of a batch.
#pragma once

#include "eecore/accept_rows.cuh"
#include "eecore/leave_rows.cuh"

namespace eecore::cuda {

// Accepts the rows, or lets them exit, where that is asked for. All threads of the one block call
// it, which are whole warps.
__device__ __forceinline__ void go_on(const AcceptMaskParams& accept, const ExitRowsParams& leave) {
  const bool accepts = accept.num_survivors != nullptr, leaves = leave.all_gone != nullptr;
  if (!accepts && !leaves) return;
  __syncthreads();  // the confidences of all rows are written
  if (accepts) accept_rows(accept);
  if (leaves) leave_rows(leave);
}

}  // namespace eecore::cuda
