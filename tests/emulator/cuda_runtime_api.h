// The little of the CUDA runtime that csrc/cuda calls, for the emulator.
#pragma once

#include <emulator/machine.h>

#include <cstddef>
#include <cstdint>

using cudaStream_t = void*;

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1 };
inline const char* cudaGetErrorName(cudaError_t status) {
  return status == cudaSuccess ? "cudaSuccess" : "cudaErrorInvalidValue";
}
inline const char* cudaGetErrorString(cudaError_t status) {
  return status == cudaSuccess ? "no error" : "invalid argument";
}
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const int capability = ::emulator::capability();
  switch (which) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = capability / 10;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = capability % 10;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = ::emulator::kNumMultiprocessors;
      break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(::emulator::kMaxDynamicSharedBytes);
      break;
  }
  return cudaSuccess;
}
