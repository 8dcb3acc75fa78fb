// share_kv on CUDA: one block per row and layer.
#include "eecore/share_kv.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_share_kv(const ShareKvParams& params, Stream stream) {
  if (params.num_tokens == 0 || params.num_layers == 0) return;
  launch("share_kv", share_kv_kernel,
         {dim3(static_cast<unsigned>(params.num_tokens), static_cast<unsigned>(params.num_layers)),
          dim3(kShareKvThreads), 0, Launch::kAfterPrevious},
         stream, params);
}

}  // namespace eecore::cuda
