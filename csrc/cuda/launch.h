// Entry points of the CUDA kernels, and the stream they run on. No torch, no CUDA headers: the
// tensor boundary in csrc/ops includes this with the host compiler.
#pragma once

#include "eecore/params.h"

namespace eecore::cuda {

// A cudaStream_t and the device that it belongs to.
struct Stream {
  void* handle;
  int device;
};

void run_accept_mask(const AcceptMaskParams& params, Stream stream);

}  // namespace eecore::cuda
