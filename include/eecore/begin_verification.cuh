// begin_verification: one block, because the place of a row's tokens depends on the rows before it;
// one thread for each row of a chunk.
#pragma once

#include "eecore/params.h"
#include "eecore/ptx.cuh"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kBeginVerificationThreads = 128;

// Writes the ragged rows of one row, from `at` on.
__device__ __forceinline__ void verify_row(const BeginVerificationParams& params, int64_t row,
                                           int count, int at) {
  const int64_t width = params.num_steps + 1, last = count > 0 ? count - 1 : 0;
  const int64_t* tokens = params.tokens + row * width;
  const int64_t* slots = params.round_slots + row * width;
  const int64_t first_position = params.first_position[row];
  const int64_t length = first_position + count;
  params.last_tokens[row] = count > 0 ? max(tokens[last], int64_t{0}) : 0;
  params.last_positions[row] = count > 0 ? length - 1 : 0;
  params.last_slots[row] = count > 0 ? slots[last] : -1;
  params.last_seq_lens[row] = count > 0 ? static_cast<int32_t>(length) : 1;
  params.seq_lens[row] = count > 0 ? static_cast<int32_t>(length) : 0;
  params.query_start_loc[row] = at;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    params.token_ids[at + k] = max(tokens[k], int64_t{0});  // -1, no token, is not embedded
    params.positions[at + k] = first_position + k;
    params.slot_mapping[at + k] = slots[k];
    params.sequence[at + k] = static_cast<int32_t>(row);
  }
}

// Grid: one block.
__global__ void __launch_bounds__(kBeginVerificationThreads)
    begin_verification_kernel(BeginVerificationParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  constexpr int kWarps = kBeginVerificationThreads / 32;
  EECORE_SHARED(int, count_of_warp, kWarps);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int num_tokens = 0;  // of the chunks before, the same in every thread
  for (int64_t first = 0; first < params.num_rows; first += kBeginVerificationThreads) {
    const int64_t row = first + threadIdx.x;
    int count = 0;
    if (row < params.num_rows && params.most[row] >= 0) {
      count = static_cast<int>(params.num_drafted[row]) + 1;
    }

    // The number of tokens of the rows before: within the warp, then of the warps before.
    int inclusive = count;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const int earlier = __shfl_up_sync(kWholeWarp, inclusive, distance);
      if (lane >= distance) inclusive += earlier;
    }
    if (lane == 31) count_of_warp[warp] = inclusive;
    __syncthreads();
    int at = num_tokens + inclusive - count;
    for (int other = 0; other < kWarps; ++other) {
      if (other < warp) at += count_of_warp[other];
      num_tokens += count_of_warp[other];
    }
    if (row < params.num_rows) verify_row(params, row, count, at);
    __syncthreads();  // all threads read the counts before the next chunk writes them
  }

  if (threadIdx.x == 0) {
    params.query_start_loc[params.num_rows] = num_tokens;
    *params.num_tokens = num_tokens;
  }
  for (int64_t i = num_tokens + threadIdx.x; i < params.max_tokens;
       i += kBeginVerificationThreads) {
    params.token_ids[i] = 0;
    params.positions[i] = 0;
    params.slot_mapping[i] = -1;
    params.sequence[i] = 0;
  }
}

}  // namespace eecore::cuda
