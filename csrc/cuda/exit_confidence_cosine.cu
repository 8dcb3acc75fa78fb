// exit_confidence_cosine on CUDA: one block for each row.
#include "dispatch.h"
#include "eecore/exit_confidence_cosine.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_exit_confidence_cosine(const ExitConfidenceCosineParams& params, Stream stream) {
  dispatch_dtype(params.dtype, "exit_confidence_cosine", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const LaunchShape shape = {dim3(static_cast<unsigned>(params.num_seqs)),
                               dim3(kCosineThreadsPerRow), 0, Launch::kAfterPrevious};
    launch("exit_confidence_cosine", exit_confidence_cosine_kernel<T>, shape, stream, params);
  });
}

}  // namespace eecore::cuda
