// Waits for a ring of copies in shared memory whose number of stages is known only at run time.
#pragma once

#include "eecore/ptx.cuh"

namespace eecore::cuda {

constexpr int kMaxPendingCopies = 4;

// Waits until at most `pending` (0 to kMaxPendingCopies) of this thread's newest groups of copies
// are in flight.
__device__ __forceinline__ void cp_async_wait_all_but(int pending) {
  switch (pending) {
    case 0:
      return cp_async_wait<0>();
    case 1:
      return cp_async_wait<1>();
    case 2:
      return cp_async_wait<2>();
    case 3:
      return cp_async_wait<3>();
    default:
      return cp_async_wait<kMaxPendingCopies>();
  }
}

}  // namespace eecore::cuda
