// Dispatch from run-time dtypes and sizes to compile-time ones; throws where no kernel is built.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "eecore/params.h"
#include "eecore/ptx.cuh"

namespace eecore::cuda {

template <typename T>
struct TypeTag {
  using type = T;
};

// Calls body(TypeTag<T>{}) for the element type T of `dtype`.
template <typename Body>
void dispatch_dtype(DType dtype, const char* op, Body&& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(TypeTag<float>{});
    case DType::kBFloat16:
      return body(TypeTag<BFloat16>{});
    case DType::kFloat16:
      return body(TypeTag<Float16>{});
  }
  throw std::runtime_error(std::string(op) + ": expected dtype float32, bfloat16 or float16, got " +
                           std::to_string(static_cast<int>(dtype)));
}

// Calls body(std::integral_constant<int, N>{}) for the smallest listed N that is at least `size`.
template <int... kSizes, typename Body>
void dispatch_at_least(int64_t size, const char* op, const char* what, Body&& body) {
  bool found = false;
  const auto attempt = [&](auto constant) {
    if (found || size > constant()) return;
    found = true;
    body(constant);
  };
  (attempt(std::integral_constant<int, kSizes>{}), ...);
  if (!found) {
    const int largest = std::max({kSizes...});
    throw std::runtime_error(std::string(op) + ": expected " + what + " of at most " +
                             std::to_string(largest) + ", got " + std::to_string(size));
  }
}

// The head dimensions that kernels are built for; any other one uses the next larger.
template <typename Body>
void dispatch_head_dim(int64_t head_dim, const char* op, Body&& body) {
  dispatch_at_least<64, 80, 96, 128, 256>(head_dim, op, "head_dim", body);
}

}  // namespace eecore::cuda
