// gather_states on CUDA: one block per ragged row.
#include "eecore/gather_states.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_gather_states(const GatherStatesParams& params, Stream stream) {
  launch("gather_states", gather_states_kernel,
         {dim3(static_cast<unsigned>(params.max_tokens)), dim3(kGatherStatesThreads), 0,
          Launch::kAfterPrevious},
         stream, params);
}

}  // namespace eecore::cuda
