// exit_rows on CUDA: one block.
#include "eecore/exit_rows.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_exit_rows(const ExitRowsParams& params, Stream stream) {
  launch("exit_rows", exit_rows_kernel,
         {dim3(1), dim3(kExitRowsThreads), 0, Launch::kAfterPrevious}, stream, params);
}

}  // namespace eecore::cuda
