// What a cache holds, at the tensor boundary: the model's dtype, or float8 with a scale per head.
#pragma once

#include <cmath>

#include "check.h"
#include "index_checks.h"

namespace eecore {

// Scales of float8 keys or values: float32 of `shape`, all positive. Returns their data, or null.
inline const float* check_scales(Checker& check, const std::optional<Tensor>& scales,
                                 const char* name, std::initializer_list<Dim> shape,
                                 bool is_float8) {
  check.require(is_float8 || !scales, name,
                ": expected None with a cache in the model's dtype, got a tensor");
  if (!check(scales, name, Accept::kFloat32, shape)) return nullptr;
  const float* values = data<const float>(*scales);
  for (int64_t i = 0; holds_values() && i < scales->numel(); ++i) {
    if (values[i] > 0.0f && std::isfinite(values[i])) continue;
    check.fail(std::string(name) + ": expected positive finite numbers, got " +
               std::to_string(values[i]) + " at " + std::to_string(i));
  }
  return values;
}

// Of caches that have been checked as Accept::kCache. shape: of the scales.
inline CacheFormat check_cache_format(Checker& check, const Tensor& k_cache, const Tensor& v_cache,
                                      const std::optional<Tensor>& key_scales,
                                      const std::optional<Tensor>& value_scales,
                                      std::initializer_list<Dim> shape) {
  const auto is_float8 = [](const Tensor& cache) {
    return cache.scalar_type() == ScalarType::Float8_e4m3fn;
  };
  const bool both = is_float8(k_cache);
  check.require(both == is_float8(v_cache), "v_cache: expected the dtype of k_cache, got ",
                both ? "another than float8_e4m3fn" : "float8_e4m3fn");
  CacheFormat format{};
  format.is_float8 = both;
  format.key_scales = check_scales(check, key_scales, "key_scales", shape, both);
  format.value_scales = check_scales(check, value_scales, "value_scales", shape, both);
  return format;
}

}  // namespace eecore
