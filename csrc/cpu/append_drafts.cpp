// append_drafts on the CPU: one pass over the rows, a few hundred at most, so one thread.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

bool is_stop(const AppendDraftsParams& params, int64_t row) {
  const int64_t* stops = params.stop_tokens + row * params.num_stop_tokens;
  for (int64_t i = 0; i < params.num_stop_tokens; ++i) {
    if (stops[i] == params.token[row]) return true;
  }
  return false;
}

}  // namespace

void run_append_drafts(const AppendDraftsParams& params, const Parallel&) {
  const int64_t step = params.step, width = params.num_steps + 1;
  const char* hidden = static_cast<const char*>(params.hidden);
  char* states = static_cast<char*>(params.states) + step * params.states_step_stride;
  bool all_done = true;
  for (int64_t row = 0; row < params.num_seqs; ++row) {
    if (!params.drafting[row]) continue;
    __builtin_memcpy(states + row * params.states_seq_stride, hidden + row * params.hidden_stride,
                     params.row_bytes);
    params.tokens[row * width + step + 1] = params.token[row];
    params.confidences[row * params.num_steps + step] = params.confidence[row];
    params.num_drafted[row] = step + 1;
    params.last_token[row] = params.token[row];
    params.positions[row] += 1;
    const bool goes_on = params.confidence[row] >= params.thresholds[row] &&
                         step + 1 < params.max_drafts[row] && !is_stop(params, row);
    params.drafting[row] = goes_on;
    params.slot_mapping[row] = goes_on ? params.round_slots[row * width + step + 1] : -1;
    params.seq_lens[row] = goes_on ? static_cast<int32_t>(params.positions[row] + 1) : 1;
    if (goes_on) all_done = false;
  }
  *params.all_done = all_done;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
