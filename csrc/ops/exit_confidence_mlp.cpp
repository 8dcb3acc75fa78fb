// exit_confidence_mlp: an early-exit classifier, linear or with one ReLU hidden layer, per row.
#include "accept_arguments.h"
#include "backend.h"
#include "measure_arguments.h"

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
  ExitConfidenceMlpParams params =
      mlp_params(check, "num_seqs", {weight1, bias1, weight2, bias2}, hidden, confidence);
  params.accept =
      OptionalAccept{thresholds, layer, status, exit_layer, survivors, num_survivors, all_accepted}
          .params(check, confidence);
  run_mlp(params, hidden);
  if (!kMeasuresGoOn && params.accept.num_survivors != nullptr) {
    EECORE_RUN(accept_mask, params.accept, confidence);
  }
}

EECORE_OP(exit_confidence_mlp,
          "Tensor hidden, Tensor weight1, Tensor? bias1, Tensor? weight2, Tensor? bias2, "
          "Tensor(a!) confidence, Tensor? thresholds=None, int layer=0, Tensor(b!)? status=None, "
          "Tensor(c!)? exit_layer=None, Tensor(d!)? survivors=None, "
          "Tensor(e!)? num_survivors=None, Tensor(f!)? all_accepted=None")

}  // namespace
}  // namespace eecore
