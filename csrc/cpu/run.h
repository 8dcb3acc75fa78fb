// The functions that are compiled once per capability, each into its own namespace; see
// eecore/cpu.h for the run-time choice among them.
#pragma once

#include <cstdint>

#include "eecore/cpu.h"

// Everything that is compiled once per capability.
#define EECORE_FOR_EACH_KERNEL(X) \
  EECORE_FOR_EACH_OP(X) \
  X(read_ceiling, ReadCeilingParams) \
  X(multiply_ceiling, MultiplyCeilingParams)

namespace eecore::cpu {

// Reads memory as fast as the machine can.
struct ReadCeilingParams {
  const float* data;  // [num_floats], a multiple of 1024
  int64_t num_floats;
  float* sink;  // [1]
};

// Numbers that are multiplied: bfloat16 as float32 where the CPU has no products of it.
enum class Product : int8_t { kFloat32, kBFloat16, kInt8 };

// Multiplies and adds as fast as the capability in use can.
struct MultiplyCeilingParams {
  int64_t steps;
  Product product;
  double* operations;  // [1], the number of operations done
  float* sink;         // [1]
};

enum class Tiles : int { kNone, kHardware, kModel };
// The tiles of the capability in use.
Tiles tiles_in_use();

// Whether weights that are read next are prefetched into the first-level cache: from Zen 5 on,
// AMD's first-level cache has enough lines in flight to keep memory busy.
extern const bool kAsksFirstLevel;

#define EECORE_DECLARE_RUN(op, Params) \
  void run_##op(const Params& params, const Parallel& parallel);
EECORE_DECLARE_RUN(read_ceiling, ReadCeilingParams)
EECORE_DECLARE_RUN(multiply_ceiling, MultiplyCeilingParams)

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
// Whether the machine's matrix tiles, which this thread may use, give the same results as their
// model.
bool tiles_work();
}  // namespace avx512_bf16
#undef EECORE_DECLARE_RUN

}  // namespace eecore::cpu
