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

// Settings that a run on a GPU can change without another build: EECORE_CUDA_TUNING,
// "name=value,name=value". Results are the same for all settings, except that wgmma
// and wgmma_attention sum in another order.
struct Tuning {
  bool early_places = true;      // use constant_places
  bool early_trigger = false;    // products let the next kernel start before they wait
  int ring_kib = 96;             // of a weight in flight to each multiprocessor; 16 to 192
  int shared_rows = 32;          // maximum rows that blocks of a product make ready: 8 to 32
  bool early_start = true;       // kernels may start before the earlier ones have ended
  bool wgmma = false;            // warpgroups multiply, in a build for sm_90a
  bool wgmma_attention = false;  // warpgroups attend to many queries, in a build for sm_90a
  bool wide_attention = true;    // warps of attention have up to 32 rows, not 16
};

// Calls visit(name, field, least, most) with each setting and the values that it may have.
template <typename Visit>
void for_each_setting(Tuning& tuning, const Visit& visit) {
  visit("early_places", tuning.early_places, 0, 1);
  visit("early_trigger", tuning.early_trigger, 0, 1);
  visit("ring_kib", tuning.ring_kib, 16, 192);
  visit("shared_rows", tuning.shared_rows, 8, 32);
  visit("early_start", tuning.early_start, 0, 1);
  visit("wgmma", tuning.wgmma, 0, 1);
  visit("wgmma_attention", tuning.wgmma_attention, 0, 1);
  visit("wide_attention", tuning.wide_attention, 0, 1);
}

// The settings that the environment has now: a program keeps those of its capture. Throws where
// EECORE_CUDA_TUNING has another one.
Tuning tuning();

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
