// Properties of a device, and requests to it, that the launchers share.
#include <cuda_runtime.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string_view>
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

// Applies a setting "name=value".
void tune(std::string_view setting, Tuning& tuning) {
  const auto refuse = [&](const std::string& expected) {
    throw std::runtime_error("EECORE_CUDA_TUNING: expected " + expected + ", got " +
                             std::string(setting));
  };
  const size_t equals = std::min(setting.find('='), setting.size());
  const std::string_view name = setting.substr(0, equals);
  int value = -1;
  const char* const end = setting.data() + setting.size();
  const char* const begin = std::min(setting.data() + equals + 1, end);
  const auto parsed = std::from_chars(begin, end, value);
  const bool is_number = begin < end && parsed.ec == std::errc{} && parsed.ptr == end;
  const auto of = [&](auto& field, int least, int most) {
    if (!is_number || value < least || value > most) {
      refuse(std::string(name) + " of " + std::to_string(least) + " to " + std::to_string(most));
    }
    field = value;
  };
  if (name == "early_start") return of(tuning.early_start, 0, 1);
  if (name == "early_places") return of(tuning.early_places, 0, 1);
  if (name == "early_trigger") return of(tuning.early_trigger, 0, 1);
  if (name == "ring_kib") return of(tuning.ring_kib, 16, 192);
  if (name == "shared_rows") return of(tuning.shared_rows, 8, 32);
  if (name == "wgmma") return of(tuning.wgmma, 0, 1);
  if (name == "wgmma_attention") return of(tuning.wgmma_attention, 0, 1);
  if (name == "wide_attention") return of(tuning.wide_attention, 0, 1);
  refuse(
      "early_start, early_places, early_trigger, ring_kib, shared_rows, wgmma, wgmma_attention or "
      "wide_attention");
}

}  // namespace

Tuning tuning() {
  Tuning tuning;
  const char* const said = std::getenv("EECORE_CUDA_TUNING");
  if (said == nullptr) return tuning;
  for (std::string_view left = said; !left.empty();) {
    const size_t comma = std::min(left.find(','), left.size());
    tune(left.substr(0, comma), tuning);
    left.remove_prefix(std::min(comma + 1, left.size()));
  }
  return tuning;
}

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
  if (!tuning().early_start || device_properties(stream.device).capability < 90) return false;
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
