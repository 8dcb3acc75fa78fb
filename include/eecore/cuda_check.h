// Turns errors of the CUDA runtime into exceptions that name the call or the kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace eecore::cuda {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                           cudaGetErrorString(status));
}

}  // namespace eecore::cuda
