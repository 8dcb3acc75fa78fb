// append_kv: writes new keys and values to their cache slots, with head norms and rotary embedding.
#include "append_arguments.h"
#include "backend.h"

namespace eecore {
namespace {

void append_kv(std::optional<Tensor> q, const Tensor& k, const Tensor& v, Tensor k_cache,
               Tensor v_cache, const Tensor& slot_mapping, const std::optional<Tensor>& positions,
               const std::optional<Tensor>& cos_sin, const std::optional<Tensor>& q_norm_weight,
               const std::optional<Tensor>& k_norm_weight, double eps,
               const std::optional<Tensor>& key_scales, const std::optional<Tensor>& value_scales,
               const std::optional<Tensor>& q_cos_sin, bool constant_places) {
  Checker check("append_kv");
  check(k, "k", Accept::kModel, {"num_tokens", "num_kv_heads", "head_dim"}, 1);
  check(v, "v", Accept::kModel, {"num_tokens", "num_kv_heads", "head_dim"}, 1);
  const bool has_q =
      check.written(q, "q", Accept::kModel, {"num_tokens", "num_q_heads", "head_dim"}, 1);

  const int64_t num_q_heads = has_q ? check["num_q_heads"] : 0;
  AppendKvParams params =
      append_params(check,
                    {k_cache, v_cache, slot_mapping, positions, cos_sin, q_norm_weight,
                     k_norm_weight, eps, key_scales, value_scales, q_cos_sin, constant_places},
                    (num_q_heads + 2 * check["num_kv_heads"]) * check["head_dim"]);
  params.num_q_heads = num_q_heads;
  params.q = data_or_null(q);
  params.k = data<const void>(k);
  params.v = data<const void>(v);
  params.q_token_stride = has_q ? q->stride(0) : 0;
  params.q_head_stride = has_q ? q->stride(1) : 0;
  params.k_token_stride = k.stride(0);
  params.k_head_stride = k.stride(1);
  params.v_token_stride = v.stride(0);
  params.v_head_stride = v.stride(1);
  EECORE_RUN(append_kv, params, k);
}

EECORE_OP(append_kv,
          "Tensor(a!)? q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, "
          "Tensor slot_mapping, Tensor? positions, Tensor? cos_sin, Tensor? q_norm_weight, "
          "Tensor? k_norm_weight, float eps, Tensor? key_scales=None, Tensor? value_scales=None, "
          "Tensor? q_cos_sin=None, bool constant_places=False")

}  // namespace
}  // namespace eecore
