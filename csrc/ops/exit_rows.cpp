// exit_rows: rows that leave at an exit point, what they leave with, and what masks them from then
// on.
#include "backend.h"

namespace eecore {
namespace {

void exit_rows(const Tensor& hidden, const Tensor& confidence, const std::optional<Tensor>& token,
               const std::optional<Tensor>& top_logit, const std::optional<Tensor>& logsumexp,
               const std::optional<Tensor>& accepted, int64_t layer, Tensor gone,
               Tensor slot_mapping, Tensor seq_lens, Tensor final_hidden, Tensor final_confidence,
               std::optional<Tensor> final_token, std::optional<Tensor> final_logprob,
               Tensor exit_layer) {
  Checker check("exit_rows");
  check(hidden, "hidden", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  check(confidence, "confidence", Accept::kFloat32, {"num_seqs"});
  const int head = check(token, "token", Accept::kInt64, {"num_seqs"}) +
                   check(top_logit, "top_logit", Accept::kFloat32, {"num_seqs"}) +
                   check(logsumexp, "logsumexp", Accept::kFloat32, {"num_seqs"}) +
                   check(final_token, "final_token", Accept::kInt64, {"num_seqs"}) +
                   check(final_logprob, "final_logprob", Accept::kFloat32, {"num_seqs"});
  check.require(head == 0 || head == 5,
                "token: expected all of token, top_logit, logsumexp, final_token and "
                "final_logprob, or none, got ",
                head, " of them");
  const bool together = accepted.has_value() && accepted->dim() == 1 && accepted->size(0) == 1;
  if (together) {
    check(*accepted, "accepted", Accept::kBool, {1});
  } else {
    check(accepted, "accepted", Accept::kBool, {"num_seqs"});
  }
  check.require(layer >= 1 && layer <= INT32_MAX,
                "layer: expected a positive number of layers that have run, got ", layer);
  check(gone, "gone", Accept::kBool, {"num_seqs"});
  check(slot_mapping, "slot_mapping", Accept::kInt64, {"num_seqs"});
  check(seq_lens, "seq_lens", Accept::kInt32, {"num_seqs"});
  check(final_hidden, "final_hidden", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  check(final_confidence, "final_confidence", Accept::kFloat32, {"num_seqs"});
  check(exit_layer, "exit_layer", Accept::kInt32, {"num_seqs"});

  const int64_t element = size_of(check.dtype());
  ExitRowsParams params{};
  params.hidden = data<const void>(hidden);
  params.confidence = data<const float>(confidence);
  params.token = data_or_null<const int64_t>(token);
  params.top_logit = data_or_null<const float>(top_logit);
  params.logsumexp = data_or_null<const float>(logsumexp);
  params.accepted = data_or_null<const uint8_t>(accepted);
  params.accepted_stride = together ? 0 : 1;
  params.gone = data<uint8_t>(gone);
  params.slot_mapping = data<int64_t>(slot_mapping);
  params.seq_lens = data<int32_t>(seq_lens);
  params.final_hidden = data<void>(final_hidden);
  params.final_confidence = data<float>(final_confidence);
  params.final_token = data_or_null<int64_t>(final_token);
  params.final_logprob = data_or_null<float>(final_logprob);
  params.exit_layer = data<int32_t>(exit_layer);
  params.num_seqs = check["num_seqs"];
  params.row_bytes = check["hidden_size"] * element;
  params.hidden_stride = hidden.stride(0) * element;
  params.final_hidden_stride = final_hidden.stride(0) * element;
  params.layer = static_cast<int32_t>(layer);
  EECORE_RUN(exit_rows, params, hidden);
}

EECORE_IMPL(exit_rows, exit_rows)

}  // namespace
}  // namespace eecore
