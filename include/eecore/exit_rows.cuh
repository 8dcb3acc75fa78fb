// exit_rows: a block for each row, which touches nothing of the others.
#pragma once

#include "eecore/copy_row.cuh"
#include "eecore/params.h"

namespace eecore::cuda {

constexpr int kExitRowsThreads = 128;

// Grid: num_seqs.
__global__ void __launch_bounds__(kExitRowsThreads) exit_rows_kernel(ExitRowsParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x;
  const bool accepted =
      params.accepted == nullptr || params.accepted[row * params.accepted_stride] != 0;
  const bool leaves = accepted && params.gone[row] == 0;
  __syncthreads();  // all have seen `gone` before it is written
  if (!leaves) return;
  copy_row(static_cast<const char*>(params.hidden) + row * params.hidden_stride,
           static_cast<char*>(params.final_hidden) + row * params.final_hidden_stride,
           params.row_bytes, threadIdx.x, kExitRowsThreads);
  if (threadIdx.x != 0) return;
  params.final_confidence[row] = params.confidence[row];
  if (params.token != nullptr) {
    params.final_token[row] = params.token[row];
    params.final_logprob[row] = params.top_logit[row] - params.logsumexp[row];
  }
  params.exit_layer[row] = params.layer;
  params.gone[row] = 1;
  params.slot_mapping[row] = -1;
  params.seq_lens[row] = 1;
}

}  // namespace eecore::cuda
