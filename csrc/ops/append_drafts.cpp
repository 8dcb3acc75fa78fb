// append_drafts: a drafted token of each row that drafts, and what its next one starts from.
#include "backend.h"

namespace eecore {
namespace {

void append_drafts(const Tensor& hidden, const Tensor& token, const Tensor& confidence,
                   int64_t step, const Tensor& thresholds, const Tensor& stop_tokens,
                   const Tensor& max_drafts, const Tensor& round_slots, Tensor states,
                   Tensor tokens, Tensor confidences, Tensor num_drafted, Tensor drafting,
                   Tensor last_token, Tensor positions, Tensor slot_mapping, Tensor seq_lens,
                   Tensor all_done) {
  Checker check("append_drafts");
  check(hidden, "hidden", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  check(confidences, "confidences", Accept::kFloat32, {"num_seqs", "num_steps"});
  const int64_t num_steps = check["num_steps"];
  check.bind("num_steps + 1", num_steps + 1);
  check(token, "token", Accept::kInt64, {"num_seqs"});
  check(confidence, "confidence", Accept::kFloat32, {"num_seqs"});
  check(thresholds, "thresholds", Accept::kFloat32, {"num_seqs"});
  check(stop_tokens, "stop_tokens", Accept::kInt64, {"num_seqs", "num_stop_tokens"});
  check(max_drafts, "max_drafts", Accept::kInt64, {"num_seqs"});
  check(round_slots, "round_slots", Accept::kInt64, {"num_seqs", "num_steps + 1"});
  check(states, "states", Accept::kModel, {"num_seqs", "num_steps + 1", "hidden_size"}, 1);
  check(tokens, "tokens", Accept::kInt64, {"num_seqs", "num_steps + 1"});
  check(num_drafted, "num_drafted", Accept::kInt64, {"num_seqs"});
  check(drafting, "drafting", Accept::kBool, {"num_seqs"});
  check(last_token, "last_token", Accept::kInt64, {"num_seqs"});
  check(positions, "positions", Accept::kInt64, {"num_seqs"});
  check(slot_mapping, "slot_mapping", Accept::kInt64, {"num_seqs"});
  check(seq_lens, "seq_lens", Accept::kInt32, {"num_seqs"});
  check(all_done, "all_done", Accept::kBool, {1});
  check.require(step >= 0 && step < num_steps, "step: expected 0..num_steps-1=", num_steps - 1,
                ", got ", step);

  const int64_t element = size_of(check.dtype());
  AppendDraftsParams params{};
  params.hidden = data<const void>(hidden);
  params.token = data<const int64_t>(token);
  params.confidence = data<const float>(confidence);
  params.thresholds = data<const float>(thresholds);
  params.stop_tokens = data<const int64_t>(stop_tokens);
  params.max_drafts = data<const int64_t>(max_drafts);
  params.round_slots = data<const int64_t>(round_slots);
  params.states = data<void>(states);
  params.tokens = data<int64_t>(tokens);
  params.confidences = data<float>(confidences);
  params.num_drafted = data<int64_t>(num_drafted);
  params.drafting = data<uint8_t>(drafting);
  params.last_token = data<int64_t>(last_token);
  params.positions = data<int64_t>(positions);
  params.slot_mapping = data<int64_t>(slot_mapping);
  params.seq_lens = data<int32_t>(seq_lens);
  params.all_done = data<uint8_t>(all_done);
  params.num_seqs = check["num_seqs"];
  params.row_bytes = check["hidden_size"] * element;
  params.num_steps = num_steps;
  params.num_stop_tokens = check["num_stop_tokens"];
  params.hidden_stride = hidden.stride(0) * element;
  params.states_seq_stride = states.stride(0) * element;
  params.states_step_stride = states.stride(1) * element;
  params.step = step;
  EECORE_RUN(append_drafts, params, hidden);
}

EECORE_IMPL(append_drafts, append_drafts)

}  // namespace
}  // namespace eecore
