// exit_rows on the CPU: a copy of some rows, a few hundred at most, so one thread.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {

void run_exit_rows(const ExitRowsParams& params, const Parallel&) {
  const char* hidden = static_cast<const char*>(params.hidden);
  char* final_hidden = static_cast<char*>(params.final_hidden);
  for (int64_t row = 0; row < params.num_seqs; ++row) {
    const bool accepted =
        params.accepted == nullptr || params.accepted[row * params.accepted_stride];
    if (!accepted || params.gone[row]) continue;
    __builtin_memcpy(final_hidden + row * params.final_hidden_stride,
                     hidden + row * params.hidden_stride, params.row_bytes);
    params.final_confidence[row] = params.confidence[row];
    if (params.token != nullptr) {
      params.final_token[row] = params.token[row];
      params.final_logprob[row] = params.top_logit[row] - params.logsumexp[row];
    }
    params.exit_layer[row] = params.layer;
    params.gone[row] = 1;
    params.slot_mapping[row] = -1;
    params.seq_lens[row] = 1;
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
