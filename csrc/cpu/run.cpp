// The run-time choice among the compiled capabilities. Built for the baseline instruction set.
#include "run.h"

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tile_permission.h"
#endif

namespace eecore::cpu {
namespace {

constexpr const char* kNames[kNumCapabilities] = {
    "portable", "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx", "avx_vnni_model", "amx_model"};

Capability parse_capability(const char* wanted) {
  std::string names;
  for (int i = 0; i < kNumCapabilities; ++i) {
    if (!can_run(static_cast<Capability>(i))) continue;
    if (std::strcmp(wanted, kNames[i]) == 0) return static_cast<Capability>(i);
    names += std::string(names.empty() ? "" : ", ") + kNames[i];
  }
  throw std::invalid_argument("EECORE_CPU_CAPABILITY: expected " + names +
                              " (what this CPU runs), got " + wanted);
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

#if defined(__x86_64__)
namespace {

bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

// Whether the CPU has the products of AVX-512 VNNI as AVX encodes them.
bool has_avx_vnni() {
  constexpr uint32_t kAvxVnni = 1u << 4;
  uint32_t a = 0, b = 0, c = 0, d = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & kAvxVnni) != 0;
}

// Whether the CPU has matrix tiles with products of bfloat16 and of bytes, Linux grants their state
// to this process, and they give correct results.
bool has_tiles() {
#if defined(__linux__)
  constexpr uint32_t kTiles = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  constexpr uint32_t kOsXsave = 1u << 27;
  constexpr uint64_t kTileState = 3u << 17;  // configuration and data
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if ((d & kTiles) != kTiles) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kOsXsave) == 0) return false;
  uint32_t low = 0, high = 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & kTileState) != kTileState) return false;
  constexpr int64_t kRequestPermission = 0x1023, kTileData = 18;
  constexpr unsigned long kMinSignalStack = 51;  // AT_MINSIGSTKSZ
  const auto request = [] { return syscall(SYS_arch_prctl, kRequestPermission, kTileData); };
  return permits_tiles(request, getauxval(kMinSignalStack), stderr) && avx512_bf16::tiles_work();
#else
  return false;
#endif
}

}  // namespace
#endif

Capability best_capability() {
#if defined(__x86_64__)
  const bool avx2 = has_avx2();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) {
    static const bool tiles = has_tiles();
    return tiles ? Capability::kAmx : Capability::kAvx512Bf16;
  }
  if (avx512) return Capability::kAvx512;
  if (has_avx_vnni()) return Capability::kAvxVnni;
  if (avx2) return Capability::kAvx2;
#endif
  return Capability::kPortable;
}

bool can_run(Capability capability) {
  const Capability best = best_capability();
  switch (capability) {
#if defined(__x86_64__)
    case Capability::kAvxVnni:
      return has_avx_vnni();
#endif
    case Capability::kAvxVnniModel:
      return best >= Capability::kAvx512;
    case Capability::kAmxModel:
      return best >= Capability::kAvx512Bf16;
    default:
      return capability <= best;
  }
}

Capability active_capability() { return active().load(std::memory_order_relaxed); }

const bool kAsksFirstLevel = [] {
#if defined(__x86_64__) && defined(__linux__)
  constexpr uint32_t kZen5 = 0x1a;  // family
  uint32_t a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(0, &a, &b, &c, &d) || b != signature_AMD_ebx) return false;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return false;
  return (a >> 8 & 15) == 15 && 15 + (a >> 20 & 255) >= kZen5;
#else
  return false;
#endif
}();

Tiles tiles_in_use() {
  switch (active_capability()) {
    case Capability::kAmx:
      return Tiles::kHardware;
    case Capability::kAmxModel:
      return Tiles::kModel;
    default:
      return Tiles::kNone;
  }
}

void set_capability(const char* name) { active().store(parse_capability(name)); }

#if defined(__x86_64__)
#define EECORE_DEFINE_RUN(op, Params) \
  void run_##op(const Params& params, const Parallel& parallel) { \
    switch (active_capability()) { \
      case Capability::kPortable: \
        return portable::run_##op(params, parallel); \
      case Capability::kAvx2: \
      case Capability::kAvxVnni: \
      case Capability::kAvxVnniModel: \
        return avx2::run_##op(params, parallel); \
      case Capability::kAvx512: \
        return avx512::run_##op(params, parallel); \
      case Capability::kAvx512Bf16: \
      case Capability::kAmx: \
      case Capability::kAmxModel: \
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
