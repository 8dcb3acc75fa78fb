// skinny_linear: norm, linear layer, activation and residual, or heads that are appended to a
// cache.
#include "activation_name.h"
#include "append_arguments.h"
#include "backend.h"
#include "packed_check.h"

namespace eecore {
namespace {

// The params for heads of q, k and v that are adjacent in the rows of `out`, which has been
// checked.
AppendKvParams append_params_of_rows(Checker& check, const AppendTensors& tensors,
                                     const Tensor& out) {
  const int64_t size = check["out_features"];
  AppendKvParams params = append_params(check, tensors, size);
  const int64_t head_dim = params.head_dim;
  const int64_t kv_size = params.num_kv_heads * head_dim, q_size = size - 2 * kv_size;
  check.require(q_size >= 0 && q_size % head_dim == 0,
                "weight: expected out_features of some heads of head_dim=", head_dim,
                ", and twice num_kv_heads=", params.num_kv_heads, " more, got ", size);
  if (params.num_tokens > 0) {
    char* heads = data<char>(out);
    params.q = heads;
    params.k = heads + q_size * size_of(params.dtype);
    params.v = heads + (q_size + kv_size) * size_of(params.dtype);
  }
  params.num_q_heads = q_size / head_dim;
  params.q_token_stride = params.k_token_stride = params.v_token_stride = out.stride(0);
  params.q_head_stride = params.k_head_stride = params.v_head_stride = head_dim;
  return params;
}

void skinny_linear(const Tensor& x, const std::optional<Tensor>& norm_weight, double eps,
                   const Tensor& weight, const std::optional<Tensor>& weight_scale,
                   const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                   Tensor out, const std::optional<Text>& activation,
                   const std::optional<Tensor>& weight_table, bool constant_weight,
                   std::optional<Tensor> k_cache, std::optional<Tensor> v_cache,
                   const std::optional<Tensor>& slot_mapping,
                   const std::optional<Tensor>& positions, const std::optional<Tensor>& cos_sin,
                   const std::optional<Tensor>& q_norm_weight,
                   const std::optional<Tensor>& k_norm_weight,
                   const std::optional<Tensor>& key_scales,
                   const std::optional<Tensor>& value_scales, double multiplier, double soft_cap,
                   const std::optional<Tensor>& q_cos_sin, bool constant_places) {
  Checker check("skinny_linear");
  check(x, "x", Accept::kModel, {"num_tokens", "in_features"}, 1);
  check(norm_weight, "norm_weight", Accept::kModel, {"in_features"});
  const WeightCoding coding =
      check_weight(check, {"weight", "weight_scale", "weight_table"}, weight,
                   {"out_features", "in_features"}, weight_scale, weight_table, {"out_features"});
  check(bias, "bias", Accept::kModel, {"out_features"});
  check(residual, "residual", Accept::kModel, {"num_tokens", "out_features"}, 1);
  check.written(out, "out", Accept::kModelOrFloat32, {"num_tokens", "out_features"}, 1, "residual");
  check.require(check["in_features"] >= 1, "x: expected in_features >= 1, got 0");
  check.require(eps >= 0, "eps: expected a number >= 0, got ", eps);

  const bool appends = check.all_or_none(
      {{"k_cache", k_cache}, {"v_cache", v_cache}, {"slot_mapping", slot_mapping}});
  for (const auto& [tensor, name] : {std::pair(&positions, "positions"),
                                     {&cos_sin, "cos_sin"},
                                     {&q_norm_weight, "q_norm_weight"},
                                     {&k_norm_weight, "k_norm_weight"},
                                     {&key_scales, "key_scales"},
                                     {&value_scales, "value_scales"},
                                     {&q_cos_sin, "q_cos_sin"}}) {
    check.require(appends || !tensor->has_value(), name,
                  ": expected None without k_cache, got a tensor");
  }
  check.require(!appends || !residual, "residual: expected None with k_cache, got a tensor");
  check.require(!appends || !activation, "activation: expected None with k_cache, got ",
                activation ? activation->c_str() : "");
  const bool is_wide = out.scalar_type() == ScalarType::Float && check.dtype() != DType::kFloat32;
  check.require(!appends || !is_wide, "out: expected the dtype of x with k_cache, got float32");
  check.require(soft_cap >= 0, "soft_cap: expected a number >= 0, got ", soft_cap);
  check.require(!appends || (multiplier == 1 && soft_cap == 0),
                "multiplier, soft_cap: expected 1 and 0 with k_cache, got ", multiplier, " and ",
                soft_cap);

  SkinnyLinearParams params{};
  params.dtype = check.dtype();
  params.x = data<const void>(x);
  params.norm_weight = data_or_null<const void>(norm_weight);
  params.weight = data<const void>(weight);
  params.weight_scale = coding.scale;
  params.weight_table = coding.table;
  params.bias = data_or_null<const void>(bias);
  params.residual = data_or_null<const void>(residual);
  params.out = data<void>(out);
  params.num_tokens = check["num_tokens"];
  params.in_features = check["in_features"];
  params.out_features = check["out_features"];
  params.x_stride = x.stride(0);
  params.weight_stride = weight.stride(0);
  params.residual_stride = residual ? residual->stride(0) : 0;
  params.out_stride = out.stride(0);
  params.eps = static_cast<float>(eps);
  params.activation = activation ? activation_of(check, *activation, {{"relu", Activation::kRelu}})
                                 : Activation::kNone;
  params.multiplier = static_cast<float>(multiplier);
  params.soft_cap = static_cast<float>(soft_cap);
  params.constant_weight = constant_weight;
  params.wide_out = is_wide;
  if (appends) {
    params.append = append_params_of_rows(
        check,
        {*k_cache, *v_cache, *slot_mapping, positions, cos_sin, q_norm_weight, k_norm_weight, eps,
         key_scales, value_scales, q_cos_sin, constant_places},
        out);
  }
#ifdef EECORE_BACKEND_CUDA
  const Tensor memory =
      workspace(x, cuda::skinny_linear_workspace(params, current_stream(x).device));
  params.workspace = data<void>(memory);
#endif
  EECORE_RUN(skinny_linear, params, x);
#ifndef EECORE_BACKEND_CUDA
  if (appends) EECORE_RUN(append_kv, params.append, x);
#endif
}

EECORE_OP(skinny_linear,
          "Tensor x, Tensor? norm_weight, float eps, Tensor weight, Tensor? weight_scale, "
          "Tensor? bias, Tensor? residual, Tensor(a!) out, str? activation=None, "
          "Tensor? weight_table=None, bool constant_weight=False, Tensor(b!)? k_cache=None, "
          "Tensor(c!)? v_cache=None, Tensor? slot_mapping=None, Tensor? positions=None, "
          "Tensor? cos_sin=None, Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, "
          "Tensor? key_scales=None, Tensor? value_scales=None, float multiplier=1., "
          "float soft_cap=0., Tensor? q_cos_sin=None, bool constant_places=False")

}  // namespace
}  // namespace eecore
