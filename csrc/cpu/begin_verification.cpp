// begin_verification on the CPU: one pass over the rows, a few hundred at most, so one thread.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {

void run_begin_verification(const BeginVerificationParams& params, const Parallel&) {
  const int64_t width = params.num_steps + 1;
  int64_t at = 0;  // ragged rows so far
  for (int64_t row = 0; row < params.num_rows; ++row) {
    const bool has_round = params.most[row] >= 0;
    const int64_t last = has_round ? params.num_drafted[row] : 0;
    const int64_t first_position = params.first_position[row];
    const int64_t* tokens = params.tokens + row * width;
    const int64_t* slots = params.round_slots + row * width;
    const int64_t length = wrapping_add(first_position, last + 1);
    params.last_tokens[row] = has_round ? max_of(tokens[last], 0) : 0;
    params.last_positions[row] = has_round ? wrapping_add(length, -1) : 0;
    params.last_slots[row] = has_round ? slots[last] : -1;
    params.last_seq_lens[row] = has_round ? static_cast<int32_t>(length) : 1;
    params.seq_lens[row] = has_round ? static_cast<int32_t>(length) : 0;

    params.query_start_loc[row] = static_cast<int32_t>(at);
    for (int64_t k = 0; has_round && k <= last; ++k, ++at) {
      params.token_ids[at] = max_of(tokens[k], 0);  // -1, no token, is not embedded
      params.positions[at] = wrapping_add(first_position, k);
      params.slot_mapping[at] = slots[k];
      params.sequence[at] = static_cast<int32_t>(row);
    }
  }
  params.query_start_loc[params.num_rows] = static_cast<int32_t>(at);
  *params.num_tokens = static_cast<int32_t>(at);
  for (; at < params.max_tokens; ++at) {
    params.token_ids[at] = 0;
    params.positions[at] = 0;
    params.slot_mapping[at] = -1;
    params.sequence[at] = 0;
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
