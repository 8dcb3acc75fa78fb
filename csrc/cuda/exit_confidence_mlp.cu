// exit_confidence_mlp on CUDA: one launch, or two where the units of the hidden layer are shared
// out among blocks.
#include "dispatch.h"
#include "eecore/exit_confidence_mlp.cuh"
#include "launch.cuh"

namespace eecore::cuda {
namespace {

// Units of a block: all of them where one block reads their weights quickly. It depends on the
// classifier alone, so that a row's result does not depend on its neighbours.
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
  float* parts = static_cast<float*>(params.workspace);
  dispatch_dtype(params.dtype, "exit_confidence_mlp", [&](auto tag) {
    using T = typename decltype(tag)::type;
    // A linear classifier's weights are few: more blocks pay more than reading them once.
    const bool by_row = params.num_seqs == 1 || params.weight2 == nullptr;
    const int64_t rows = by_row ? 1 : kMlpMaxRows;
    const LaunchShape shape = {dim3(static_cast<unsigned>((params.num_seqs + rows - 1) / rows),
                                    static_cast<unsigned>(slices)),
                               dim3(kMlpThreads), 0, Launch::kAfterPrevious};
    launch("exit_confidence_mlp",
           by_row ? exit_confidence_mlp_kernel<T, 1> : exit_confidence_mlp_kernel<T, kMlpMaxRows>,
           shape, stream, params, slice_size(params), parts);
  });
  if (slices == 1) return;
  const int64_t blocks = (params.num_seqs + kMlpFinishRows - 1) / kMlpFinishRows;
  launch(
      "exit_confidence_mlp_finish", exit_confidence_mlp_finish_kernel,
      {dim3(static_cast<unsigned>(blocks)), dim3(32 * kMlpFinishRows), 0, Launch::kAfterPrevious},
      stream, params, slices, const_cast<const float*>(parts));
}

}  // namespace eecore::cuda
