// append_drafts on the CPU: one pass over the rows, a few hundred at most, so one thread.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

bool is_stop(const AppendDraftsParams& params, int64_t row, int64_t token) {
  const int64_t* stops = params.stop_tokens + row * params.num_stop_tokens;
  for (int64_t i = 0; i < params.num_stop_tokens; ++i) {
    if (stops[i] == token) return true;
  }
  return false;
}

}  // namespace

void run_append_drafts(const AppendDraftsParams& params, const Parallel&) {
  const int64_t step = params.step, width = params.num_steps + 1;
  const char* hidden = static_cast<const char*>(params.hidden);
  bool all_done = true;
  for (int64_t i = 0; i < params.num_active; ++i) {
    const int64_t row = params.row[i];
    if (params.done[row]) continue;
    if (hidden != nullptr) {
      char* states = static_cast<char*>(params.states) + row * params.states_row_stride;
      copy_bytes(states + step * params.states_step_stride, hidden + i * params.hidden_stride,
                 params.row_bytes);
    }
    const int64_t token = params.token[i], position = wrapping_add(params.positions[i], 1);
    params.tokens[row * width + step + 1] = token;
    params.confidences[row * params.num_steps + step] = params.confidence[i];
    params.num_drafted[row] = step + 1;
    const bool goes_on = params.confidence[i] >= params.thresholds[row] &&
                         step + 1 < params.most[row] && !is_stop(params, row, token);
    params.done[row] = !goes_on;
    params.active_token_ids[i] = max_of(token, 0);  // -1, no token, is not embedded
    params.positions[i] = position;
    params.slot_mapping[i] = goes_on ? params.round_slots[row * width + step + 1] : -1;
    if (!goes_on) {
      params.seq_lens[i] = 1;
    } else if (params.own_key != 0) {
      params.seq_lens[i] = static_cast<int32_t>(wrapping_add(position, 1));
    }
    if (goes_on) all_done = false;
  }
  *params.all_done = all_done;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
