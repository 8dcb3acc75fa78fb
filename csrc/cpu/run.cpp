// The run-time choice among the compiled capabilities. Built for the baseline instruction set.
#include "run.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace eecore::cpu {
namespace {

constexpr const char* kNames[kNumCapabilities] = {"portable", "avx2", "avx512", "avx512_bf16"};

Capability parse_capability(const char* wanted) {
  const Capability best = best_capability();
  for (int i = 0; i < kNumCapabilities; ++i) {
    if (std::strcmp(wanted, kNames[i]) != 0) continue;
    if (i > static_cast<int>(best)) {
      throw std::invalid_argument(std::string("EECORE_CPU_CAPABILITY: this CPU runs at most ") +
                                  capability_name(best) + ", got " + wanted);
    }
    return static_cast<Capability>(i);
  }
  throw std::invalid_argument(
      std::string("EECORE_CPU_CAPABILITY: expected portable, avx2, avx512 or avx512_bf16, got ") +
      wanted);
}

std::atomic<Capability>& active() {
  static std::atomic<Capability> capability = [] {
    const char* wanted = std::getenv("EECORE_CPU_CAPABILITY");
    return wanted == nullptr || *wanted == '\0' ? best_capability() : parse_capability(wanted);
  }();
  return capability;
}

}  // namespace

const char* capability_name(Capability capability) { return kNames[static_cast<int>(capability)]; }

Capability best_capability() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return Capability::kAvx512Bf16;
  if (avx512) return Capability::kAvx512;
  if (avx2) return Capability::kAvx2;
#endif
  return Capability::kPortable;
}

Capability active_capability() { return active().load(std::memory_order_relaxed); }

void set_capability(const char* name) { active().store(parse_capability(name)); }

#if defined(__x86_64__)
#define EECORE_DEFINE_RUN(op, Params) \
  void run_##op(const Params& params, const Parallel& parallel) { \
    switch (active_capability()) { \
      case Capability::kPortable: \
        return portable::run_##op(params, parallel); \
      case Capability::kAvx2: \
        return avx2::run_##op(params, parallel); \
      case Capability::kAvx512: \
        return avx512::run_##op(params, parallel); \
      case Capability::kAvx512Bf16: \
        return avx512_bf16::run_##op(params, parallel); \
    } \
  }
#else
#define EECORE_DEFINE_RUN(op, Params) \
  void run_##op(const Params& params, const Parallel& parallel) { \
    portable::run_##op(params, parallel); \
  }
#endif
EECORE_FOR_EACH_KERNEL(EECORE_DEFINE_RUN)

}  // namespace eecore::cpu
