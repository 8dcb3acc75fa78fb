// gather_states on the CPU: copies each ragged row; threads share the sequences.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {

void run_gather_states(const GatherStatesParams& params, const Parallel& parallel) {
  const char* states = static_cast<const char*>(params.states);
  const char* last = static_cast<const char*>(params.last);
  char* out = static_cast<char*>(params.out);
  const int64_t row_bytes = max_of(params.row_bytes, 1);
  const int64_t grain = ceil_div(parallel.bytes_per_range, row_bytes);
  parallel_for(parallel, params.num_seqs, grain, [&](int64_t begin, int64_t end) {
    for (int64_t seq = begin; seq < end; ++seq) {
      const int64_t first = params.query_start_loc[seq];
      const int64_t count = params.query_start_loc[seq + 1] - first;
      for (int64_t k = 0; k < count; ++k) {
        const char* from =
            k + 1 < count ? states + seq * params.states_row_stride + k * params.states_step_stride
                          : last + seq * params.last_stride;
        copy_bytes(out + (first + k) * params.out_stride, from, params.row_bytes);
      }
    }
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
