// append_drafts on CUDA: one block that decides, and one for each row's state.
#include "eecore/append_drafts.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_append_drafts(const AppendDraftsParams& params, Stream stream) {
  const int64_t num_states = params.hidden == nullptr ? 0 : params.num_active;
  launch("append_drafts", append_drafts_kernel,
         {dim3(static_cast<unsigned>(1 + num_states)), dim3(kAppendDraftsThreads), 0,
          Launch::kAfterPrevious},
         stream, params);
}

}  // namespace eecore::cuda
