// accept_mask on CUDA: one block; the batch is a few hundred rows at most, so latency is the cost.
#include "eecore/accept_mask.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_accept_mask(const AcceptMaskParams& params, Stream stream) {
  launch("accept_mask", accept_mask_kernel,
         {dim3(1), dim3(kAcceptMaskThreads), 0, Launch::kAfterPrevious}, stream, params);
}

}  // namespace eecore::cuda
