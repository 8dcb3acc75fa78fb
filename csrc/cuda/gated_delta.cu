// gated_delta on CUDA: a grid over the value heads of the sequences, and where value heads share a
// key head a second one, which keeps the rows that all of them have read.
#include "dispatch.h"
#include "eecore/gated_delta.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_gated_delta(const GatedDeltaParams& params, Stream stream) {
  const auto num_seqs = static_cast<unsigned>(params.num_seqs);
  const auto num_key_heads = static_cast<unsigned>(params.num_key_heads);
  const auto num_value_heads = static_cast<unsigned>(params.num_value_heads);
  dispatch_dtype(params.dtype, "gated_delta", [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_at_least<128, 256>(params.key_dim, "gated_delta", "key_dim", [&](auto keys) {
      dispatch_at_least<128, 256>(params.value_dim, "gated_delta", "value_dim", [&](auto values) {
        launch("gated_delta", gated_delta_kernel<T, keys(), values()>,
               {dim3(num_seqs, num_value_heads), dim3(DeltaSizes<keys(), values()>::kThreads), 0,
                Launch::kAfterPrevious},
               stream, params);
      });
    });
    if (num_value_heads == num_key_heads) return;
    launch("gated_delta", keep_delta_rows_kernel<T>,
           {dim3(num_seqs, num_key_heads), dim3(kDeltaKeepThreads), 0, Launch::kAfterPrevious},
           stream, params);
  });
}

}  // namespace eecore::cuda
