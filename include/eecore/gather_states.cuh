// gather_states: one block per ragged row; rows from num_tokens on get zeros, because later kernels
// also compute with them.
#pragma once

#include "eecore/copy_row.cuh"
#include "eecore/params.h"

namespace eecore::cuda {

constexpr int kGatherStatesThreads = 128;

// Grid: max_tokens.
__global__ void __launch_bounds__(kGatherStatesThreads)
    gather_states_kernel(GatherStatesParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t token = blockIdx.x;
  char* out = static_cast<char*>(params.out) + token * params.out_stride;
  if (token >= *params.num_tokens) {
    zero_row(out, params.row_bytes, threadIdx.x, kGatherStatesThreads);
    return;
  }
  const int64_t seq = params.sequence[token];
  const int64_t k = token - params.query_start_loc[seq];
  const bool is_last = token + 1 == params.query_start_loc[seq + 1];
  const char* from = is_last ? static_cast<const char*>(params.last) + seq * params.last_stride
                             : static_cast<const char*>(params.states) +
                                   seq * params.states_row_stride + k * params.states_step_stride;
  copy_row(from, out, params.row_bytes, threadIdx.x, kGatherStatesThreads);
}

}  // namespace eecore::cuda
