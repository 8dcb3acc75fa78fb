// The rotary tables of a decoder's layers, one for all or several.
#pragma once

#include "index_checks.h"

namespace eecore {

// Binds max_position and rotary_dim. Returns whether there is a table.
inline bool check_ropes(Checker& check, const std::optional<Tensor>& cos_sin,
                        const std::optional<Tensor>& layer_ropes) {
  const bool has_several = check(layer_ropes, "layer_ropes", Accept::kInt32, {"num_layers", 2});
  check.require(!has_several || cos_sin.has_value(),
                "layer_ropes: expected None without cos_sin, got a tensor");
  if (!has_several) {
    return check(cos_sin, "cos_sin", Accept::kFloat32, {"max_position", "rotary_dim"});
  }
  return check(cos_sin, "cos_sin", Accept::kFloat32, {"num_ropes", "max_position", "rotary_dim"});
}

#ifndef EECORE_BACKEND_CUDA
// Checks that layer_ropes holds indices of tables.
inline void check_rope_places(const Checker& check, const std::optional<Tensor>& layer_ropes) {
  if (!layer_ropes) return;
  check_range(check, "layer_ropes", data<const int32_t>(*layer_ropes), 2 * check["num_layers"], 0,
              check["num_ropes"]);
}
#endif

}  // namespace eecore
