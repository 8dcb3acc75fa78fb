// append_drafts: appends one drafted token to each active row that drafts, and sets up its next
// step.
#include "backend.h"
#include "condition_argument.h"
#include "index_checks.h"

namespace eecore {
namespace {

void append_drafts(const std::optional<Tensor>& hidden, const Tensor& token,
                   const Tensor& confidence, int64_t step, const Tensor& thresholds,
                   const Tensor& stop_tokens, const Tensor& most, const Tensor& round_slots,
                   const Tensor& row, std::optional<Tensor> states, Tensor tokens,
                   Tensor confidences, Tensor num_drafted, Tensor done, Tensor all_done,
                   Tensor active_token_ids, Tensor positions, Tensor slot_mapping, Tensor seq_lens,
                   std::optional<int64_t> condition, bool own_key) {
  Checker check("append_drafts");
  check(token, "token", Accept::kInt64, {"num_active"});
  check(confidence, "confidence", Accept::kFloat32, {"num_active"});
  check.written(confidences, "confidences", Accept::kFloat32, {"num_rows", "num_steps"});
  const int64_t num_steps = check["num_steps"];
  check.bind("num_steps + 1", num_steps + 1);
  const bool keeps = check(hidden, "hidden", Accept::kModel, {"num_active", "hidden_size"}, 1);
  check.all_or_none({{"hidden", hidden}, {"states", states}});
  check.written(states, "states", Accept::kModel, {"num_rows", "num_steps + 1", "hidden_size"}, 1);
  check(thresholds, "thresholds", Accept::kFloat32, {"num_rows"});
  check(stop_tokens, "stop_tokens", Accept::kInt64, {"num_rows", "num_stop_tokens"});
  check(most, "most", Accept::kInt64, {"num_rows"});
  check(round_slots, "round_slots", Accept::kInt64, {"num_rows", "num_steps + 1"});
  check(row, "row", Accept::kInt32, {"num_active"});
  check.written(tokens, "tokens", Accept::kInt64, {"num_rows", "num_steps + 1"});
  check.written(num_drafted, "num_drafted", Accept::kInt64, {"num_rows"});
  check.written(done, "done", Accept::kBool, {"num_rows"});
  check.written(all_done, "all_done", Accept::kBool, {1});
  check.written(active_token_ids, "active_token_ids", Accept::kInt64, {"num_active"});
  check.written(positions, "positions", Accept::kInt64, {"num_active"});
  check.written(slot_mapping, "slot_mapping", Accept::kInt64, {"num_active"});
  check.written(seq_lens, "seq_lens", Accept::kInt32, {"num_active"});
  check.require(step >= 0 && step < num_steps, "step: expected 0..num_steps-1=", num_steps - 1,
                ", got ", step);

  AppendDraftsParams params{};
  if (keeps) {
    const int64_t element = size_of(check.dtype());
    params.hidden = data<const void>(*hidden);
    params.states = data<void>(*states);
    params.row_bytes = check["hidden_size"] * element;
    params.hidden_stride = hidden->stride(0) * element;
    params.states_row_stride = states->stride(0) * element;
    params.states_step_stride = states->stride(1) * element;
  }
  params.token = data<const int64_t>(token);
  params.confidence = data<const float>(confidence);
  params.thresholds = data<const float>(thresholds);
  params.stop_tokens = data<const int64_t>(stop_tokens);
  params.most = data<const int64_t>(most);
  params.round_slots = data<const int64_t>(round_slots);
  params.row = data<const int32_t>(row);
  params.tokens = data<int64_t>(tokens);
  params.confidences = data<float>(confidences);
  params.num_drafted = data<int64_t>(num_drafted);
  params.done = data<uint8_t>(done);
  params.all_done = data<uint8_t>(all_done);
  params.active_token_ids = data<int64_t>(active_token_ids);
  params.positions = data<int64_t>(positions);
  params.slot_mapping = data<int64_t>(slot_mapping);
  params.seq_lens = data<int32_t>(seq_lens);
  params.num_active = check["num_active"];
  params.num_steps = num_steps;
  params.num_stop_tokens = check["num_stop_tokens"];
  params.step = step;
  params.own_key = own_key ? 1 : 0;
  params.condition = condition_of(check, token, condition);
#ifndef EECORE_BACKEND_CUDA
  check_range(check, "row", params.row, params.num_active, 0, check["num_rows"]);
#endif
  EECORE_RUN(append_drafts, params, token);
}

EECORE_OP(append_drafts,
          "Tensor? hidden, Tensor token, Tensor confidence, int step, Tensor thresholds, "
          "Tensor stop_tokens, Tensor most, Tensor round_slots, Tensor row, Tensor(a!)? states, "
          "Tensor(b!) tokens, Tensor(c!) confidences, Tensor(d!) num_drafted, Tensor(e!) done, "
          "Tensor(f!) all_done, Tensor(g!) active_token_ids, Tensor(h!) positions, "
          "Tensor(i!) slot_mapping, Tensor(j!) seq_lens, int? condition=None, bool own_key=True")

}  // namespace
}  // namespace eecore
