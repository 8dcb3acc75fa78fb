// append_kv: new keys and values to their cache slots, head norms and rotary embedding fused.
#include "backend.h"
#include "cache_format.h"
#include "index_checks.h"

namespace eecore {
namespace {

void append_kv(std::optional<Tensor> q, const Tensor& k, const Tensor& v, Tensor k_cache,
               Tensor v_cache, const Tensor& slot_mapping, const std::optional<Tensor>& positions,
               const std::optional<Tensor>& cos_sin, const std::optional<Tensor>& q_norm_weight,
               const std::optional<Tensor>& k_norm_weight, double eps,
               const std::optional<Tensor>& key_scales, const std::optional<Tensor>& value_scales) {
  Checker check("append_kv");
  check(k, "k", Accept::kModel, {"num_tokens", "num_kv_heads", "head_dim"}, 1);
  check(v, "v", Accept::kModel, {"num_tokens", "num_kv_heads", "head_dim"}, 1);
  const bool has_q =
      check.written(q, "q", Accept::kModel, {"num_tokens", "num_q_heads", "head_dim"}, 1);
  for (const auto& [cache, name] : {std::pair(&k_cache, "k_cache"), {&v_cache, "v_cache"}}) {
    check.written(*cache, name, Accept::kCache,
                  {"num_pages", "page_size", "num_kv_heads", "head_dim"}, 1);
  }
  check(slot_mapping, "slot_mapping", Accept::kInt64, {"num_tokens"});
  const bool has_positions = check(positions, "positions", Accept::kInt64, {"num_tokens"});
  const bool has_cos_sin =
      check(cos_sin, "cos_sin", Accept::kFloat32, {"max_position", "rotary_dim"});
  check(q_norm_weight, "q_norm_weight", Accept::kModel, {"head_dim"});
  check(k_norm_weight, "k_norm_weight", Accept::kModel, {"head_dim"});

  AppendKvParams params{};
  params.cache_format =
      check_cache_format(check, k_cache, v_cache, key_scales, value_scales, {"num_kv_heads"});
  params.num_tokens = check["num_tokens"];
  params.num_q_heads = has_q ? check["num_q_heads"] : 0;
  params.num_kv_heads = check["num_kv_heads"];
  params.head_dim = check["head_dim"];
  check.require(params.head_dim >= 1 && params.head_dim <= kMaxHeadDim,
                "k: expected head_dim of 1 to ", kMaxHeadDim, ", got ", params.head_dim);
  check.require(eps >= 0, "eps: expected a number >= 0, got ", eps);
  check.require(!has_positions || has_cos_sin,
                "cos_sin: expected float32 [max_position, rotary_dim] with positions, got None");
  if (has_positions) {
    params.rotary_dim = check["rotary_dim"];
    check.require(params.rotary_dim % 2 == 0 && params.rotary_dim <= params.head_dim,
                  "cos_sin: expected an even rotary_dim of at most head_dim=", params.head_dim,
                  ", got ", params.rotary_dim);
  }
  params.page_size = check["page_size"];
  params.k_cache_strides = check.cache_strides(k_cache, "k_cache");
  params.v_cache_strides = check.cache_strides(v_cache, "v_cache");

  params.q = data_or_null(q);
  params.k = data<const void>(k);
  params.v = data<const void>(v);
  params.k_cache = data<void>(k_cache);
  params.v_cache = data<void>(v_cache);
  params.slot_mapping = data<const int64_t>(slot_mapping);
  params.positions = data_or_null<const int64_t>(positions);
  params.cos_sin = data_or_null<const float>(cos_sin);
  params.q_norm_weight = data_or_null<const void>(q_norm_weight);
  params.k_norm_weight = data_or_null<const void>(k_norm_weight);
  params.q_token_stride = has_q ? q->stride(0) : 0;
  params.q_head_stride = has_q ? q->stride(1) : 0;
  params.k_token_stride = k.stride(0);
  params.k_head_stride = k.stride(1);
  params.v_token_stride = v.stride(0);
  params.v_head_stride = v.stride(1);
  params.eps = static_cast<float>(eps);
  params.dtype = check.dtype();
#ifndef EECORE_BACKEND_CUDA
  check_range(check, "slot_mapping", params.slot_mapping, params.num_tokens, -1,
              check["num_pages"] * params.page_size);
  if (has_positions) {
    check_range(check, "positions", params.positions, params.num_tokens, 0, check["max_position"]);
  }
#endif
  EECORE_RUN(append_kv, params, k);
}

EECORE_OP(append_kv,
          "Tensor(a!)? q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, "
          "Tensor slot_mapping, Tensor? positions, Tensor? cos_sin, Tensor? q_norm_weight, "
          "Tensor? k_norm_weight, float eps, Tensor? key_scales=None, Tensor? value_scales=None")

}  // namespace
}  // namespace eecore
