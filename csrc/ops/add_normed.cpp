// add_normed: adds a sublayer's normed output to the residual stream.
#include "backend.h"

namespace eecore {
namespace {

void add_normed(const Tensor& x, const Tensor& norm_weight, double eps, double multiplier,
                const std::optional<Tensor>& residual, Tensor out) {
  Checker check("add_normed");
  check(x, "x", Accept::kModel, {"num_tokens", "hidden_size"}, 1);
  check(norm_weight, "norm_weight", Accept::kModel, {"hidden_size"});
  check(residual, "residual", Accept::kModel, {"num_tokens", "hidden_size"}, 1);
  check.written(out, "out", Accept::kModel, {"num_tokens", "hidden_size"}, 1, "residual");
  check.require(check["hidden_size"] >= 1, "x: expected hidden_size >= 1, got 0");
  check.require(eps >= 0, "eps: expected a number >= 0, got ", eps);

  AddNormedParams params{};
  params.x = data<const void>(x);
  params.norm_weight = data<const void>(norm_weight);
  params.residual = data_or_null<const void>(residual);
  params.out = data<void>(out);
  params.num_tokens = check["num_tokens"];
  params.hidden_size = check["hidden_size"];
  params.x_stride = x.stride(0);
  params.residual_stride = residual ? residual->stride(0) : 0;
  params.out_stride = out.stride(0);
  params.eps = static_cast<float>(eps);
  params.multiplier = static_cast<float>(multiplier);
  params.dtype = check.dtype();
  EECORE_RUN(add_normed, params, x);
}

EECORE_OP(add_normed,
          "Tensor x, Tensor norm_weight, float eps, float multiplier, Tensor? residual, "
          "Tensor(a!) out")

}  // namespace
}  // namespace eecore
