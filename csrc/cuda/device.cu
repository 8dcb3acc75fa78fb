// Properties of a device, and requests to it, that the launchers share.
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

#include "capture_calls.h"
#include "eecore/cuda_check.h"
#include "launch.cuh"

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

bool is_captured(Stream stream) {
  DeviceGuard guard(stream.device);
  Capture capture;
  check_cuda(get_capture(static_cast<cudaStream_t>(stream.handle), &capture),
             "cudaStreamGetCaptureInfo");
  return capture.status == cudaStreamCaptureStatusActive;
}

bool may_start_early(Stream stream) {
  if (device_properties(stream.device).capability < 90) return false;
  Capture capture;
  if (get_capture(static_cast<cudaStream_t>(stream.handle), &capture) != cudaSuccess) {
    cudaGetLastError();  // the launch will report the error
    return false;
  }
  if (capture.status != cudaStreamCaptureStatusActive) return true;
  for (size_t i = 0; i < capture.num_dependencies; ++i) {
    cudaGraphNodeType type{};
    check_cuda(cudaGraphNodeGetType(capture.dependencies[i], &type), "cudaGraphNodeGetType");
    if (type != cudaGraphNodeTypeKernel) return false;
  }
  return capture.num_dependencies > 0;
}

void allow_shared_bytes(const char* name, const void* function, int device, size_t bytes) {
  if (bytes <= kPlainSharedBytes) return;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> allowed;
  const std::lock_guard lock(mutex);
  size_t& so_far = allowed[{function, device}];
  if (bytes <= so_far) return;
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                  static_cast<int>(bytes)),
             name);
  so_far = bytes;
}

}  // namespace eecore::cuda
