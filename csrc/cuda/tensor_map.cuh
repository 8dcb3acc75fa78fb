// Maps of tensors in global memory, which tensor_copy of eecore/ptx.cuh copies boxes of.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "eecore/cuda_check.h"

namespace eecore::cuda {

// The driver's cuTensorMapEncodeTiled; eecore is not linked to the driver.
inline auto tensor_map_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
  check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                              cudaEnableDefault, &found),
             "cudaGetDriverEntryPointByVersion");
#else
  check_cuda(
      cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found),
      "cudaGetDriverEntryPoint");
#endif
  if (found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error("expected a driver with cuTensorMapEncodeTiled (CUDA 12), got " +
                             std::to_string(static_cast<int>(found)));
  }
  return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

// All sizes are those of the innermost dimension first.
template <int kRank>
struct TensorBoxes {
  uint64_t sizes[kRank];
  uint64_t strides[kRank - 1];  // bytes, of all dimensions but the innermost: multiples of 16
  uint32_t box[kRank];          // elements that are copied at a time
};

// The map of 1 or 2-byte elements. Boxes lie in shared memory row by row, or as Swizzle::k128Bytes
// says: then they have 128 bytes of the innermost dimension.
template <int kRank>
CUtensorMap tensor_map(const void* data, int element_bytes, const TensorBoxes<kRank>& of,
                       bool is_swizzled = true) {
  static_assert(kRank >= 2 && kRank <= 4);
  static const auto encode = tensor_map_encoder();
  CUtensorMap map{};
  const uint32_t element_strides[4] = {1, 1, 1, 1};
  const CUresult status = encode(
      &map, element_bytes == 1 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
      kRank, const_cast<void*>(data), of.sizes, of.strides, of.box, element_strides,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      is_swizzled ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " +
                             std::to_string(static_cast<int>(status)));
  }
  return map;
}

}  // namespace eecore::cuda
