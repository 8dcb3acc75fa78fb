// skinny_linear: norm, linear layer, activation and residual.
#include "activation_name.h"
#include "backend.h"
#include "packed_check.h"

namespace eecore {
namespace {

void skinny_linear(const Tensor& x, const std::optional<Tensor>& norm_weight, double eps,
                   const Tensor& weight, const std::optional<Tensor>& weight_scale,
                   const std::optional<Tensor>& bias, const std::optional<Tensor>& residual,
                   Tensor out, const std::optional<Text>& activation,
                   const std::optional<Tensor>& weight_table, bool constant_weight) {
  Checker check("skinny_linear");
  check(x, "x", Accept::kModel, {"num_tokens", "in_features"}, 1);
  check(norm_weight, "norm_weight", Accept::kModel, {"in_features"});
  const WeightCoding coding =
      check_weight(check, {"weight", "weight_scale", "weight_table"}, weight,
                   {"out_features", "in_features"}, weight_scale, weight_table, {"out_features"});
  check(bias, "bias", Accept::kModel, {"out_features"});
  check(residual, "residual", Accept::kModel, {"num_tokens", "out_features"}, 1);
  check.written(out, "out", Accept::kModel, {"num_tokens", "out_features"}, 1, "residual");
  check.require(check["in_features"] >= 1, "x: expected in_features >= 1, got 0");
  check.require(eps >= 0, "eps: expected a number >= 0, got ", eps);

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
  params.constant_weight = constant_weight;
#ifdef EECORE_BACKEND_CUDA
  const Tensor memory =
      workspace(x, cuda::skinny_linear_workspace(params, current_stream(x).device));
  params.workspace = data<void>(memory);
#endif
  EECORE_RUN(skinny_linear, params, x);
}

EECORE_OP(skinny_linear,
          "Tensor x, Tensor? norm_weight, float eps, Tensor weight, Tensor? weight_scale, "
          "Tensor? bias, Tensor? residual, Tensor(a!) out, str? activation=None, "
          "Tensor? weight_table=None, bool constant_weight=False")

}  // namespace
}  // namespace eecore
