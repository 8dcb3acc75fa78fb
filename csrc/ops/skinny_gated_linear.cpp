// skinny_gated_linear: norm, gate and up projections and activation(gate) * up.
#include "activation_name.h"
#include "backend.h"
#include "packed_check.h"

namespace eecore {
namespace {

void skinny_gated_linear(const Tensor& x, const std::optional<Tensor>& norm_weight, double eps,
                         const Tensor& weight, const std::optional<Tensor>& weight_scale,
                         const std::optional<Tensor>& bias, Tensor out, const Text& activation,
                         const std::optional<Tensor>& weight_table, bool constant_weight) {
  Checker check("skinny_gated_linear");
  check(x, "x", Accept::kModel, {"num_tokens", "in_features"}, 1);
  check(norm_weight, "norm_weight", Accept::kModel, {"in_features"});
  check.written(out, "out", Accept::kModel, {"num_tokens", "inner_size"}, 1);
  const int64_t inner_size = check["inner_size"];
  const WeightCoding coding =
      check_weight(check, {"weight", "weight_scale", "weight_table"}, weight,
                   {2 * inner_size, "in_features"}, weight_scale, weight_table, {2 * inner_size});
  check(bias, "bias", Accept::kModel, {2 * inner_size});
  check.require(check["in_features"] >= 1, "x: expected in_features >= 1, got 0");
  check.require(eps >= 0, "eps: expected a number >= 0, got ", eps);

  SkinnyGatedLinearParams params{};
  params.x = data<const void>(x);
  params.norm_weight = data_or_null<const void>(norm_weight);
  params.weight = data<const void>(weight);
  params.weight_scale = coding.scale;
  params.weight_table = coding.table;
  params.bias = data_or_null<const void>(bias);
  params.out = data<void>(out);
  params.num_tokens = check["num_tokens"];
  params.in_features = check["in_features"];
  params.inner_size = inner_size;
  params.x_stride = x.stride(0);
  params.weight_stride = weight.stride(0);
  params.out_stride = out.stride(0);
  params.eps = static_cast<float>(eps);
  params.activation = activation_of(
      check, activation, {{"silu", Activation::kSilu}, {"gelu_tanh", Activation::kGeluTanh}});
  params.constant_weight = constant_weight;
  params.dtype = check.dtype();
#ifdef EECORE_BACKEND_CUDA
  const Tensor memory =
      workspace(x, cuda::skinny_gated_linear_workspace(params, current_stream(x).device));
  params.workspace = data<void>(memory);
#endif
  EECORE_RUN(skinny_gated_linear, params, x);
}

EECORE_OP(skinny_gated_linear,
          "Tensor x, Tensor? norm_weight, float eps, Tensor weight, Tensor? weight_scale, "
          "Tensor? bias, Tensor(a!) out, str activation='silu', Tensor? weight_table=None, "
          "bool constant_weight=False")

}  // namespace
}  // namespace eecore
