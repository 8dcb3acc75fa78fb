// place_head: one thread per row.
#pragma once

#include "eecore/place_row.cuh"
#include "eecore/ptx.cuh"

namespace eecore::cuda {

constexpr int kPlaceHeadThreads = 128;

// Grid: ceil(num_selected / kPlaceHeadThreads).
__global__ void __launch_bounds__(kPlaceHeadThreads) place_head_kernel(PlaceHeadParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t j = int64_t{blockIdx.x} * kPlaceHeadThreads + threadIdx.x;
  if (j < params.num_selected) place_row(params, j);
}

}  // namespace eecore::cuda
