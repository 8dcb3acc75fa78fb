// CUDA C++ for g++: the names of the language, and launches that the emulator runs at once, or
// records if their stream is captured.
#pragma once

#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>
#include <emulator/device.h>
#include <emulator/graph.h>

#include <cstdlib>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>

struct dim3 {
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}  // NOLINT
  unsigned x, y, z;
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

namespace emulator {

// Dynamic shared memory that each kernel has asked for.
inline std::map<const void*, size_t> allowed_shared_bytes;

// Kernels whose attributes were read, or that were launched outside a capture.
inline std::set<const void*> loaded_kernels;

// "paged_attention_kernel<float, 64>"
inline std::string kernel_name(const void* kernel) {
  Dl_info info;
  if (dladdr(kernel, &info) == 0 || info.dli_sname == nullptr) return "of unknown name";
  int status = 0;
  char* demangled = abi::__cxa_demangle(info.dli_sname, nullptr, nullptr, &status);
  std::string name = status == 0 ? demangled : info.dli_sname;
  std::free(demangled);
  name = name.substr(0, name.find('('));
  if (name.starts_with("void ")) name = name.substr(5);
  const std::string space = "eecore::cuda::";
  for (size_t at; (at = name.find(space)) != std::string::npos;) name.erase(at, space.size());
  return name;
}

}  // namespace emulator

// A lower value than before takes from other threads what they are about to launch with.
inline cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  if (value < 0 || static_cast<size_t>(value) > ::emulator::kMaxDynamicSharedBytes) {
    return cudaErrorInvalidValue;
  }
  size_t& allowed = ::emulator::allowed_shared_bytes[kernel];
  if (static_cast<size_t>(value) < allowed) {
    throw std::runtime_error("kernel " + ::emulator::kernel_name(kernel) + " may have " +
                             std::to_string(value) + " bytes of dynamic shared memory, after " +
                             std::to_string(allowed));
  }
  allowed = static_cast<size_t>(value);
  return cudaSuccess;
}

struct cudaFuncAttributes {};
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, const void* kernel) {
  ::emulator::loaded_kernels.insert(kernel);
  return cudaSuccess;
}

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...),
                               Args&&... args) {
  const void* function = reinterpret_cast<const void*>(kernel);
  const auto allowed = ::emulator::allowed_shared_bytes.find(function);
  const size_t limit =
      allowed == ::emulator::allowed_shared_bytes.end() ? 48 * 1024 : allowed->second;
  if (config->dynamicSmemBytes > limit) return cudaErrorInvalidValue;
  ::emulator::LaunchConfig launch;
  launch.kernel = ::emulator::kernel_name(function);
  launch.grid = {config->gridDim.x, config->gridDim.y, config->gridDim.z};
  launch.block = {config->blockDim.x, config->blockDim.y, config->blockDim.z};
  launch.dynamic_shared_bytes = config->dynamicSmemBytes;
  for (unsigned i = 0; i < config->numAttrs; ++i) {
    launch.starts_early |= config->attrs[i].val.programmaticStreamSerializationAllowed != 0;
  }
  const auto run = [launch, kernel, arguments = std::tuple<Params...>(args...)] {
    ::emulator::launch(launch, [&] { std::apply(kernel, arguments); });
  };
  if (!::emulator::is_recorded(config->stream)) {
    ::emulator::loaded_kernels.insert(function);
    run();
    return cudaSuccess;
  }
  if (::emulator::loaded_kernels.count(function) == 0) {
    throw std::runtime_error("kernel " + launch.kernel + " would be loaded during a capture");
  }
  if (launch.starts_early && !::emulator::follows_kernels(config->stream)) {
    throw std::runtime_error("kernel " + launch.kernel +
                             " may start early behind what is not a kernel");
  }
  ::emulator::record(config->stream, launch.kernel, run);
  return cudaSuccess;
}

inline void cudaGraphSetConditional(cudaGraphConditionalHandle handle, unsigned value) {
  ::emulator::set_condition(handle, value);
}
