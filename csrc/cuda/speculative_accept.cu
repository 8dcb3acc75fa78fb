// speculative_accept on CUDA: one warp per greedy sequence, one block per sequence that samples.
#include "dispatch.h"
#include "eecore/speculative_accept.cuh"
#include "launch.cuh"

namespace eecore::cuda {

void run_speculative_accept(const SpeculativeAcceptParams& params, Stream stream) {
  const auto blocks = [](int64_t count) { return dim3(static_cast<unsigned>(count)); };
  if (params.target_tokens != nullptr) {
    constexpr int kSeqs = kGreedyThreads / 32;
    launch("speculative_accept_greedy", speculative_accept_greedy_kernel,
           {blocks((params.num_seqs + kSeqs - 1) / kSeqs), dim3(kGreedyThreads), 0,
            Launch::kAfterPrevious},
           stream, params);
    return;
  }
  constexpr int64_t kSmallVocab = 512;  // a few loads of one warp
  const bool small = params.vocab_size <= kSmallVocab;
  launch("speculative_accept_sampling",
         small ? speculative_accept_sampling_kernel<32> : speculative_accept_sampling_kernel<1024>,
         {blocks(params.num_seqs), dim3(small ? 32 : 1024), 0, Launch::kAfterPrevious}, stream,
         params);
}

}  // namespace eecore::cuda
