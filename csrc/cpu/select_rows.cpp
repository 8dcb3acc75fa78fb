// select_rows on the CPU: a few hundred rows at most, so one thread.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

bool is_picked(const SelectRowsParams& params, int64_t i) {
  const int64_t r = params.row == nullptr ? i : params.row[i];
  return (params.kind == nullptr || params.kind[r] == params.wanted) &&
         (params.thresholds == nullptr || params.thresholds[r] < __builtin_inff()) &&
         (params.accepted == nullptr || !params.accepted[r]);
}

}  // namespace

void run_select_rows(const SelectRowsParams& params, const Parallel&) {
  const char* hidden = static_cast<const char*>(params.hidden);
  char* states = static_cast<char*>(params.states);
  int32_t count = 0;
  for (int64_t i = 0; i < params.num_active; ++i) {
    if (!is_picked(params, i)) continue;
    const char* from = hidden + i * params.hidden_stride;
    char* to = states + count * params.states_stride;
    if (from != to) copy_bytes(to, from, params.row_bytes);  // states may be hidden
    params.index[count++] = static_cast<int32_t>(i);
  }
  *params.count = count;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
