// The names that CUDA C++ gives to every kernel, for g++.
#pragma once

#include <emulator/machine.h>
#include <emulator/races.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <source_location>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

#define EMULATOR_SITE const std::source_location& site = std::source_location::current()

// ---- Barriers and warps ----

inline void __syncthreads(EMULATOR_SITE) { ::emulator::come_to_barrier(site); }
inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_SITE) {
  ::emulator::gather(mask, "__syncwarp", nullptr, 0, nullptr, true, site);
}
inline void __threadfence() {
  if (::emulator::checks_races) ::emulator::check_fence();
}
inline void __threadfence_block() {}

namespace emulator {

// The value of the lane that `source` names for this one; its own if that is -1.
template <typename T, typename Source>
T shuffle(unsigned mask, const char* what, T value, Source source,
          const std::source_location& site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>);
  const Gathered<T> all(mask, what, value, site);
  const int from = source(lane());
  if (from < 0) return value;
  if ((mask >> from & 1u) == 0) {
    fail(std::string(what) + " from lane " + std::to_string(from) + ", which is not in the mask");
  }
  return all.of[from];
}

template <typename Count>
unsigned vote(unsigned mask, const char* what, bool value, Count count,
              const std::source_location& site) {
  const Gathered<bool> all(mask, what, value, site);
  unsigned ballot = 0;
  for (int l = 0; l < 32; ++l) {
    if ((mask >> l & 1u) != 0 && all.of[l]) ballot |= 1u << l;
  }
  return count(ballot);
}

}  // namespace emulator

template <typename T>
T __shfl_sync(unsigned mask, T value, int from, int width = 32, EMULATOR_SITE) {
  return ::emulator::shuffle(
      mask, "__shfl_sync", value,
      [&](int lane) { return lane / width * width + (from & (width - 1)); }, site);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32, EMULATOR_SITE) {
  return ::emulator::shuffle(
      mask, "__shfl_xor_sync", value,
      [&](int lane) { return (lane ^ with) / width == lane / width ? lane ^ with : -1; }, site);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATOR_SITE) {
  return ::emulator::shuffle(
      mask, "__shfl_up_sync", value,
      [&](int lane) {
        return lane % width >= static_cast<int>(by) ? lane - static_cast<int>(by) : -1;
      },
      site);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATOR_SITE) {
  return ::emulator::shuffle(
      mask, "__shfl_down_sync", value,
      [&](int lane) {
        return lane % width + static_cast<int>(by) < width ? lane + static_cast<int>(by) : -1;
      },
      site);
}
inline unsigned __ballot_sync(unsigned mask, bool value, EMULATOR_SITE) {
  return ::emulator::vote(mask, "__ballot_sync", value, [](unsigned b) { return b; }, site);
}
inline int __any_sync(unsigned mask, bool value, EMULATOR_SITE) {
  return ::emulator::vote(mask, "__any_sync", value, [](unsigned b) { return b != 0; }, site);
}
inline int __all_sync(unsigned mask, bool value, EMULATOR_SITE) {
  return ::emulator::vote(mask, "__all_sync", value, [&](unsigned b) { return b == mask; }, site);
}

// ---- Atomics on global memory: the blocks of a launch take turns ----

namespace emulator {

// Returns the value before; the check of races treats the access as atomic.
template <typename T, typename Change>
EMULATOR_UNSEEN T exchange(T* address, Change change) {
  if (checks_races) {
    check_global(Touch::kAtomic, address, sizeof(T), __builtin_return_address(0));
  }
  const T before = *address;
  *address = change(before);
  return before;
}

}  // namespace emulator

template <typename T>
T atomicAdd(T* address, std::type_identity_t<T> value) {
  static_assert(std::is_integral_v<T>, "sums of floats in no fixed order");
  return ::emulator::exchange(address, [value](T x) { return static_cast<T>(x + value); });
}
template <typename T>
T atomicOr(T* address, std::type_identity_t<T> value) {
  return ::emulator::exchange(address, [value](T x) { return x | value; });
}
template <typename T>
T atomicMax(T* address, std::type_identity_t<T> value) {
  return ::emulator::exchange(address, [value](T x) { return x < value ? value : x; });
}
template <typename T>
T atomicMin(T* address, std::type_identity_t<T> value) {
  return ::emulator::exchange(address, [value](T x) { return value < x ? value : x; });
}
template <typename T>
T atomicExch(T* address, std::type_identity_t<T> value) {
  return ::emulator::exchange(address, [value](T) { return value; });
}
inline unsigned atomicInc(unsigned* address, unsigned last) {
  return ::emulator::exchange(address, [last](unsigned x) { return x >= last ? 0 : x + 1; });
}

// ---- Arithmetic ----

inline float __uint_as_float(unsigned bits) { return std::bit_cast<float>(bits); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline int __popc(unsigned x) { return std::popcount(x); }
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __ffs(int x) { return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __logf(float x) { return std::log(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(b) < T(a) ? T(b) : T(a);
}
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  using T = std::common_type_t<A, B>;
  return T(a) < T(b) ? T(b) : T(a);
}

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
