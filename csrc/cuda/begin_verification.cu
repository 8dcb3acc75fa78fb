// begin_verification on CUDA: one block for all rows.
#include "eecore/begin_verification.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_begin_verification(const BeginVerificationParams& params, Stream stream) {
  launch("begin_verification", begin_verification_kernel,
         {dim3(1), dim3(kBeginVerificationThreads), 0, Launch::kAfterPrevious}, stream, params);
}

}  // namespace eecore::cuda
