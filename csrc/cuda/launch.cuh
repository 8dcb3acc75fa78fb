// The only place that starts kernels: device guard, launch, launch check.
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
  kInOrder,        // starts when the earlier kernels have ended
  kAfterPrevious,  // may start early; waits inside, with wait_for_previous_kernel
};

struct LaunchShape {
  dim3 grid;
  dim3 block;
  size_t shared_bytes = 0;
  Launch order = Launch::kInOrder;
};

// Dynamic shared memory that a block may use without a request.
constexpr size_t kPlainSharedBytes = 48 * 1024;

// Allows blocks of `function` this much dynamic shared memory on the current device, `device`. The
// allowance is never reduced: a launch on another thread may be about to use it.
void allow_shared_bytes(const char* name, const void* function, int device, size_t bytes);

// Whether the next launch on a stream may start before the work ahead of it has ended: the GPU
// supports it, and in a graph only kernels are ahead.
bool may_start_early(Stream stream);

// Starts `kernel` on `stream`; a refused launch throws with the kernel's name. An empty grid is not
// launched.
template <typename... Params, typename... Args>
void launch(const char* name, void (*kernel)(Params...), const LaunchShape& shape, Stream stream,
            const Args&... args) {
  if (shape.grid.x == 0 || shape.grid.y == 0 || shape.grid.z == 0) return;
  DeviceGuard guard(stream.device);
  allow_shared_bytes(name, reinterpret_cast<const void*>(kernel), stream.device,
                     shape.shared_bytes);
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream.handle);
  cudaLaunchAttribute early{};
  config.attrs = &early;
  if (shape.order == Launch::kAfterPrevious && may_start_early(stream)) {
    config.numAttrs = 1;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  check_cuda(cudaLaunchKernelEx(&config, kernel, Params(args)...), name);
}

}  // namespace eecore::cuda
