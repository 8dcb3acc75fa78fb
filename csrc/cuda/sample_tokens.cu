// sample_tokens on CUDA: a block for each row of logits.
#include "dispatch.h"
#include "eecore/sample_tokens.cuh"
#include "launch.cuh"

namespace eecore::cuda {
namespace {

// Between the rows of the workspace, in float32: whole 16-byte accesses.
int64_t value_stride(const SampleTokensParams& params) {
  return (params.vocab_size + params.num_bias + 3) / 4 * 4;
}

}  // namespace

int64_t sample_tokens_workspace(const SampleTokensParams& params, int) {
  return params.num_rows * value_stride(params) * int64_t{sizeof(float)};
}

void run_sample_tokens(const SampleTokensParams& params, Stream stream) {
  constexpr int64_t kSmallVocab = 4096;  // few loads for each thread
  const bool small = params.vocab_size <= kSmallVocab;
  dispatch_dtype(params.dtype, "sample_tokens", [&](auto tag) {
    using T = typename decltype(tag)::type;
    launch("sample_tokens", small ? sample_tokens_kernel<T, 256> : sample_tokens_kernel<T, 1024>,
           {dim3(static_cast<unsigned>(params.num_rows)), dim3(small ? 256 : 1024), 0,
            Launch::kAfterPrevious},
           stream, params, value_stride(params));
  });
}

}  // namespace eecore::cuda
