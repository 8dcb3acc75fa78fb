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

enum class Launch {
  kInOrder,        // starts when the kernels before it have ended
  kAfterPrevious,  // may start early; waits inside, with wait_for_previous_kernel
};

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  Launch order = Launch::kInOrder;
};

// Dynamic shared memory that a block may have without asking.
constexpr size_t kPlainSharedBytes = 48 * 1024;

// Starts `kernel` on `stream`; a refused launch throws with the kernel's name. An empty grid is no
// launch.
template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchShape& shape, Stream stream,
            const Args&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  DeviceGuard guard(stream.device);
  if (shape.shared_bytes > kPlainSharedBytes) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shape.shared_bytes)),
               name);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  if (shape.order == Launch::kAfterPrevious && device_properties(stream.device).capability >= 90) {
    config.attrs = &early;
    config.numAttrs = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, Params(args)...), name);
}

// How many blocks of `kernel` fit on the device at a time, at least one for each multiprocessor.
template <typename... Params>
int64_t resident_blocks(void (*kernel)(Params...), int threads, size_t shared_bytes, int device) {
  DeviceGuard guard(device);
  const void* function = reinterpret_cast<const void*>(kernel);
  if (shared_bytes > kPlainSharedBytes) {
    check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(shared_bytes)),
               "cudaFuncSetAttribute");
  }
  int blocks = 0;
  check_cuda(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, threads, shared_bytes),
      "cudaOccupancyMaxActiveBlocksPerMultiprocessor");
  return int64_t{blocks > 0 ? blocks : 1} * device_properties(device).num_multiprocessors;
}

}  // namespace eecore::cuda
