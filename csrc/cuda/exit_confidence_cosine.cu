// exit_confidence_cosine on CUDA: one block per row.
#include "dispatch.h"
#include "eecore/exit_confidence_cosine.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_exit_confidence_cosine(const ExitConfidenceCosineParams& params, Stream stream) {
  // If the rows fit one block, it also accepts them or lets them exit; else that is a separate
  // launch.
  const bool accepts = params.accept.num_survivors != nullptr;
  const bool lets_exit = params.exit.all_exited != nullptr;
  const bool in_one_block =
      (accepts || lets_exit) && params.num_seqs >= 1 && params.num_seqs <= kCosineMaxRowsPerBlock;
  const int64_t rows = in_one_block ? params.num_seqs : 1;
  ExitConfidenceCosineParams of_kernel = params;
  if (!in_one_block) of_kernel.accept = {}, of_kernel.exit = {};
  dispatch_dtype(params.dtype, "exit_confidence_cosine", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const LaunchShape shape = {dim3(static_cast<unsigned>(params.num_seqs / rows)),
                               dim3(static_cast<unsigned>(rows * kCosineThreadsPerRow)), 0,
                               Launch::kAfterPrevious};
    launch("exit_confidence_cosine", exit_confidence_cosine_kernel<T>, shape, stream, of_kernel);
  });
  if (in_one_block) return;
  if (accepts) run_accept_mask(params.accept, stream);
  if (lets_exit) run_exit_rows(params.exit, stream);
}

}  // namespace eecore::cuda
