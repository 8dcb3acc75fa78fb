// The element type of a cache, at the tensor boundary: the model's dtype, float8 with a scale per
// head, or on the CPU bfloat16 for a model of float32.
#pragma once

#include <cmath>

#include "check.h"
#include "index_checks.h"

namespace eecore {

// Checks scales of float8 keys or values: float32 of `shape`, all positive. Returns their data, or
// null.
inline const float* check_scales(Checker& check, const std::optional<Tensor>& scales,
                                 const char* name, std::initializer_list<Dim> shape,
                                 bool is_float8) {
  check.require(is_float8 || !scales, name,
                ": expected None with a cache that is not in float8, got a tensor");
  if (!check(scales, name, Accept::kFloat32, shape)) return nullptr;
  const float* values = data<const float>(*scales);
  for (int64_t i = 0; holds_values() && i < scales->numel(); ++i) {
    if (values[i] > 0.0f && std::isfinite(values[i])) continue;
    check.fail(std::string(name) + ": expected positive finite numbers, got " +
               std::to_string(values[i]) + " at " + std::to_string(i));
  }
  return values;
}

// The format of caches that have been checked as Accept::kCache. shape: of the scales.
inline CacheFormat check_cache_format(Checker& check, const Tensor& k_cache, const Tensor& v_cache,
                                      const std::optional<Tensor>& key_scales,
                                      const std::optional<Tensor>& value_scales,
                                      std::initializer_list<Dim> shape) {
  const ScalarType type = k_cache.scalar_type();
  check.require(type == v_cache.scalar_type(), "v_cache: expected the dtype of k_cache, ",
                dtype_name(type), ", got ", dtype_name(v_cache.scalar_type()));
  CacheFormat format{};
  format.is_float8 = type == ScalarType::Float8_e4m3fn;
  format.is_bfloat16 = type == ScalarType::BFloat16 && check.dtype() == DType::kFloat32;
  format.key_scales = check_scales(check, key_scales, "key_scales", shape, format.is_float8);
  format.value_scales = check_scales(check, value_scales, "value_scales", shape, format.is_float8);
  return format;
}

}  // namespace eecore
