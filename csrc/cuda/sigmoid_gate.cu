// sigmoid_gate on CUDA: a grid over the heads of the tokens.
#include "dispatch.h"
#include "eecore/sigmoid_gate.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_sigmoid_gate(const SigmoidGateParams& params, Stream stream) {
  dispatch_dtype(params.dtype, "sigmoid_gate", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("sigmoid_gate", sigmoid_gate_kernel<T>,
           {dim3(static_cast<unsigned>(params.num_tokens), static_cast<unsigned>(params.num_heads)),
            dim3(kSigmoidGateThreads), 0, Launch::kAfterPrevious},
           stream, params);
  });
}

}  // namespace eecore::cuda
