// Entry points of the CUDA kernels, and the stream that they run on. No torch, no CUDA headers: the
// tensor boundary in csrc/ops includes this file with the host compiler.
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

// The properties of a device; queried once and kept.
const DeviceProperties& device_properties(int device);

// Whether launches on a stream become part of a graph and do not run yet.
bool is_captured(Stream stream);

// Declared for all ops; ops for the CPU alone have no definition.
#define EECORE_DECLARE_RUN(op, Params) void run_##op(const Params& params, Stream stream);
EECORE_FOR_EACH_OP(EECORE_DECLARE_RUN)
#undef EECORE_DECLARE_RUN

// Bytes of the workspace that a call needs; params.workspace itself is not read.
int64_t exit_confidence_mlp_workspace(const ExitConfidenceMlpParams& params, int device);
int64_t exit_confidence_softmax_workspace(const ExitConfidenceSoftmaxParams& params, int device);
int64_t kv_fill_workspace(const KvFillParams& params, int device);
int64_t sample_tokens_workspace(const SampleTokensParams& params, int device);
int64_t skinny_gated_linear_workspace(const SkinnyGatedLinearParams& params, int device);
int64_t skinny_linear_workspace(const SkinnyLinearParams& params, int device);
int64_t paged_attention_workspace(const PagedAttentionParams& params, int device);

}  // namespace eecore::cuda
