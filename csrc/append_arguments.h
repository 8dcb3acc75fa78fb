// The tensors of append_kv other than q, k and v, which skinny_linear also takes to append heads.
#pragma once

#include "cache_format.h"
#include "index_checks.h"

namespace eecore {

struct AppendTensors {
  const Tensor &k_cache, &v_cache, &slot_mapping;
  const std::optional<Tensor>&positions, &cos_sin, &q_norm_weight, &k_norm_weight;
  double eps;
  const std::optional<Tensor>&key_scales, &value_scales, &q_cos_sin;
  bool constant_places;
};

// Whether a norm's weight covers the features of all heads; else it covers one head, or is absent.
inline bool check_head_norm(Checker& check, const std::optional<Tensor>& weight, const char* name,
                            int64_t all_features) {
  const bool is_of_all = weight && weight->dim() == 1 && weight->size(0) == all_features &&
                         all_features != check["head_dim"];
  check(weight, name, Accept::kModel, {is_of_all ? Dim(all_features) : Dim("head_dim")});
  return is_of_all;
}

// Checks the tensors for num_tokens rows; heads that were checked before have the caches' sizes.
// The heads themselves are not set. qkv_size: features of all heads of a token.
inline AppendKvParams append_params(Checker& check, const AppendTensors& tensors,
                                    int64_t qkv_size) {
  for (const auto& [cache, name] :
       {std::pair(&tensors.k_cache, "k_cache"), {&tensors.v_cache, "v_cache"}}) {
    check.written(*cache, name, Accept::kCache,
                  {"num_pages", "page_size", "num_kv_heads", "head_dim"}, 1);
  }
  check(tensors.slot_mapping, "slot_mapping", Accept::kInt64, {"num_tokens"});
  const bool has_positions = check(tensors.positions, "positions", Accept::kInt64, {"num_tokens"});
  const bool has_cos_sin =
      check(tensors.cos_sin, "cos_sin", Accept::kFloat32, {"max_position", "rotary_dim"});
  const bool has_q_cos_sin =
      check(tensors.q_cos_sin, "q_cos_sin", Accept::kFloat32, {"max_position", "rotary_dim"});
  check.require(has_cos_sin || !has_q_cos_sin,
                "q_cos_sin: expected None without cos_sin, got a tensor");
  AppendKvParams params{};
  const int64_t kv_size = check["num_kv_heads"] * check["head_dim"];
  params.norms_all_q =
      check_head_norm(check, tensors.q_norm_weight, "q_norm_weight", qkv_size - 2 * kv_size);
  params.norms_all_k = check_head_norm(check, tensors.k_norm_weight, "k_norm_weight", kv_size);
  params.cache_format =
      check_cache_format(check, tensors.k_cache, tensors.v_cache, tensors.key_scales,
                         tensors.value_scales, {"num_kv_heads"});
  params.num_tokens = check["num_tokens"];
  params.num_kv_heads = check["num_kv_heads"];
  params.head_dim = check["head_dim"];
  check.require(params.head_dim >= 1 && params.head_dim <= kMaxHeadDim,
                "k_cache: expected head_dim of 1 to ", kMaxHeadDim, ", got ", params.head_dim);
  check.require(tensors.eps >= 0, "eps: expected a number >= 0, got ", tensors.eps);
  check.require(!has_positions || has_cos_sin,
                "cos_sin: expected float32 [max_position, rotary_dim] with positions, got None");
  if (has_positions) {
    params.rotary_dim = check["rotary_dim"];
    check.require(params.rotary_dim % 2 == 0 && params.rotary_dim <= params.head_dim,
                  "cos_sin: expected an even rotary_dim of at most head_dim=", params.head_dim,
                  ", got ", params.rotary_dim);
  }
  params.page_size = check["page_size"];
  params.k_cache_strides = check.cache_strides(tensors.k_cache, "k_cache");
  params.v_cache_strides = check.cache_strides(tensors.v_cache, "v_cache");
  params.k_cache = data<void>(tensors.k_cache);
  params.v_cache = data<void>(tensors.v_cache);
  params.slot_mapping = data<const int64_t>(tensors.slot_mapping);
  params.positions = data_or_null<const int64_t>(tensors.positions);
  params.cos_sin = data_or_null<const float>(tensors.cos_sin);
  params.q_cos_sin = data_or_null<const float>(tensors.q_cos_sin);
  params.q_norm_weight = data_or_null<const void>(tensors.q_norm_weight);
  params.k_norm_weight = data_or_null<const void>(tensors.k_norm_weight);
  params.constant_places = tensors.constant_places;
  params.eps = static_cast<float>(tensors.eps);
  params.dtype = check.dtype();
#ifndef EECORE_BACKEND_CUDA
  check_range(check, "slot_mapping", params.slot_mapping, params.num_tokens, -1,
              check["num_pages"] * params.page_size);
  if (has_positions) {
    check_range(check, "positions", params.positions, params.num_tokens, 0, check["max_position"]);
  }
#endif
  return params;
}

}  // namespace eecore
