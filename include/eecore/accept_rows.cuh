// Sticky acceptance by one block, which walks a batch's rows in chunks of its size; survivors keep
// their order. accept_mask consists of this alone; kernels that measure confidences may end with
// it.
#pragma once

#include "eecore/params.h"
#include "eecore/shared.cuh"

namespace eecore::cuda {

// Accepts the rows of the whole batch. All threads of the one block call it, which are whole warps;
// the caller orders what they wrote before.
__device__ __forceinline__ void accept_rows(const AcceptMaskParams& params) {
  constexpr int kMaxWarps = 32;
  EECORE_SHARED(int, survivors_per_warp, kMaxWarps);

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int num_threads = static_cast<int>(blockDim.x);
  const int num_warps = num_threads / 32;
  int num_survivors = 0;  // the same in every thread
  for (int64_t first_row = 0; first_row < params.num_seqs; first_row += num_threads) {
    // Sticky status of this thread's row.
    const int64_t row = first_row + threadIdx.x;
    bool survives = false;
    if (row < params.num_seqs) {
      // False for NaN on either side; at a threshold of 1 a row never exits early.
      const float threshold = params.thresholds[row];
      const bool confident = threshold < 1.0f && params.confidence[row] >= threshold;
      bool accepted = params.status[row] != 0;
      if (confident && !accepted) {
        accepted = true;
        params.status[row] = 1;
        params.exit_layer[row] = params.layer;
      }
      survives = !accepted;
    }

    // Rank among the survivors: within the warp by vote, across warps through shared memory.
    const unsigned votes = __ballot_sync(0xffffffffu, survives);
    const int rank_in_warp = __popc(votes & ((1u << lane) - 1u));
    if (lane == 0) survivors_per_warp[warp] = __popc(votes);
    __syncthreads();
    int before = num_survivors;
    for (int other = 0; other < num_warps; ++other) {
      if (other < warp) before += survivors_per_warp[other];
      num_survivors += survivors_per_warp[other];
    }
    if (survives) params.survivors[before + rank_in_warp] = static_cast<int32_t>(row);
    __syncthreads();  // all threads read the counts before the next chunk writes them
  }

  // Fills up the list after the survivors, and writes the count and the flag.
  for (int64_t i = num_survivors + threadIdx.x; i < params.num_seqs; i += num_threads) {
    params.survivors[i] = -1;
  }
  if (threadIdx.x == 0) {
    *params.num_survivors = num_survivors;
    *params.all_accepted = num_survivors == 0;
  }
}

}  // namespace eecore::cuda
