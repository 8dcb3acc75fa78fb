// accept_mask on the CPU: one pass over the rows of a batch, a few hundred at most, so one thread.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {

void run_accept_mask(const AcceptMaskParams& params, const Parallel&) {
  int32_t num_survivors = 0;
  for (int64_t row = 0; row < params.num_seqs; ++row) {
    // False for NaN on either side; at a threshold of 1 a row never exits early.
    const bool confident =
        params.thresholds[row] < 1.0f && params.confidence[row] >= params.thresholds[row];
    if (confident && !params.status[row]) {
      params.status[row] = 1;
      params.exit_layer[row] = params.layer;
    }
    if (!params.status[row]) params.survivors[num_survivors++] = static_cast<int32_t>(row);
  }
  for (int64_t i = num_survivors; i < params.num_seqs; ++i) params.survivors[i] = -1;
  *params.num_survivors = num_survivors;
  *params.all_accepted = num_survivors == 0;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
