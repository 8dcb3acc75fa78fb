// exit_confidence_mlp: an early-exit classifier, linear or with one ReLU hidden layer, per row.
#include "accept_arguments.h"
#include "backend.h"

namespace eecore {
namespace {

void exit_confidence_mlp(const Tensor& hidden, const Tensor& weight1,
                         const std::optional<Tensor>& bias1, const std::optional<Tensor>& weight2,
                         const std::optional<Tensor>& bias2, Tensor confidence,
                         const std::optional<Tensor>& thresholds, int64_t layer,
                         std::optional<Tensor> status, std::optional<Tensor> exit_layer,
                         std::optional<Tensor> survivors, std::optional<Tensor> num_survivors,
                         std::optional<Tensor> all_accepted) {
  Checker check("exit_confidence_mlp");
  check(hidden, "hidden", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  check(weight1, "weight1", Accept::kFloat32, {"inner_size", "hidden_size"});
  check(bias1, "bias1", Accept::kFloat32, {"inner_size"});
  const bool has_hidden_layer = check(weight2, "weight2", Accept::kFloat32, {2, "inner_size"});
  check(bias2, "bias2", Accept::kFloat32, {2});
  check.written(confidence, "confidence", Accept::kFloat32, {"num_seqs"});
  check.require(check["inner_size"] >= 1, "weight1: expected inner_size >= 1, got 0");
  check.require(has_hidden_layer || check["inner_size"] == 2,
                "weight1: expected inner_size=2 without weight2 (one linear layer), got ",
                check["inner_size"]);
  check.require(has_hidden_layer || !bias2.has_value(),
                "bias2: expected only together with weight2, got bias2 and no weight2");

  ExitConfidenceMlpParams params{};
  params.hidden = hidden.data_ptr();
  params.weight1 = data<const float>(weight1);
  params.bias1 = data_or_null<const float>(bias1);
  params.weight2 = data_or_null<const float>(weight2);
  params.bias2 = data_or_null<const float>(bias2);
  params.confidence = data<float>(confidence);
  params.num_seqs = check["num_seqs"];
  params.hidden_size = check["hidden_size"];
  params.inner_size = check["inner_size"];
  params.hidden_stride = hidden.stride(0);
  params.dtype = check.dtype();
  params.accept =
      OptionalAccept{thresholds, layer, status, exit_layer, survivors, num_survivors, all_accepted}
          .params(check, confidence);
#ifdef EECORE_BACKEND_CUDA
  const Tensor memory =
      workspace(hidden, cuda::exit_confidence_mlp_workspace(params, hidden.get_device_index()));
  params.workspace = data<void>(memory);
#endif
  EECORE_RUN(exit_confidence_mlp, params, hidden);
#ifndef EECORE_BACKEND_CUDA  // whose launchers go on to it themselves
  if (params.accept.num_survivors != nullptr) EECORE_RUN(accept_mask, params.accept, confidence);
#endif
}

EECORE_OP(exit_confidence_mlp,
          "Tensor hidden, Tensor weight1, Tensor? bias1, Tensor? weight2, Tensor? bias2, "
          "Tensor(a!) confidence, Tensor? thresholds=None, int layer=0, Tensor(b!)? status=None, "
          "Tensor(c!)? exit_layer=None, Tensor(d!)? survivors=None, "
          "Tensor(e!)? num_survivors=None, Tensor(f!)? all_accepted=None")

}  // namespace
}  // namespace eecore
