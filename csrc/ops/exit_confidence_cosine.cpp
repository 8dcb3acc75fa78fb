// exit_confidence_cosine: cosine of the hidden states of two consecutive layers, per row.
#include "accept_arguments.h"
#include "backend.h"
#include "measure_arguments.h"

namespace eecore {
namespace {

void exit_confidence_cosine(const Tensor& previous, const Tensor& hidden, Tensor confidence,
                            const std::optional<Tensor>& thresholds, int64_t layer,
                            std::optional<Tensor> status, std::optional<Tensor> exit_layer,
                            std::optional<Tensor> survivors, std::optional<Tensor> num_survivors,
                            std::optional<Tensor> all_accepted) {
  Checker check("exit_confidence_cosine");
  check(hidden, "hidden", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  ExitConfidenceCosineParams params =
      cosine_params(check, "num_seqs", previous, hidden, confidence);
  params.accept =
      OptionalAccept{thresholds, layer, status, exit_layer, survivors, num_survivors, all_accepted}
          .params(check, confidence);
  EECORE_RUN(exit_confidence_cosine, params, hidden);
  if (!kMeasuresGoOn && params.accept.num_survivors != nullptr) {
    EECORE_RUN(accept_mask, params.accept, confidence);
  }
}

EECORE_OP(exit_confidence_cosine,
          "Tensor previous, Tensor hidden, Tensor(a!) confidence, Tensor? thresholds=None, "
          "int layer=0, Tensor(b!)? status=None, Tensor(c!)? exit_layer=None, "
          "Tensor(d!)? survivors=None, Tensor(e!)? num_survivors=None, "
          "Tensor(f!)? all_accepted=None")

}  // namespace
}  // namespace eecore
