// The one place that starts a kernel: device guard, launch, launch check.
#pragma once

#include <cuda_runtime.h>

#include "eecore/cuda_check.h"
#include "launch.h"

namespace eecore::cuda {

// Makes `device` current for its lifetime.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (previous_ != device) check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = previous_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool changed_ = false;
};

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
};

// Starts `kernel` on `stream`; a refused launch throws with the kernel's name.
template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), LaunchShape shape, Stream stream,
            Args... args) {
  DeviceGuard guard(stream.device);
  kernel<<<shape.grid, shape.block, shape.shared_bytes, static_cast<cudaStream_t>(stream.handle)>>>(
      args...);
  check_cuda(cudaGetLastError(), name);
}

}  // namespace eecore::cuda
