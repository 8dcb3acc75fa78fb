// accept_round on CUDA: one block per row, of one warp unless it may have to draw from a large
// vocabulary.
#include "eecore/accept_round.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_accept_round(const AcceptRoundParams& params, Stream stream) {
  constexpr int64_t kSmallVocab = 512;  // a few loads of one warp
  const bool small = params.sampled == nullptr || params.vocab_size <= kSmallVocab;
  launch("accept_round", small ? accept_round_kernel<32> : accept_round_kernel<1024>,
         {dim3(static_cast<unsigned>(params.num_rows)), dim3(small ? 32 : 1024), 0,
          Launch::kAfterPrevious},
         stream, params);
}

}  // namespace eecore::cuda
