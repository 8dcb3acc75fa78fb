// exit_confidence_cosine: cosine of the hidden states of two consecutive layers, per row.
#include "backend.h"

namespace eecore {
namespace {

void exit_confidence_cosine(const Tensor& previous, const Tensor& hidden, Tensor confidence) {
  Checker check("exit_confidence_cosine");
  check(hidden, "hidden", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  check(previous, "previous", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  check(confidence, "confidence", Accept::kFloat32, {"num_seqs"});

  ExitConfidenceCosineParams params{};
  params.previous = previous.data_ptr();
  params.hidden = hidden.data_ptr();
  params.confidence = data<float>(confidence);
  params.num_seqs = check["num_seqs"];
  params.hidden_size = check["hidden_size"];
  params.previous_stride = previous.stride(0);
  params.hidden_stride = hidden.stride(0);
  params.dtype = check.dtype();
  EECORE_RUN(exit_confidence_cosine, params, hidden);
}

EECORE_IMPL(exit_confidence_cosine, exit_confidence_cosine)

}  // namespace
}  // namespace eecore
