// exit_rows on the CPU: a few hundred rows at most, so one thread.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// Records the measurement of the j-th measured row, and whether it accepts the row.
void measure(const ExitRowsParams& params, int64_t j) {
  const int32_t r = params.row[params.asked == nullptr ? j : params.asked[j]];
  const float threshold = params.thresholds[r];
  const bool asked = !params.exited[r] && threshold < __builtin_inff();
  // With a head, an accepted row keeps the token of the layer that accepted it.
  if (!asked || (params.token != nullptr && params.accepted[r])) return;
  float confidence = params.confidence[j];
  if (params.cumulative && params.measured_at[r] > 0) {
    const float before = params.final_confidence[r];
    confidence = before + (1.0f - before) * confidence;
  }
  params.final_confidence[r] = confidence;
  params.measured_at[r] = params.layer;
  if (params.token != nullptr) {
    params.final_token[r] = params.token[j];
    params.final_logprob[r] = params.top_logit[j] - params.logsumexp[j];
    params.token_at[r] = params.layer;
  }
  if (threshold < 1.0f && confidence >= threshold) params.accepted[r] = 1;
}

// Records the exit of active row i.
void record_exit(const ExitRowsParams& params, int64_t i) {
  const int32_t r = params.row[i];
  copy_bytes(static_cast<char*>(params.final_hidden) + r * params.final_hidden_stride,
             static_cast<const char*>(params.hidden) + i * params.hidden_stride, params.row_bytes);
  params.exit_layer[r] = params.layer;
  if (params.fills[r]) params.fill_from[r] = params.layer;
  const bool has_token = params.token_at[r] == params.layer;
  params.pending[r] = params.kind[r] == kFromLogits ? kFromLogits : !has_token;
  params.exited[r] = 1;
  params.slot_mapping[i] = -1;
  params.seq_lens[i] = 1;
}

}  // namespace

void run_exit_rows(const ExitRowsParams& params, const Parallel&) {
  if (params.confidence != nullptr) {
    for (int64_t j = 0; j < params.num_asked; ++j) measure(params, j);
  }
  if (!params.decide) return;
  bool held_back = false;  // rows that only exit together
  for (int64_t r = 0; r < params.num_rows; ++r) {
    held_back = held_back || (params.together[r] && !params.exited[r] && !params.accepted[r]);
  }
  for (int64_t i = 0; i < params.num_active; ++i) {
    const int32_t r = params.row[i];
    const bool goes = params.accepted[r] && !(params.together[r] && held_back);
    if (!params.exited[r] && (goes || params.exit_after[r] <= params.layer)) record_exit(params, i);
  }
  bool all_exited = true;
  for (int64_t r = 0; r < params.num_rows; ++r) all_exited = all_exited && params.exited[r];
  *params.all_exited = all_exited;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
