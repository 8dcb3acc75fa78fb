// embed_tokens on CUDA: one block per row, which is copied, multiplied, or made of int8 or of
// blocks.
#include "dispatch.h"
#include "eecore/embed_tokens.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_embed_tokens(const EmbedTokensParams& params, Stream stream) {
  const LaunchShape shape{dim3(static_cast<unsigned>(params.num_tokens)), dim3(kEmbedTokensThreads),
                          0, Launch::kAfterPrevious};
  const bool is_plain = params.scale == nullptr && params.table == nullptr;
  if (is_plain && params.multiplier == 1.0f) {
    return launch("embed_tokens", embed_tokens_kernel, shape, stream, params);
  }
  dispatch_dtype(params.dtype, "embed_tokens", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const auto kernel = is_plain                  ? embed_multiplied_tokens_kernel<T>
                        : params.table != nullptr ? embed_packed_tokens_kernel<T>
                                                  : embed_int8_tokens_kernel<T>;
    launch("embed_tokens", kernel, shape, stream, params);
  });
}

}  // namespace eecore::cuda
