// append_kv on CUDA: one grid over the tokens and their heads of q, k and v, or, where all heads of
// a token are normed at once, over the tokens.
#include "dispatch.h"
#include "eecore/append_kv.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_append_kv(const AppendKvParams& params, Stream stream) {
  dispatch_dtype(params.dtype, "append_kv", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const HeadItems items = HeadItems::of<T>(params.head_dim, params.rotary_dim);
    int lanes = 4;
    while (lanes < 32 && lanes < items.count<T>()) lanes *= 2;
    const int heads_per_block = kAppendKvThreads / lanes;
    const int64_t heads = params.num_q_heads + 2 * params.num_kv_heads;
    const LaunchShape shape = {
        dim3(static_cast<unsigned>(params.num_tokens),
             static_cast<unsigned>((heads + heads_per_block - 1) / heads_per_block)),
        dim3(lanes, heads_per_block), 0, Launch::kAfterPrevious};
    dispatch_at_least<1, 3>(
        (items.count<T>() + lanes - 1) / lanes, "append_kv", "items of a lane", [&](auto per_lane) {
          if (params.norms_all_q || params.norms_all_k) {
            const auto kernel = params.cache_format.is_float8
                                    ? append_normed_kv_kernel<T, per_lane(), Float8>
                                    : append_normed_kv_kernel<T, per_lane(), T>;
            launch("append_kv", kernel,
                   {dim3(static_cast<unsigned>(params.num_tokens)), dim3(kAppendKvThreads), 0,
                    Launch::kAfterPrevious},
                   stream, params, items, lanes);
            return;
          }
          const auto kernel = params.cache_format.is_float8 ? append_kv_float8_kernel<T, per_lane()>
                                                            : append_kv_kernel<T, per_lane()>;
          launch("append_kv", kernel, shape, stream, params, items);
        });
  });
}

}  // namespace eecore::cuda
