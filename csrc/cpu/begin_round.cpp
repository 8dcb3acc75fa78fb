// begin_round on the CPU: one pass over the rows, a few hundred at most, so one thread.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// How many of the drafts after the token that a row continues from are likely enough.
int64_t sure_drafts(const BeginRoundParams& params, int64_t row, int64_t source) {
  const int64_t drafted = min_of(params.num_ahead[source], params.ahead_steps);
  const float* probabilities = params.ahead_probabilities + source * params.ahead_steps;
  int64_t sure = 0;
  while (sure < drafted && probabilities[sure] >= params.thresholds[row]) ++sure;
  return sure;
}

}  // namespace

void run_begin_round(const BeginRoundParams& params, const Parallel&) {
  const int64_t width = params.num_steps + 1, size = params.page_size;
  bool all_done = true;
  for (int64_t row = 0; row < params.num_rows; ++row) {
    // Where the row's text is: where its last round ended, or where the caller says.
    const int64_t source = params.sources == nullptr ? -1 : params.sources[row];
    const bool follows = source >= 0;
    const int64_t token = follows ? params.next_token[source] : params.token_ids[row];
    const int64_t position = follows ? params.next_position[source] : params.start[row];
    const int64_t left = follows ? params.next_left[source] : params.tokens_left[row];
    const int64_t most = max_of(
        min_of(min_of(params.max_drafts[row], wrapping_add(left, -1)), params.num_steps), -1);
    int64_t given = params.drafts == nullptr ? -1 : params.num_given[row];
    const int64_t* its_drafts = params.drafts + row * params.num_steps;
    if (follows && given < 0 && params.ahead_tokens != nullptr) {
      its_drafts = params.ahead_tokens + source * (params.ahead_steps + 1) + 1;
      given = sure_drafts(params, row, source);
    }
    const bool done = most <= 0 || given >= 0;
    params.first_position[row] = position;
    params.left[row] = left;
    params.most[row] = most;
    params.tokens[row * width] = token;
    const int64_t num_drafted = max_of(min_of(given, most), 0);
    params.num_drafted[row] = num_drafted;
    for (int64_t k = 0; k < num_drafted; ++k) {
      params.tokens[row * width + 1 + k] = its_drafts[k];
    }
    params.done[row] = done;
    all_done = all_done && done;

    // The slots of the tokens that the row may have.
    const int32_t* pages = params.page_table + row * params.page_table_stride;
    int64_t* slots = params.round_slots + row * width;
    for (int64_t k = 0; k < width; ++k) {
      const int64_t at = wrapping_add(position, k);
      const int64_t page = max_of(min_of(at / size, params.max_pages - 1), 0);
      slots[k] = k <= most ? pages[page] * size + at % size : -1;
    }

    params.row[row] = static_cast<int32_t>(row);
    params.active_token_ids[row] = max_of(token, 0);  // -1, no token, is not embedded
    params.positions[row] = position;
    params.slot_mapping[row] = done ? -1 : slots[0];
    const int64_t keys = max_of(wrapping_add(position, params.own_key), 1);
    params.seq_lens[row] = done ? 1 : static_cast<int32_t>(keys);
  }
  *params.all_done = all_done;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
