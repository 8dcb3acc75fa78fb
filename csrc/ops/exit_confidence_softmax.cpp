// exit_confidence_softmax: final norm, LM head, gap of the two largest probabilities and argmax.
#include "backend.h"
#include "packed_check.h"

namespace eecore {
namespace {

void exit_confidence_softmax(const Tensor& hidden, const std::optional<Tensor>& norm_weight,
                             const Tensor& lm_head, const std::optional<Tensor>& lm_head_scale,
                             double eps, Tensor confidence, Tensor token,
                             std::optional<Tensor> logsumexp, std::optional<Tensor> top_logit,
                             const std::optional<Tensor>& lm_head_table) {
  Checker check("exit_confidence_softmax");
  check(hidden, "hidden", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  check(norm_weight, "norm_weight", Accept::kModel, {"hidden_size"});
  const WeightCoding coding =
      check_weight(check, {"lm_head", "lm_head_scale", "lm_head_table"}, lm_head,
                   {"vocab_size", "hidden_size"}, lm_head_scale, lm_head_table, {"vocab_size"});
  check.written(confidence, "confidence", Accept::kFloat32, {"num_seqs"});
  check.written(token, "token", Accept::kInt64, {"num_seqs"});
  check.written(logsumexp, "logsumexp", Accept::kFloat32, {"num_seqs"});
  check.written(top_logit, "top_logit", Accept::kFloat32, {"num_seqs"});
  check.require(check["hidden_size"] >= 1, "hidden: expected hidden_size >= 1, got 0");
  check.require(check["vocab_size"] >= 2 && check["vocab_size"] <= INT32_MAX,
                "lm_head: expected vocab_size of 2 to 2147483647, got ", check["vocab_size"]);
  check.require(eps >= 0, "eps: expected a number >= 0, got ", eps);

  ExitConfidenceSoftmaxParams params{};
  params.hidden = data<const void>(hidden);
  params.norm_weight = data_or_null<const void>(norm_weight);
  params.lm_head = data<const void>(lm_head);
  params.lm_head_scale = coding.scale;
  params.lm_head_table = coding.table;
  params.confidence = data<float>(confidence);
  params.token = data<int64_t>(token);
  params.logsumexp = data_or_null<float>(logsumexp);
  params.top_logit = data_or_null<float>(top_logit);
  params.num_seqs = check["num_seqs"];
  params.hidden_size = check["hidden_size"];
  params.vocab_size = check["vocab_size"];
  params.hidden_stride = hidden.stride(0);
  params.lm_head_stride = lm_head.stride(0);
  params.eps = static_cast<float>(eps);
  params.dtype = check.dtype();
#ifdef EECORE_BACKEND_CUDA
  const Tensor memory = workspace(
      hidden, cuda::exit_confidence_softmax_workspace(params, current_stream(hidden).device));
  params.workspace = data<void>(memory);
#endif
  EECORE_RUN(exit_confidence_softmax, params, hidden);
}

EECORE_OP(exit_confidence_softmax,
          "Tensor hidden, Tensor? norm_weight, Tensor lm_head, Tensor? lm_head_scale, float eps, "
          "Tensor(a!) confidence, Tensor(b!) token, Tensor(c!)? logsumexp, Tensor(d!)? top_logit, "
          "Tensor? lm_head_table=None")

}  // namespace
}  // namespace eecore
