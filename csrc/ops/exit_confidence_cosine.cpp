// exit_confidence_cosine: cosine of the hidden states of two consecutive layers, per row.
#include "accept_arguments.h"
#include "backend.h"

namespace eecore {
namespace {

void exit_confidence_cosine(const Tensor& previous, const Tensor& hidden, Tensor confidence,
                            const std::optional<Tensor>& thresholds, int64_t layer,
                            std::optional<Tensor> status, std::optional<Tensor> exit_layer,
                            std::optional<Tensor> survivors, std::optional<Tensor> num_survivors,
                            std::optional<Tensor> all_accepted) {
  Checker check("exit_confidence_cosine");
  check(hidden, "hidden", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  check(previous, "previous", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  check.written(confidence, "confidence", Accept::kFloat32, {"num_seqs"});

  ExitConfidenceCosineParams params{};
  params.previous = previous.data_ptr();
  params.hidden = hidden.data_ptr();
  params.confidence = data<float>(confidence);
  params.num_seqs = check["num_seqs"];
  params.hidden_size = check["hidden_size"];
  params.previous_stride = previous.stride(0);
  params.hidden_stride = hidden.stride(0);
  params.dtype = check.dtype();
  params.accept =
      OptionalAccept{thresholds, layer, status, exit_layer, survivors, num_survivors, all_accepted}
          .params(check, confidence);
  EECORE_RUN(exit_confidence_cosine, params, hidden);
#ifndef EECORE_BACKEND_CUDA  // whose launchers go on to it themselves
  if (params.accept.num_survivors != nullptr) EECORE_RUN(accept_mask, params.accept, confidence);
#endif
}

EECORE_OP(exit_confidence_cosine,
          "Tensor previous, Tensor hidden, Tensor(a!) confidence, Tensor? thresholds=None, "
          "int layer=0, Tensor(b!)? status=None, Tensor(c!)? exit_layer=None, "
          "Tensor(d!)? survivors=None, Tensor(e!)? num_survivors=None, "
          "Tensor(f!)? all_accepted=None")

}  // namespace
}  // namespace eecore
