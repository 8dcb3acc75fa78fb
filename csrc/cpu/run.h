// Entry points of the CPU kernels. Each op is compiled once per capability into its own namespace;
// eecore::cpu::run_<op> picks the best one that the machine, or EECORE_CPU_CAPABILITY, allows.
#pragma once

#include <cstdint>

#include "eecore/params.h"

// Every op, once: declarations, the run-time choice and the kernels' definitions follow this list.
#define EECORE_FOR_EACH_OP(X) \
  X(accept_mask, AcceptMaskParams) \
  X(accept_round, AcceptRoundParams) \
  X(append_drafts, AppendDraftsParams) \
  X(append_kv, AppendKvParams) \
  X(begin_round, BeginRoundParams) \
  X(begin_verification, BeginVerificationParams) \
  X(compact_rows, CompactRowsParams) \
  X(decoder_layers, DecoderLayersParams) \
  X(embed_tokens, EmbedTokensParams) \
  X(exit_confidence_cosine, ExitConfidenceCosineParams) \
  X(exit_confidence_mlp, ExitConfidenceMlpParams) \
  X(exit_confidence_softmax, ExitConfidenceSoftmaxParams) \
  X(exit_rows, ExitRowsParams) \
  X(gather_states, GatherStatesParams) \
  X(kv_fill, KvFillParams) \
  X(pack_weight, PackWeightParams) \
  X(paged_attention, PagedAttentionParams) \
  X(place_head, PlaceHeadParams) \
  X(quantise_weight, QuantiseWeightParams) \
  X(sample_tokens, SampleTokensParams) \
  X(select_rows, SelectRowsParams) \
  X(skinny_gated_linear, SkinnyGatedLinearParams) \
  X(skinny_linear, SkinnyLinearParams) \
  X(speculative_accept, SpeculativeAcceptParams) \
  X(unpack_weight, UnpackWeightParams)

// Everything that is compiled once per capability.
#define EECORE_FOR_EACH_KERNEL(X) \
  EECORE_FOR_EACH_OP(X) \
  X(read_ceiling, ReadCeilingParams) \
  X(multiply_ceiling, MultiplyCeilingParams)

namespace eecore::cpu {

using RangeFn = void (*)(int64_t begin, int64_t end, void* context);

// Threads: `run` calls body on ranges that cover [begin, end), `grain` items or more each but for
// the last.
struct Parallel {
  int num_threads;
  int64_t bytes_per_range;  // what a range should read to be worth handing to another thread
  void (*run)(void* pool, int64_t begin, int64_t end, int64_t grain, RangeFn body, void* context);
  void* pool;
};

// Reads memory as fast as the machine can.
struct ReadCeilingParams {
  const float* data;  // [num_floats], a multiple of 1024
  int64_t num_floats;
  float* sink;  // [1]
};

// Multiplies and adds as fast as the machine can: float32, or bfloat16 pairs where the CPU has
// them.
struct MultiplyCeilingParams {
  int64_t steps;  // of every chain
  DType dtype;
  double* flops;  // [1]: how many were done
  float* sink;    // [1]
};

// kAmx and kAmxModel run the kernels of kAvx512Bf16, whose products of bfloat16 use matrix tiles:
// the machine's, or a model of them in software, for tests.
enum class Capability : int {
  kPortable = 0,
  kAvx2 = 1,
  kAvx512 = 2,
  kAvx512Bf16 = 3,
  kAmx = 4,
  kAmxModel = 5
};
constexpr int kNumCapabilities = 6;
enum class Tiles : int { kNone, kHardware, kModel };
// Those that go with the capability in use.
Tiles tiles_in_use();

const char* capability_name(Capability capability);
// What this CPU and operating system can run.
Capability best_capability();
// What the kernels run with: EECORE_CPU_CAPABILITY, read once, or the best. Throws on a name that
// is unknown or that the machine cannot run.
Capability active_capability();
// Changes what the kernels run with, by name; the same errors.
void set_capability(const char* name);

#define EECORE_DECLARE_RUN(op, Params) \
  void run_##op(const Params& params, const Parallel& parallel);
EECORE_FOR_EACH_KERNEL(EECORE_DECLARE_RUN)

namespace portable {
EECORE_FOR_EACH_KERNEL(EECORE_DECLARE_RUN)
}
namespace avx2 {
EECORE_FOR_EACH_KERNEL(EECORE_DECLARE_RUN)
}
namespace avx512 {
EECORE_FOR_EACH_KERNEL(EECORE_DECLARE_RUN)
}
namespace avx512_bf16 {
EECORE_FOR_EACH_KERNEL(EECORE_DECLARE_RUN)
// Whether the machine's matrix tiles, which this thread may use, do what their model does.
bool tiles_work();
}  // namespace avx512_bf16
#undef EECORE_DECLARE_RUN

}  // namespace eecore::cpu
