// add_normed on CUDA: one block per row.
#include "eecore/add_normed.cuh"
#include "skinny_launch.cuh"

namespace eecore::cuda {

void run_add_normed(const AddNormedParams& params, Stream stream) {
  dispatch_dtype(params.dtype, "add_normed", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const AlignedRows aligned = {is_aligned(params.x, params.x_stride, sizeof(T)),
                                 is_aligned(params.norm_weight),
                                 is_aligned(params.residual, params.residual_stride, sizeof(T)),
                                 is_aligned(params.out, params.out_stride, sizeof(T))};
    launch("add_normed", add_normed_kernel<T>,
           {dim3(static_cast<unsigned>(params.num_tokens)), dim3(kRmsNormThreads), 0,
            Launch::kAfterPrevious},
           stream, params, aligned);
  });
}

}  // namespace eecore::cuda
