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
const char* capability_name(Capability capability);
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
