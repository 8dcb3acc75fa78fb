// Entry points of the CUDA kernels, and the stream they run on. No torch, no CUDA headers: the
// tensor boundary in csrc/ops includes this with the host compiler.
#pragma once

#include <cstddef>

#include "eecore/params.h"

namespace eecore::cuda {

// A cudaStream_t and the device that it belongs to.
struct Stream {
  void* handle;
  int device;
};

struct DeviceProperties {
  int capability;  // 80, 90, ...
  int num_multiprocessors;
  size_t max_shared_bytes;  // dynamic shared memory that a block can ask for
};

// Of a device; asked for once and kept.
const DeviceProperties& device_properties(int device);

void run_accept_mask(const AcceptMaskParams& params, Stream stream);
void run_accept_round(const AcceptRoundParams& params, Stream stream);
void run_append_drafts(const AppendDraftsParams& params, Stream stream);
void run_append_kv(const AppendKvParams& params, Stream stream);
void run_begin_round(const BeginRoundParams& params, Stream stream);
void run_begin_verification(const BeginVerificationParams& params, Stream stream);
void run_embed_tokens(const EmbedTokensParams& params, Stream stream);
void run_exit_confidence_cosine(const ExitConfidenceCosineParams& params, Stream stream);
void run_exit_confidence_mlp(const ExitConfidenceMlpParams& params, Stream stream);
void run_exit_confidence_softmax(const ExitConfidenceSoftmaxParams& params, Stream stream);
void run_exit_rows(const ExitRowsParams& params, Stream stream);
void run_gather_states(const GatherStatesParams& params, Stream stream);
void run_kv_fill(const KvFillParams& params, Stream stream);
void run_paged_attention(const PagedAttentionParams& params, Stream stream);
void run_place_head(const PlaceHeadParams& params, Stream stream);
void run_sample_tokens(const SampleTokensParams& params, Stream stream);
void run_skinny_gated_linear(const SkinnyGatedLinearParams& params, Stream stream);
void run_skinny_linear(const SkinnyLinearParams& params, Stream stream);
void run_speculative_accept(const SpeculativeAcceptParams& params, Stream stream);

// Bytes of the workspace that a call needs; params.workspace itself is not looked at.
int64_t exit_confidence_mlp_workspace(const ExitConfidenceMlpParams& params, int device);
int64_t exit_confidence_softmax_workspace(const ExitConfidenceSoftmaxParams& params, int device);
int64_t kv_fill_workspace(const KvFillParams& params, int device);
int64_t sample_tokens_workspace(const SampleTokensParams& params, int device);
int64_t skinny_gated_linear_workspace(const SkinnyGatedLinearParams& params, int device);
int64_t skinny_linear_workspace(const SkinnyLinearParams& params, int device);
int64_t paged_attention_workspace(const PagedAttentionParams& params, int device);

}  // namespace eecore::cuda
