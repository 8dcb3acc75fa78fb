// embed_tokens on CUDA: a block for each row.
#include "eecore/embed_tokens.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_embed_tokens(const EmbedTokensParams& params, Stream stream) {
  launch("embed_tokens", embed_tokens_kernel,
         {dim3(static_cast<unsigned>(params.num_tokens)), dim3(kEmbedTokensThreads), 0,
          Launch::kAfterPrevious},
         stream, params);
}

}  // namespace eecore::cuda
