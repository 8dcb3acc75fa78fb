// The only file with inline PTX: one function for each instruction that C++ has no name for. For
// the tests' emulator each has a host twin of the same signature in emulator/ptx.h.
#pragma once

#include <cstdint>
#include <type_traits>

#include "eecore/shared.cuh"

namespace eecore::cuda {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
struct Float8 {
  uint8_t bits;
};
template <typename T>
struct Pack;

}  // namespace eecore::cuda

#ifdef EECORE_EMULATED
#include <emulator/ptx.h>
#else

namespace eecore::cuda {

// An address in shared memory, as instructions have it.
template <typename T>
__device__ __forceinline__ uint32_t shared_address(T* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- Conversions ----

__device__ __forceinline__ float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
__device__ __forceinline__ uint32_t float_to_bits(float x) { return __float_as_uint(x); }

__device__ __forceinline__ float half_to_float(Float16 x) {
  float out;
  asm("cvt.f32.f16 %0, %1;" : "=f"(out) : "h"(x.bits));
  return out;
}

__device__ __forceinline__ Float16 float_to_half(float x) {
  Float16 out;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
  return out;
}

__device__ __forceinline__ BFloat16 float_to_bfloat16(float x) {
  BFloat16 out;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(out.bits) : "f"(x));
  return out;
}

// Two elements in one register, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float first, float second);
template <>
__device__ __forceinline__ uint32_t pack_pair<BFloat16>(float first, float second) {
  uint32_t out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
}
template <>
__device__ __forceinline__ uint32_t pack_pair<Float16>(float first, float second) {
  uint32_t out;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(second), "f"(first));
  return out;
}

// The two float8 (e4m3) in the low half of `pair` as float16, the first in the low half (sm_89).
__device__ __forceinline__ uint32_t float8_pair_to_halves(uint32_t pair) {
  uint32_t out = 0;
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low;}"
      : "=r"(out)
      : "r"(pair));
#endif
  return out;
}

// 2^x; -inf gives 0.
__device__ __forceinline__ float exp2_fast(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

// The bytes selected by the four hex digits of `selector`, the lowest first: 0 to 3 are bytes of
// `first`, 4 to 7 of `second`.
__device__ __forceinline__ uint32_t permute_bytes(uint32_t first, uint32_t second,
                                                  uint32_t selector) {
  return __byte_perm(first, second, selector);
}

// a * b + c, rounded once, for the two elements of each.
template <typename T>
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c);
template <>
__device__ __forceinline__ uint32_t fma_pair<BFloat16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}
template <>
__device__ __forceinline__ uint32_t fma_pair<Float16>(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t out;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(c));
  return out;
}

// ---- 16-byte accesses; addresses are multiples of 16 ----

// For global memory that other threads of the block, or later kernels, read again.
template <typename T>
__device__ __forceinline__ Pack<T> load16(const T* from) {
  return *reinterpret_cast<const Pack<T>*>(from);
}

// For global memory that is read once and never written by this kernel: bypasses L1.
template <typename T>
__device__ __forceinline__ Pack<T> load16_once(const T* from) {
  uint4 bits;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "l"(from));
  return reinterpret_cast<const Pack<T>&>(bits);
}

template <typename T>
__device__ __forceinline__ void store16(T* to, const Pack<T>& pack) {
  *reinterpret_cast<Pack<T>*>(to) = pack;
}

template <typename T>
__device__ __forceinline__ Pack<T> shared_load16(const T* from) {
  return *reinterpret_cast<const Pack<T>*>(from);
}

template <typename T>
__device__ __forceinline__ void shared_store16(T* to, const Pack<T>& pack) {
  *reinterpret_cast<Pack<T>*>(to) = pack;
}

// The number at `from`, or `otherwise` where `from` is null. It is a load under a predicate: after
// a branch at the start of a kernel ptxas finds fewer registers for the rest.
__device__ __forceinline__ float load_or(const float* from, float otherwise) {
  float out = otherwise;
  asm volatile("{.reg .pred there; setp.ne.u64 there, %1, 0; @there ld.global.f32 %0, [%1];}"
               : "+f"(out)
               : "l"(from));
  return out;
}

// Prefetches the 128 bytes around an address into the L2 cache. Nothing is read: later writes are
// seen as usual.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// ---- Asynchronous copies from global to shared memory (sm_80) ----

// Copies `bytes` (0 to 16) and fills the rest of 16 with zeros; bypasses L1. With 0 bytes `from` is
// not read. The copy is visible to this thread after cp_async_wait, to other threads also after a
// barrier.
template <typename T>
__device__ __forceinline__ void cp_async16(T* to, const T* from, int bytes = 16) {
  const uint32_t address = shared_address(to);
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(from),
               "r"(bytes)
               : "memory");
}

// The same through L1, for data that other warps of this SM also read.
template <typename T>
__device__ __forceinline__ void cp_async16_cached(T* to, const T* from, int bytes = 16) {
  const uint32_t address = shared_address(to);
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes)
               : "memory");
}

// Closes this thread's group of copies.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most kPending of this thread's newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Matrices of 16-bit elements ----

// Loads four 8x8 matrices; lane l gives the address of row l % 8 of matrix l / 8. Register i holds,
// of matrix i, elements 2 * (lane % 4) and the next one of row lane / 4.
template <typename T>
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&out)[4], T* row) {
  const uint32_t address = shared_address(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// The same, each matrix transposed.
template <typename T>
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&out)[4], T* row) {
  const uint32_t address = shared_address(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(address)
               : "memory");
}

// sums[16, 8] += a[16, 16] b[16, 8], in float. With g = lane / 4 and t = lane % 4:
//   a[0]: row g, columns 2t and 2t + 1     a[1]: row g + 8, the same columns
//   a[2]: row g, columns 2t + 8, 2t + 9    a[3]: row g + 8, those columns
//   b[0]: rows 2t and 2t + 1 of column g   b[1]: rows 2t + 8, 2t + 9 of column g
//   sums[0], sums[1]: row g, columns 2t, 2t + 1    sums[2], sums[3]: row g + 8, the same
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&sums)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2]);
template <>
__device__ __forceinline__ void mma_m16n8k16<BFloat16>(float (&sums)[4], const uint32_t (&a)[4],
                                                       const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
template <>
__device__ __forceinline__ void mma_m16n8k16<Float16>(float (&sums)[4], const uint32_t (&a)[4],
                                                      const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- Programmatic dependent launch (sm_90; before it, these do nothing) ----

// Waits until the earlier kernels of the stream have finished and their writes are visible. A
// kernel launched with Launch::kAfterPrevious calls it before it touches what they write or read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same if `waits` is true: under a predicate, as in load_or.
__device__ __forceinline__ void wait_for_previous_kernel(bool waits) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred waits; setp.ne.s32 waits, %0, 0; @waits griddepcontrol.wait;}" ::"r"(
                   static_cast<int>(waits))
               : "memory");
#endif
}

// Lets the next kernel of the stream start once every block has called this or ended.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace eecore::cuda

#endif  // EECORE_EMULATED
