// What the launchers know of a device.
#include <cuda_runtime.h>

#include <mutex>
#include <vector>

#include "eecore/cuda_check.h"
#include "launch.h"

namespace eecore::cuda {
namespace {

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

const DeviceProperties& device_properties(int device) {
  constexpr int kMaxDevices = 64;
  static DeviceProperties known[kMaxDevices];
  static std::once_flag asked[kMaxDevices];
  if (device < 0 || device >= kMaxDevices) {
    throw std::runtime_error("expected a CUDA device of 0 to 63, got " + std::to_string(device));
  }
  std::call_once(asked[device], [device] {
    known[device] = {
        attribute(cudaDevAttrComputeCapabilityMajor, device) * 10 +
            attribute(cudaDevAttrComputeCapabilityMinor, device),
        attribute(cudaDevAttrMultiProcessorCount, device),
        static_cast<size_t>(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device))};
  });
  return known[device];
}

}  // namespace eecore::cuda
