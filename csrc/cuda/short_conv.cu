// short_conv on CUDA: a grid over the tokens and blocks of their features.
#include "dispatch.h"
#include "eecore/short_conv.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_short_conv(const ShortConvParams& params, Stream stream) {
  dispatch_dtype(params.dtype, "short_conv", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t blocks = (params.hidden_size + kShortConvThreads - 1) / kShortConvThreads;
    launch("short_conv", short_conv_kernel<T>,
           {dim3(static_cast<unsigned>(params.num_tokens), static_cast<unsigned>(blocks)),
            dim3(kShortConvThreads), 0, Launch::kAfterPrevious},
           stream, params);
  });
}

}  // namespace eecore::cuda
