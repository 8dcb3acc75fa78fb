// The only file with inline PTX: one function for each instruction that C++ has no name for. For
// the tests' emulator each has a host twin of the same signature in emulator/ptx.h.
#pragma once

#include <cuda.h>  // CUtensorMap

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

// How 16-byte pieces are exchanged within 8 rows of a matrix that wgmma reads, as bits 62 and 63 of
// its descriptor say: piece p of 8 rows of as many bytes lies at p ^ (address / 128), modulo the
// pieces of a row.
enum class Swizzle { kNone = 0, k128Bytes = 1, k64Bytes = 2, k32Bytes = 3 };

}  // namespace eecore::cuda

#ifdef EECORE_EMULATED
#include <emulator/ptx.h>
#else

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define EECORE_HAS_WGMMA 1
#else
#define EECORE_HAS_WGMMA 0
#endif

namespace eecore::cuda {

// An address in shared memory, as instructions and descriptors have it.
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

// ---- Named barriers: 1 to 15, of whole warps of a block ----

// Waits until `num_threads` threads have waited or arrived at barrier `id`; what they wrote to
// shared memory before is then visible.
__device__ __forceinline__ void named_barrier_wait(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

// Counts for barrier `id` without waiting, for a producer that runs ahead.
__device__ __forceinline__ void named_barrier_arrive(int id, int num_threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
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

// ---- Copies that mbarriers count (sm_90) ----
//
// An mbarrier, 8 bytes of shared memory, has phases, of which the first is 0. A phase ends when its
// `count` arrivals have come and as many bytes have been copied as they expected. Threads that wait
// for the end of a phase then see these bytes, and what the threads that arrived did before.

// One thread initialises an mbarrier and calls fence_mbarrier_init; a barrier comes before its use.
__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, int count) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count)
               : "memory");
#endif
}
__device__ __forceinline__ void fence_mbarrier_init() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// Arrives.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Arrives, and has the phase expect this many bytes more.
__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
#endif
}

// Waits for the end of the phase of this parity: the current one or the one before it.
__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  uint32_t has_ended = 0;
  while (has_ended == 0) {
    asm volatile(
        "{.reg .pred ended; mbarrier.try_wait.parity.shared.b64 ended, [%1], %2; "
        "selp.u32 %0, 1, 0, ended;}"
        : "=r"(has_ended)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  }
#endif
}

// The copies: one thread starts each. Where threads have written to the shared memory before, they
// call fence_proxy_async, and a barrier comes after that.

// Copies `bytes`, a multiple of 16 as both addresses are.
template <typename T>
__device__ __forceinline__ void bulk_copy(T* to, const T* from, int bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
#endif
}

// Copies the box of a tensor of 2 to 4 dimensions that begins at these coordinates, the innermost
// one first. Elements out of the tensor's bounds are zeros, and count as bytes. `to` is a multiple
// of 128, of 1024 with a swizzle of 128 bytes. `map` is a kernel's parameter, __grid_constant__.
template <typename T, int kRank>
__device__ __forceinline__ void tensor_copy(T* to, const CUtensorMap& map, const int (&at)[kRank],
                                            uint64_t* barrier) {
  static_assert(kRank >= 2 && kRank <= 4);
#if __CUDA_ARCH__ >= 900
  const uint32_t address = shared_address(to), counter = shared_address(barrier);
#define EECORE_TENSOR_COPY(rank, coordinates, ...) \
  asm volatile("cp.async.bulk.tensor." rank \
               ".shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, " coordinates \
               "], [%2];" ::"r"(address), \
               "l"(&map), "r"(counter), __VA_ARGS__ \
               : "memory")
  if constexpr (kRank == 2) {
    EECORE_TENSOR_COPY("2d", "{%3, %4}", "r"(at[0]), "r"(at[1]));
  } else if constexpr (kRank == 3) {
    EECORE_TENSOR_COPY("3d", "{%3, %4, %5}", "r"(at[0]), "r"(at[1]), "r"(at[2]));
  } else {
    EECORE_TENSOR_COPY("4d", "{%3, %4, %5, %6}", "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]));
  }
#undef EECORE_TENSOR_COPY
#endif
}

// ---- Roles of warps ----

// True for one lane, the same each time. All lanes of the warp call it.
__device__ __forceinline__ bool elect_lane() {
  uint32_t is_elected = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred elected; elect.sync _|elected, 0xffffffff; selp.u32 %0, 1, 0, elected;}"
               : "=r"(is_elected));
#endif
  return is_elected != 0;
}

// All warps of a warpgroup give up registers, or take some that others have given up: then each
// thread has kCount, a multiple of 8 from 24 to 256. Taking waits for registers (sm_90a).
template <int kCount>
__device__ __forceinline__ void give_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
#if EECORE_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void take_registers() {
  static_assert(kCount % 8 == 0 && kCount >= 24 && kCount <= 256);
#if EECORE_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
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

// ---- Products of a warpgroup: four warps, the first of a number that 4 divides (sm_90a) ----
//
// They are asynchronous. A thread's registers may be touched between a wait for the group of a
// product and the next wgmma_fence, which must precede the next product that works with them.
// Shared memory may be written from the wait on; before a product reads it, each thread that wrote
// there calls fence_proxy_async, and a barrier comes after that. All four warps make the same
// calls.

// sums[8 * kTiles columns]: sums[n] of warp w of the four are those of mma_m16n8k16 of rows 16 * w
// to 16 * w + 15 and columns 8 * n to 8 * n + 7.
template <int kTiles>
using WgmmaSums = float[kTiles][4];
// Rows 16 * w to 16 * w + 15 of a[64, 16], as those of mma_m16n8k16.
using WgmmaPart = uint32_t[4];

// Makes what this thread wrote to shared memory visible to wgmma, once a barrier has passed.
__device__ __forceinline__ void fence_proxy_async() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Keeps what the compiler does with registers on its side of a fence or wait.
__device__ __forceinline__ void keep_in_place(float& x) { asm volatile("" : "+f"(x)::"memory"); }
__device__ __forceinline__ void keep_in_place(uint32_t& x) { asm volatile("" : "+r"(x)::"memory"); }
template <typename T, int kSize>
__device__ __forceinline__ void keep_in_place(T (&x)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) keep_in_place(x[i]);
}

// Comes before products that work with registers which this thread has touched: sums (WgmmaSums)
// and parts of A (an array of WgmmaPart).
template <typename... Registers>
__device__ __forceinline__ void wgmma_fence(Registers&... registers) {
#if EECORE_HAS_WGMMA
  (keep_in_place(registers), ...);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Closes a group of products.
__device__ __forceinline__ void wgmma_commit() {
#if EECORE_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits until at most kPending of this warp's newest groups are under way; the sums and parts are
// those of the groups that are not.
template <int kPending, typename... Registers>
__device__ __forceinline__ void wgmma_wait(Registers&... registers) {
#if EECORE_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
  (keep_in_place(registers), ...);
#endif
}

// What a product has: numbers of its sums in the text, those of a, b, whether it adds and the order
// of a and b, and the operands themselves.
#define EECORE_WGMMA(columns, type, numbers, a, b, adds, order, inputs, ...) \
  asm volatile("{.reg .pred adds; setp.ne.s32 adds, " adds \
               ", 0; wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type \
               " {" numbers "}, " a ", " b ", adds, 1, 1, " order ";}" \
               : __VA_ARGS__ \
               : inputs)
#define EECORE_WGMMA_FROM_REGISTERS \
  "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposed ? 1 : 0)
#define EECORE_WGMMA_FROM_SHARED "l"(a), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposed ? 1 : 0)
#define EECORE_WGMMA_SUMS(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define EECORE_WGMMA_2_SUMS(n) EECORE_WGMMA_SUMS(n), EECORE_WGMMA_SUMS(n + 1)
#define EECORE_WGMMA_4_SUMS(n) EECORE_WGMMA_2_SUMS(n), EECORE_WGMMA_2_SUMS(n + 2)
#define EECORE_WGMMA_8_SUMS(n) EECORE_WGMMA_4_SUMS(n), EECORE_WGMMA_4_SUMS(n + 4)
#define EECORE_WGMMA_4_NUMBERS "%0, %1, %2, %3"
#define EECORE_WGMMA_8_NUMBERS EECORE_WGMMA_4_NUMBERS ", %4, %5, %6, %7"
#define EECORE_WGMMA_16_NUMBERS EECORE_WGMMA_8_NUMBERS ", %8, %9, %10, %11, %12, %13, %14, %15"
#define EECORE_WGMMA_32_NUMBERS \
  EECORE_WGMMA_16_NUMBERS \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define EECORE_WGMMA_64_NUMBERS \
  EECORE_WGMMA_32_NUMBERS \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// Starts sums[64, 8 * kTiles] += a[64, 16] b[16, 8 * kTiles], in float, for 8, 16, 32, 64 or 128
// columns, or sums = the product without kAdds; `b` is a descriptor (wgmma_matrix, with kTransposed
// wgmma_transposed).
template <typename T, bool kAdds = true, bool kTransposed = false, int kTiles>
__device__ __forceinline__ void wgmma_m64k16(float (&sums)[kTiles][4], const uint32_t (&a)[4],
                                             uint64_t b) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  static_assert(kTiles == 1 || kTiles == 2 || kTiles == 4 || kTiles == 8 || kTiles == 16);
#if EECORE_HAS_WGMMA
#define EECORE_WGMMA_OF_TYPE(type) \
  if constexpr (kTiles == 1) { \
    EECORE_WGMMA("8", type, EECORE_WGMMA_4_NUMBERS, "{%4, %5, %6, %7}", "%8", "%9", "%10", \
                 EECORE_WGMMA_FROM_REGISTERS, EECORE_WGMMA_SUMS(0)); \
  } else if constexpr (kTiles == 2) { \
    EECORE_WGMMA("16", type, EECORE_WGMMA_8_NUMBERS, "{%8, %9, %10, %11}", "%12", "%13", "%14", \
                 EECORE_WGMMA_FROM_REGISTERS, EECORE_WGMMA_2_SUMS(0)); \
  } else if constexpr (kTiles == 4) { \
    EECORE_WGMMA("32", type, EECORE_WGMMA_16_NUMBERS, "{%16, %17, %18, %19}", "%20", "%21", "%22", \
                 EECORE_WGMMA_FROM_REGISTERS, EECORE_WGMMA_4_SUMS(0)); \
  } else if constexpr (kTiles == 8) { \
    EECORE_WGMMA("64", type, EECORE_WGMMA_32_NUMBERS, "{%32, %33, %34, %35}", "%36", "%37", "%38", \
                 EECORE_WGMMA_FROM_REGISTERS, EECORE_WGMMA_8_SUMS(0)); \
  } else { \
    EECORE_WGMMA("128", type, EECORE_WGMMA_64_NUMBERS, "{%64, %65, %66, %67}", "%68", "%69", \
                 "%70", EECORE_WGMMA_FROM_REGISTERS, EECORE_WGMMA_8_SUMS(0), \
                 EECORE_WGMMA_8_SUMS(8)); \
  }
  if constexpr (std::is_same_v<T, BFloat16>) {
    EECORE_WGMMA_OF_TYPE("bf16")
  } else {
    EECORE_WGMMA_OF_TYPE("f16")
  }
#undef EECORE_WGMMA_OF_TYPE
#else
  __trap();  // the launcher asks for a GPU that has it, and a build for it
#endif
}

// The same for 64 or 128 columns, with a in shared memory: `a` is the descriptor of 64 columns, the
// rows of a.
template <typename T, bool kAdds = true, bool kTransposed = false, int kTiles>
__device__ __forceinline__ void wgmma_m64k16(float (&sums)[kTiles][4], uint64_t a, uint64_t b) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  static_assert(kTiles == 8 || kTiles == 16);
#if EECORE_HAS_WGMMA
#define EECORE_WGMMA_OF_TYPE(type) \
  if constexpr (kTiles == 8) { \
    EECORE_WGMMA("64", type, EECORE_WGMMA_32_NUMBERS, "%32", "%33", "%34", "0, %35", \
                 EECORE_WGMMA_FROM_SHARED, EECORE_WGMMA_8_SUMS(0)); \
  } else { \
    EECORE_WGMMA("128", type, EECORE_WGMMA_64_NUMBERS, "%64", "%65", "%66", "0, %67", \
                 EECORE_WGMMA_FROM_SHARED, EECORE_WGMMA_8_SUMS(0), EECORE_WGMMA_8_SUMS(8)); \
  }
  if constexpr (std::is_same_v<T, BFloat16>) {
    EECORE_WGMMA_OF_TYPE("bf16")
  } else {
    EECORE_WGMMA_OF_TYPE("f16")
  }
#undef EECORE_WGMMA_OF_TYPE
#else
  __trap();
#endif
}
#undef EECORE_WGMMA
#undef EECORE_WGMMA_FROM_REGISTERS
#undef EECORE_WGMMA_FROM_SHARED
#undef EECORE_WGMMA_SUMS
#undef EECORE_WGMMA_2_SUMS
#undef EECORE_WGMMA_4_SUMS
#undef EECORE_WGMMA_8_SUMS
#undef EECORE_WGMMA_4_NUMBERS
#undef EECORE_WGMMA_8_NUMBERS
#undef EECORE_WGMMA_16_NUMBERS
#undef EECORE_WGMMA_32_NUMBERS
#undef EECORE_WGMMA_64_NUMBERS

// ---- Clusters: blocks, adjacent in x, that read each other's shared memory (sm_90) ----

// Waits for all threads of the cluster; what they wrote to shared memory before is then visible. It
// comes before the first access to another block's shared memory, and after the last.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                   : "memory");
#endif
}

// The 16 bytes at the same place in the shared memory of block `rank` of the cluster.
template <typename T>
__device__ __forceinline__ Pack<T> cluster_load16(const T* from, int rank) {
  uint4 bits{};
#if __CUDA_ARCH__ >= 900
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(shared_address(from)), "r"(rank));
  asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bits.x), "=r"(bits.y), "=r"(bits.z), "=r"(bits.w)
               : "r"(address)
               : "memory");
#endif
  return reinterpret_cast<const Pack<T>&>(bits);
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

namespace eecore::cuda {

// The descriptor of a matrix b of 16-bit elements in shared memory, whose columns lie there one by
// one: 8 elements of a column are 16 bytes, 8 columns of those a core matrix. Without a swizzle
// that is 128 bytes in a row, `leading_bytes` from the 8 elements below it and `stride_bytes` from
// the 8 columns beside it. With one, columns are as far apart as its name says, 8 elements are
// followed by the next, and `leading_bytes` does not count. The 8 columns of a swizzle begin at a
// multiple of 8 times that, or base_offset is (address / 128) % 8 of where they do.
template <typename Pointer>
__device__ __forceinline__ uint64_t wgmma_matrix(Pointer start, int leading_bytes, int stride_bytes,
                                                 Swizzle swizzle, int base_offset = 0) {
  const auto field = [](uint32_t bytes) { return uint64_t{(bytes & 0x3ffff) >> 4}; };
  return field(shared_address(start)) | field(static_cast<uint32_t>(leading_bytes)) << 16 |
         field(static_cast<uint32_t>(stride_bytes)) << 32 |
         static_cast<uint64_t>(base_offset) << 49 | static_cast<uint64_t>(swizzle) << 62;
}

// The descriptor of a matrix b whose rows lie one by one, 64 elements of each in the order of
// Swizzle::k128Bytes: `next_bytes` from there are the next 64 columns of all rows. It begins at a
// multiple of 1024.
template <typename Pointer>
__device__ __forceinline__ uint64_t wgmma_transposed(Pointer start, int next_bytes) {
  return wgmma_matrix(start, next_bytes, 1024, Swizzle::k128Bytes);
}

}  // namespace eecore::cuda
