// The CPU kernels, for C++ without torch or Python: link to libeecore_cpu.a, fill the params of an
// op (eecore/params.h), call eecore::cpu::run_<op>. It runs the best kernel that the machine, or
// EECORE_CPU_CAPABILITY, allows. Nothing is checked: shapes, strides and alignment are as params.h
// says.
#pragma once

#include <cstdint>

#include "eecore/params.h"

namespace eecore::cpu {

using RangeFn = void (*)(int64_t begin, int64_t end, void* context);

// Threads for the kernels: `run` calls body on ranges that cover [begin, end); each has at least
// `grain` items, except for the last.
struct Parallel {
  int num_threads;
  int64_t bytes_per_range;  // bytes that a range should read to be worth another thread
  void (*run)(void* pool, int64_t begin, int64_t end, int64_t grain, RangeFn body, void* context);
  void* pool;
};
constexpr Parallel kOneThread{1, 1 << 15, nullptr, nullptr};  // never calls `run`

// kAvxVnni runs the kernels of kAvx2, whose products of int8 and packed weights use instructions of
// AVX-VNNI; kAmx runs those of kAvx512Bf16, whose products of bfloat16 use matrix tiles. The models
// are for tests: the instructions as AVX-512 encodes them, and tiles in software.
enum class Capability : int {
  kPortable = 0,
  kAvx2 = 1,
  kAvxVnni = 2,
  kAvx512 = 3,
  kAvx512Bf16 = 4,
  kAmx = 5,
  kAvxVnniModel = 6,
  kAmxModel = 7
};
constexpr int kNumCapabilities = 8;
const char* capability_name(Capability capability);
// Whether this CPU and operating system have a capability, or what its model needs.
bool can_run(Capability capability);
// The best capability of this CPU and operating system.
Capability best_capability();
// The capability that the kernels run with: EECORE_CPU_CAPABILITY, read once, or the best one.
// Throws if the name is unknown or the machine cannot run it.
Capability active_capability();
// Changes the capability that the kernels run with, by name; throws the same errors.
void set_capability(const char* name);

#define EECORE_DECLARE_RUN(op, Params) \
  void run_##op(const Params& params, const Parallel& parallel);
EECORE_FOR_EACH_OP(EECORE_DECLARE_RUN)
#undef EECORE_DECLARE_RUN

}  // namespace eecore::cpu
