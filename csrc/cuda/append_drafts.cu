// append_drafts on CUDA: a block that decides, and one for each row's state.
#include "eecore/append_drafts.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_append_drafts(const AppendDraftsParams& params, Stream stream) {
  launch("append_drafts", append_drafts_kernel,
         {dim3(static_cast<unsigned>(params.num_seqs + 1)), dim3(kAppendDraftsThreads), 0,
          Launch::kAfterPrevious},
         stream, params);
}

}  // namespace eecore::cuda
