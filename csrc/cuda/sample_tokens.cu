// sample_tokens on CUDA: the workspace, and a sequence of kernels over slices of the vocabulary.
#include <algorithm>

#include "dispatch.h"
#include "eecore/sample_tokens.cuh"
#include "launch.cuh"

namespace eecore::cuda {
namespace {

// The weight 1 in fixed point: the sum over a vocabulary fits in 63 bits, and few vocabularies need
// more than 48.
float mass_scale(int64_t vocab_size) {
  int bits = 0;
  while (int64_t{1} << bits < vocab_size) ++bits;
  return static_cast<float>(int64_t{1} << std::min(48, 63 - bits - 1));
}

// Places the arrays of the workspace one after another, from `memory` on.
class Layout {
 public:
  explicit Layout(void* memory) : memory_(static_cast<char*>(memory)) {}

  template <typename T>
  void place(T*& array, int64_t count) {
    array = reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (count * int64_t{sizeof(T)} + 127) / 128 * 128;
  }
  int64_t bytes() const { return bytes_; }

 private:
  char* memory_;
  int64_t bytes_ = 0;
};

SampleWorkspace lay_out(const SampleTokensParams& params, Layout& layout) {
  const SampleSlices slices(params.vocab_size);
  SampleWorkspace workspace{};
  workspace.num_slices = slices.num_slices;
  workspace.slice_size = slices.slice_size;
  workspace.value_stride =
      (params.vocab_size + kTokensPerThread - 1) / kTokensPerThread * kTokensPerThread;
  workspace.mass_scale = mass_scale(params.vocab_size);
  const int64_t num_rows = params.num_rows, num_slices = num_rows * slices.num_slices;
  layout.place(workspace.rows, num_rows);
  layout.place(workspace.numbers, num_slices);
  layout.place(workspace.sifted, num_slices);
  layout.place(workspace.masses, num_rows * kNumDigits);
  layout.place(workspace.counts, num_rows * kNumDigits);
  layout.place(workspace.values, num_rows * workspace.value_stride);
  layout.place(workspace.open_keys, num_rows * workspace.value_stride);
  layout.place(workspace.top, num_slices * params.num_top);
  return workspace;
}

}  // namespace

int64_t sample_tokens_workspace(const SampleTokensParams& params, int) {
  Layout layout(nullptr);
  lay_out(params, layout);
  return layout.bytes();
}

void run_sample_tokens(const SampleTokensParams& params, Stream stream) {
  Layout layout(params.workspace);
  const SampleWorkspace workspace = lay_out(params, layout);
  const auto start = [&](auto kernel, int64_t blocks, int threads) {
    launch("sample_tokens", kernel,
           {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(threads)), 0,
            Launch::kAfterPrevious},
           stream, params, workspace);
  };
  const int64_t num_rows = params.num_rows, num_slices = num_rows * workspace.num_slices;
  dispatch_dtype(params.dtype, "sample_tokens", [&](auto tag) {
    using T = typename decltype(tag)::type;
    start(sample_measure_kernel<T>, num_slices, kSampleThreads);
    start(sample_weigh_kernel<T>, num_slices + num_rows, kSampleThreads);
    start(sample_sift_kernel, num_slices, kSampleThreads);
    start(sample_draw_kernel, num_rows, kDrawThreads);
    if (params.probs != nullptr) start(sample_probs_kernel, num_slices, kSampleThreads);
    if (params.num_top == 0) return;
    start(sample_top_slices_kernel<T>, num_slices, kSampleThreads);
    start(sample_top_kernel, num_rows, 32);
  });
}

}  // namespace eecore::cuda
