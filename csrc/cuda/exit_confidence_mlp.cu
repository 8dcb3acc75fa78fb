// exit_confidence_mlp on CUDA: one launch, or two where several blocks share the units of the
// hidden layer.
#include "dispatch.h"
#include "eecore/exit_confidence_mlp.cuh"
#include "launch.cuh"

namespace eecore::cuda {
namespace {

constexpr int64_t kFinishRows = 8;  // rows that a block of the second kernel has warps for

// Units of a block: all of them where one block reads their weights quickly. It depends only on the
// classifier, so that a row's result does not depend on its neighbours.
int64_t slice_size(const ExitConfidenceMlpParams& params) {
  constexpr int64_t kBytesOfOneBlock = 256 * 1024;
  constexpr int64_t kMaxSlices = 512;
  const int64_t bytes = params.inner_size * params.hidden_size * int64_t{sizeof(float)};
  if (params.weight2 == nullptr || bytes <= kBytesOfOneBlock) return params.inner_size;
  const int64_t tiles = (params.inner_size + kMlpUnits - 1) / kMlpUnits;
  return (tiles + kMaxSlices - 1) / kMaxSlices * kMlpUnits;
}

int64_t num_slices(const ExitConfidenceMlpParams& params) {
  const int64_t size = slice_size(params);
  return (params.inner_size + size - 1) / size;
}

}  // namespace

int64_t exit_confidence_mlp_workspace(const ExitConfidenceMlpParams& params, int) {
  const int64_t slices = num_slices(params);
  return slices == 1 ? 0 : slices * params.num_seqs * 2 * int64_t{sizeof(float)};
}

void run_exit_confidence_mlp(const ExitConfidenceMlpParams& params, Stream stream) {
  const int64_t slices = num_slices(params);
  // If one block measures or finishes the rows, it also accepts them or lets them exit; else that
  // is a separate launch.
  const bool accepts = params.accept.num_survivors != nullptr;
  const bool lets_exit = params.exit.all_exited != nullptr;
  const int64_t rows_of_one_block = slices == 1 ? kMlpMaxRows : kMlpMaxFinishThreads / 32;
  const bool in_one_block =
      (accepts || lets_exit) && params.num_seqs >= 1 && params.num_seqs <= rows_of_one_block;
  const bool measures_in_one = in_one_block && slices == 1;
  ExitConfidenceMlpParams measuring = params, finishing = params;
  if (!measures_in_one) measuring.accept = {}, measuring.exit = {};
  if (!in_one_block) finishing.accept = {}, finishing.exit = {};

  float* parts = static_cast<float*>(params.workspace);
  dispatch_dtype(params.dtype, "exit_confidence_mlp", [&](auto tag) {
    using T = typename decltype(tag)::type;
    // A linear classifier has few weights: more blocks pay more than reading them once.
    const bool one_by_one = params.num_seqs == 1 || (params.weight2 == nullptr && !measures_in_one);
    const int64_t rows = one_by_one ? 1 : kMlpMaxRows;
    const LaunchShape shape = {dim3(static_cast<unsigned>((params.num_seqs + rows - 1) / rows),
                                    static_cast<unsigned>(slices)),
                               dim3(kMlpThreads), 0, Launch::kAfterPrevious};
    launch(
        "exit_confidence_mlp",
        one_by_one ? exit_confidence_mlp_kernel<T, 1> : exit_confidence_mlp_kernel<T, kMlpMaxRows>,
        shape, stream, measuring, slice_size(params), parts);
  });
  if (slices > 1) {
    const int64_t rows = in_one_block ? std::max(params.num_seqs, kFinishRows) : kFinishRows;
    const LaunchShape shape = {dim3(static_cast<unsigned>((params.num_seqs + rows - 1) / rows)),
                               dim3(static_cast<unsigned>(32 * rows)), 0, Launch::kAfterPrevious};
    launch("exit_confidence_mlp_finish", exit_confidence_mlp_finish_kernel, shape, stream,
           finishing, slices, const_cast<const float*>(parts));
  }
  if (in_one_block) return;
  if (accepts) run_accept_mask(params.accept, stream);
  if (lets_exit) run_exit_rows(params.exit, stream);
}

}  // namespace eecore::cuda
