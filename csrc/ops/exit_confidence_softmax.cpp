// exit_confidence_softmax: final norm, LM head, gap of the two largest probabilities and argmax.
#include "backend.h"
#include "measure_arguments.h"

namespace eecore {
namespace {

void exit_confidence_softmax(const Tensor& hidden, const std::optional<Tensor>& norm_weight,
                             const Tensor& lm_head, const std::optional<Tensor>& lm_head_scale,
                             double eps, Tensor confidence, Tensor token,
                             std::optional<Tensor> logsumexp, std::optional<Tensor> top_logit,
                             const std::optional<Tensor>& lm_head_table, double multiplier,
                             double soft_cap) {
  Checker check("exit_confidence_softmax");
  check(hidden, "hidden", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  ExitConfidenceSoftmaxParams params = softmax_params(
      check, "num_seqs",
      {norm_weight, lm_head, lm_head_scale, lm_head_table, eps, multiplier, soft_cap}, hidden,
      {confidence, token, logsumexp, top_logit});
  run_softmax(params, hidden);
}

EECORE_OP(exit_confidence_softmax,
          "Tensor hidden, Tensor? norm_weight, Tensor lm_head, Tensor? lm_head_scale, float eps, "
          "Tensor(a!) confidence, Tensor(b!) token, Tensor(c!)? logsumexp, Tensor(d!)? top_logit, "
          "Tensor? lm_head_table=None, float multiplier=1., float soft_cap=0.")

}  // namespace
}  // namespace eecore
