// begin_round on CUDA: one block for all rows.
#include "eecore/begin_round.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_begin_round(const BeginRoundParams& params, Stream stream) {
  launch("begin_round", begin_round_kernel,
         {dim3(1), dim3(kBeginRoundThreads), 0, Launch::kAfterPrevious}, stream, params);
}

}  // namespace eecore::cuda
