// Kernels with a planted fault each, and their sound twins: the emulator must find the one and pass
// the other.
#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "captured_graph.h"
#include "conditional_body.h"
#include "eecore/element.cuh"
#include "eecore/reduce.cuh"
#include "launch.cuh"
#include "tensor_map.cuh"

namespace eecore::cuda::faults {

constexpr int kThreads = 64;

// Each thread takes its neighbour's number.
template <bool kFaulty>
__global__ void missing_barrier(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  numbers[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (!kFaulty) __syncthreads();
  out[threadIdx.x] = numbers[(threadIdx.x + 33) % kThreads];
}

// Threads count in shared memory, and one reads what others may not have counted yet.
template <bool kFaulty>
__global__ void missing_barrier_of_atomics(float* out) {
  EECORE_SHARED(int, count, 1);
  if (threadIdx.x == 0) count[0] = 0;
  __syncthreads();
  atomicAdd(count + 0, 1);
  atomicMax(count + 0, 1);
  if (!kFaulty) __syncthreads();
  out[threadIdx.x] = static_cast<float>(int{count[0]});
}

template <bool kFaulty>
__global__ void missing_syncwarp(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  numbers[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (!kFaulty) __syncwarp();
  out[threadIdx.x] = numbers[threadIdx.x ^ 1];
}

// The second round overwrites what a neighbour may still have to read.
template <bool kFaulty>
__global__ void missing_second_barrier(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    numbers[threadIdx.x] = static_cast<float>(round);
    __syncthreads();
    sum += numbers[(threadIdx.x + 33) % kThreads];
    if (!kFaulty) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

// A column of a matrix of which the rows have 32 words: all of them lie in one bank.
template <bool kFaulty>
__global__ void strided_banks(float* out) {
  constexpr int kStride = kFaulty ? 32 : 33;
  EECORE_SHARED(float, matrix, 32 * kStride + 2);
  const int at = threadIdx.x % 32 * kStride + threadIdx.x / 32;
  matrix[at] = static_cast<float>(threadIdx.x);
  out[threadIdx.x] = matrix[at];
}

// Half of each sector is asked for.
template <bool kFaulty>
__global__ void scattered_sectors(const float* from, float* out) {
  const int pack = kFaulty ? threadIdx.x * 2 % kThreads : threadIdx.x;
  out[threadIdx.x] = load16(from + pack * 4).values[0];
}

// Copies by cp.async in two groups; the second has to be there too.
template <bool kFaulty>
__global__ void missing_wait_group(const float* from, float* out) {
  Shared<float> copied = dynamic_shared<float>();
  const int at = threadIdx.x * 4;
  cp_async16(copied + at, from + at);
  cp_async_commit();
  cp_async16(copied + 4 * kThreads + at, from + at);
  cp_async_commit();
  cp_async_wait<kFaulty ? 1 : 0>();
  __syncthreads();
  out[threadIdx.x] = copied[4 * kThreads + at];
}

// A ring of four stages, that runs empty where all of them are waited for.
template <bool kFaulty>
__global__ void draining_ring(const float* from, float* out) {
  constexpr int kStages = 4, kChunks = 16;
  const Shared<float> ring = dynamic_shared<float>() + static_cast<int>(threadIdx.x) * 4;
  const auto copy = [&](int chunk) {
    if (chunk < kChunks)
      cp_async16(ring + chunk % kStages * (4 * kThreads), from + threadIdx.x * 4);
    cp_async_commit();
  };
  float sum = 0.0f;
  for (int chunk = 0; chunk < kStages - 1; ++chunk) copy(chunk);
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    cp_async_wait<kFaulty ? 0 : kStages - 2>();
    copy(chunk + kStages - 1);
    sum += ring[chunk % kStages * (4 * kThreads)];
  }
  out[threadIdx.x] = sum;
}

template <bool kFaulty>
__global__ void shared_out_of_bounds(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  numbers[threadIdx.x + (kFaulty ? 1 : 0)] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = 1.0f;
}

template <bool kFaulty>
__global__ void read_before_written(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  if (!kFaulty || threadIdx.x != 5) numbers[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = numbers[threadIdx.x];
}

template <bool kFaulty>
__global__ void divergent_barrier(float* out) {
  if (!kFaulty || threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = 1.0f;
}

// The first warp fills what the second reads; it goes on itself.
template <bool kFaulty>
__global__ void missing_named_barrier(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  if (threadIdx.x < 32) {
    numbers[threadIdx.x] = static_cast<float>(threadIdx.x);
    named_barrier_arrive(1, kThreads);
    out[threadIdx.x] = 0.0f;
  } else {
    if (!kFaulty) {
      named_barrier_wait(1, kThreads);
    } else {
      named_barrier_arrive(1, kThreads);
    }
    out[threadIdx.x] = numbers[threadIdx.x - 32];
  }
}

template <bool kFaulty>
__global__ void miscounted_named_barrier(float* out) {
  named_barrier_wait(2, kFaulty && threadIdx.x < 32 ? 32 : kThreads);
  if (threadIdx.x >= 32) named_barrier_wait(3, kFaulty ? kThreads : 32);
  out[threadIdx.x] = 1.0f;
}

template <bool kFaulty>
__global__ void divergent_shuffle(float* out) {
  float x = static_cast<float>(threadIdx.x);
  if (!kFaulty || threadIdx.x % 2 == 0) x = __shfl_xor_sync(kWholeWarp, x, 1);
  out[threadIdx.x] = x;
}

// The last thread of the last block to come wins: right only by luck.
template <bool kFaulty>
__global__ void order_dependent(float* out) {
  const int mine = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  out[kFaulty ? 0 : mine] = static_cast<float>(mine);
}

template <bool kFaulty>
__global__ void unaligned_access(const float* from, float* out) {
  out[threadIdx.x] = load16(from + (kFaulty ? 1 : 0)).values[0];
}

template <bool kFaulty>
__global__ void global_out_of_bounds(float* out) {
  out[threadIdx.x + (kFaulty ? 8 : 0)] = 1.0f;
}

template <bool kFaulty>
__global__ void never_waits(float* out) {
  if (!kFaulty) wait_for_previous_kernel();
  out[threadIdx.x] = 1.0f;
}

// ---- Races in global memory: `data` is what a kernel ahead works with ----

__global__ void write_data(float* data) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  data[threadIdx.x] = static_cast<float>(threadIdx.x);
}

__global__ void read_data(const float* data, float* out) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  out[threadIdx.x] = data[threadIdx.x];
}

// In between: touches nothing of the others.
template <bool kFaulty>
__global__ void lets_next_overtake(float* out) {
  if (kFaulty) let_next_kernel_start();
  wait_for_previous_kernel();
  let_next_kernel_start();
  out[kThreads + threadIdx.x] = 1.0f;
}

template <bool kFaulty>
__global__ void early_read(const float* data, float* out) {
  if (!kFaulty) wait_for_previous_kernel();
  const float x = data[threadIdx.x];
  wait_for_previous_kernel();
  out[threadIdx.x] = x;
}

template <bool kFaulty>
__global__ void early_write(float* data) {
  if (!kFaulty) wait_for_previous_kernel();
  data[threadIdx.x] = 1.0f;
  wait_for_previous_kernel();
}

// A weight on its way through shared memory; of a kernel ahead, if that is faulty.
template <bool kFaulty>
__global__ void early_weight(const float* data, float* out) {
  Shared<float> copied = dynamic_shared<float>();
  const int at = threadIdx.x * 4;
  cp_async16(copied + at, data + at);
  cp_async_commit();
  wait_for_previous_kernel();
  cp_async_wait<0>();
  out[threadIdx.x] = copied[at];
}

// Reads before it waits what the kernel before the one ahead wrote: right where that one has waited
// before it lets others start.
template <bool kFaulty>
__global__ void overtakes(const float* data, float* out) {
  const float x = data[threadIdx.x];
  wait_for_previous_kernel();
  out[threadIdx.x] = x;
}

// One warp waits for the kernel ahead, the other for that warp.
template <bool kFaulty>
__global__ void waits_by_proxy(const float* data, float* out) {
  if (threadIdx.x < 32) wait_for_previous_kernel();
  if (!kFaulty) __syncthreads();
  out[threadIdx.x] = data[threadIdx.x];
}

// Each thread takes its neighbour's number, by global memory.
template <bool kFaulty>
__global__ void missing_barrier_of_block(float* out) {
  out[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (!kFaulty) __syncthreads();
  out[kThreads + threadIdx.x] = out[(threadIdx.x + 33) % kThreads];
}

template <bool kFaulty>
__global__ void shared_place(float* out) {
  if (threadIdx.x == 0) out[kFaulty ? 0 : blockIdx.x] = static_cast<float>(blockIdx.x);
}

// The last of three blocks adds what all of them have left.
enum class Merge { kSound, kNoBarrier, kNoFence, kNoFenceBehind, kTooEarly };
template <Merge kMerge>
__device__ __forceinline__ void merge_in_last(float* data, float* out) {
  EECORE_SHARED(unsigned, count, 1);
  auto* arrivals = reinterpret_cast<unsigned*>(out + kThreads);
  const unsigned last = gridDim.x - 1;
  data[blockIdx.x * kThreads + threadIdx.x] = 1.0f;
  if (kMerge != Merge::kNoBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    if (kMerge != Merge::kNoFence) __threadfence();
    count[0] = atomicInc(arrivals, last);
    if (kMerge != Merge::kNoFenceBehind) __threadfence();
  }
  __syncthreads();
  if (count[0] + (kMerge == Merge::kTooEarly ? 1 : 0) != last) return;
  float sum = 0.0f;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += data[i * kThreads + threadIdx.x];
  out[threadIdx.x] = sum;
}

template <bool kFaulty>
__global__ void merge_without_barrier(float* data, float* out) {
  merge_in_last<kFaulty ? Merge::kNoBarrier : Merge::kSound>(data, out);
}
template <bool kFaulty>
__global__ void merge_without_fence(float* data, float* out) {
  merge_in_last<kFaulty ? Merge::kNoFence : Merge::kSound>(data, out);
}
template <bool kFaulty>
__global__ void merge_without_fence_behind(float* data, float* out) {
  merge_in_last<kFaulty ? Merge::kNoFenceBehind : Merge::kSound>(data, out);
}
template <bool kFaulty>
__global__ void merge_too_early(float* data, float* out) {
  merge_in_last<kFaulty ? Merge::kTooEarly : Merge::kSound>(data, out);
}

// ---- Bulk copies ----

// What is wrong with a warp that copies numbers for another one through a ring of two stages.
enum class Bulk {
  kSound,
  kNoArrival,
  kFewerBytes,
  kMoreBytes,
  kOtherPhase,
  kNoWait,
  kNoRelease,
  kExtraArrival,
  kNoInitFence,
  kNoInitBarrier,
  kNoProxyFence,
  kReadsMbarrier,
  kNotAwaited,
  kUnaligned,
  kOneLaneReleases,  // sound
  kNoSyncwarp,       // the same without a __syncwarp before it
};
template <Bulk kFault>
__device__ __forceinline__ void sum_copied(const float* data, float* out) {
  constexpr bool kOneLane = kFault == Bulk::kOneLaneReleases || kFault == Bulk::kNoSyncwarp;
  constexpr int kStages = 2, kRounds = 6, kNumbers = 64, kBytes = kNumbers * int{sizeof(float)};
  const Shared<float> ring = dynamic_shared<float>();
  EECORE_SHARED(uint64_t, full, kStages);
  EECORE_SHARED(uint64_t, empty, kStages);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, kOneLane ? 1 : 32);
    }
    if (kFault != Bulk::kNoInitFence) fence_mbarrier_init();
  }
  for (int i = threadIdx.x; i < kStages * kNumbers; i += kThreads) ring[i] = 0.0f;
  if (kFault != Bulk::kNoProxyFence) fence_proxy_async();
  if (kFault != Bulk::kNoInitBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    for (int round = 0; round < kRounds; ++round) {
      const int stage = round % kStages, use = round / kStages;
      if (use > 0 && kFault != Bulk::kNoRelease) {
        mbarrier_wait(empty + stage, (use - 1) % 2);
      }
      const int expected = kFault == Bulk::kFewerBytes  ? kBytes / 2
                           : kFault == Bulk::kMoreBytes ? kBytes + 16
                                                        : kBytes;
      if (kFault != Bulk::kNoArrival) mbarrier_arrive(full + stage, expected);
      const float* const from = data + round % 4 * kNumbers + (kFault == Bulk::kUnaligned ? 1 : 0);
      for (int half = 0; half < kNumbers; half += kNumbers / 2) {
        bulk_copy(ring + stage * kNumbers + half, from + half, kBytes / 2, full + stage);
      }
    }
  } else if (threadIdx.x >= 32) {
    if (kFault == Bulk::kReadsMbarrier && lane == 0) out[0] = static_cast<float>(uint64_t{full[0]});
    float sum = 0.0f;
    for (int round = 0; round < kRounds - (kFault == Bulk::kNotAwaited ? 1 : 0); ++round) {
      const int stage = round % kStages, use = round / kStages;
      const int phase = use + (kFault == Bulk::kOtherPhase ? 1 : 0);
      if (kFault != Bulk::kNoWait) mbarrier_wait(full + stage, phase % 2);
      sum += ring[stage * kNumbers + lane] + ring[stage * kNumbers + 32 + lane];
      if (kFault == Bulk::kOneLaneReleases) __syncwarp();
      if (!kOneLane || lane == 0) mbarrier_arrive(empty + stage);
      if (kFault == Bulk::kExtraArrival && lane == 0) mbarrier_arrive(empty + stage);
    }
    out[lane] = sum;
  }
}

#define EECORE_BULK_FAULT(name, sound, fault) \
  template <bool kFaulty> \
  __global__ void name(const float* data, float* out) { \
    sum_copied<kFaulty ? Bulk::fault : Bulk::sound>(data, out); \
  }
EECORE_BULK_FAULT(bulk_copy_without_arrival, kSound, kNoArrival)
EECORE_BULK_FAULT(bulk_copy_of_more_bytes, kSound, kFewerBytes)
EECORE_BULK_FAULT(bulk_copy_of_fewer_bytes, kSound, kMoreBytes)
EECORE_BULK_FAULT(bulk_copy_of_other_phase, kSound, kOtherPhase)
EECORE_BULK_FAULT(bulk_copy_without_wait, kSound, kNoWait)
EECORE_BULK_FAULT(bulk_copy_without_release, kSound, kNoRelease)
EECORE_BULK_FAULT(bulk_copy_released_twice, kSound, kExtraArrival)
EECORE_BULK_FAULT(bulk_copy_without_init_fence, kSound, kNoInitFence)
EECORE_BULK_FAULT(bulk_copy_without_init_barrier, kSound, kNoInitBarrier)
EECORE_BULK_FAULT(bulk_copy_without_proxy_fence, kSound, kNoProxyFence)
EECORE_BULK_FAULT(bulk_copy_whose_mbarrier_is_read, kSound, kReadsMbarrier)
EECORE_BULK_FAULT(bulk_copy_that_is_not_awaited, kSound, kNotAwaited)
EECORE_BULK_FAULT(bulk_copy_of_unaligned_bytes, kSound, kUnaligned)
EECORE_BULK_FAULT(bulk_copy_released_by_one_lane, kOneLaneReleases, kNoSyncwarp)
#undef EECORE_BULK_FAULT

// ---- Products of a warpgroup ----

constexpr int kGroupThreads = 128;

// Where 8 elements of a column of b[64, num_columns] are, in bytes, as a swizzle has it.
template <Swizzle kSwizzle>
struct Layout {
  static constexpr int kColumnBytes = kSwizzle == Swizzle::k128Bytes  ? 128
                                      : kSwizzle == Swizzle::k64Bytes ? 64
                                      : kSwizzle == Swizzle::k32Bytes ? 32
                                                                      : 16;
  static constexpr int kPieces = kColumnBytes / 16;
  int num_columns;

  // Each column's next pieces come after those of all columns.
  int leading_bytes() const { return num_columns * kColumnBytes; }
  int stride_bytes() const { return 8 * kColumnBytes; }
  int start_of(int piece) const { return piece / kPieces * leading_bytes() + piece % kPieces * 16; }
  int place_of(int column, int piece) const {
    const int exchanged = kColumnBytes * (column % 8) / 128 % kPieces;
    return start_of(piece ^ exchanged) + column * kColumnBytes;
  }
};

// out[64, 8 * kTiles] = a[64, 64] b[8 * kTiles, 64]^T, with b in shared memory from byte 128 *
// `shift` on.
template <typename T, int kTiles, Swizzle kSwizzle>
__global__ void swizzled_product(const float* a, const float* b, float* out, int shift) {
  const Layout<kSwizzle> layout{8 * kTiles};
  const Shared<T> columns = dynamic_shared<T>(128 * shift);
  for (int at = threadIdx.x; at < layout.num_columns * 64; at += kGroupThreads) {
    const int column = at / 64, k = at % 64;
    columns[layout.place_of(column, k / 8) / 2 + k % 8] = from_float<T>(b[at]);
  }
  fence_proxy_async();
  __syncthreads();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4, pair = lane % 4;
  WgmmaSums<kTiles> sums;
  WgmmaPart parts[4];
  for (int step = 0; step < 4; ++step) {
    for (int i = 0; i < 4; ++i) {
      const float* from = a + (row + i % 2 * 8) * 64 + 16 * step + i / 2 * 8 + 2 * pair;
      parts[step][i] = pack_pair<T>(from[0], from[1]);
    }
  }
  wgmma_fence(sums, parts);
  for (int step = 0; step < 4; ++step) {
    const uint64_t matrix =
        wgmma_matrix(columns + layout.start_of(2 * step) / 2, layout.leading_bytes(),
                     layout.stride_bytes(), kSwizzle, kSwizzle == Swizzle::kNone ? 0 : shift % 8);
    if (step == 0) {
      wgmma_m64k16<T, false>(sums, parts[step], matrix);  // in place of what they were
    } else {
      wgmma_m64k16<T>(sums, parts[step], matrix);
    }
  }
  wgmma_commit();
  wgmma_wait<0>(sums, parts);
  for (int n = 0; n < kTiles; ++n) {
    for (int i = 0; i < 4; ++i) {
      out[(row + i / 2 * 8) * 8 * kTiles + 8 * n + 2 * pair + i % 2] = sums[n][i];
    }
  }
}

template <typename T>
void run_product(int swizzle, int columns, int shift, const float* a, const float* b, float* out) {
  const auto start = [&](auto kernel) {
    launch("swizzled_product", kernel,
           {dim3(1), dim3(kGroupThreads), static_cast<size_t>(128 * shift + columns * 128)},
           {nullptr, 0}, a, b, out, shift);
  };
  const auto with_tiles = [&](auto tiles) {
    constexpr int kTiles = tiles();
    switch (static_cast<Swizzle>(swizzle)) {
      case Swizzle::kNone:
        return start(swizzled_product<T, kTiles, Swizzle::kNone>);
      case Swizzle::k128Bytes:
        return start(swizzled_product<T, kTiles, Swizzle::k128Bytes>);
      case Swizzle::k64Bytes:
        return start(swizzled_product<T, kTiles, Swizzle::k64Bytes>);
      case Swizzle::k32Bytes:
        return start(swizzled_product<T, kTiles, Swizzle::k32Bytes>);
    }
    throw std::runtime_error("no such swizzle");
  };
  if (columns == 8) return with_tiles(std::integral_constant<int, 1>{});
  if (columns == 16) return with_tiles(std::integral_constant<int, 2>{});
  if (columns == 32) return with_tiles(std::integral_constant<int, 4>{});
  if (columns == 64) return with_tiles(std::integral_constant<int, 8>{});
  with_tiles(std::integral_constant<int, 16>{});
}

// What is wrong with a product of 64 rows and 8 columns of ones, to which that of other numbers is
// added.
enum class Wgmma {
  kSound,
  kNoProxyFence,
  kFenceBehindBarrier,
  kNoFence,
  kNoFenceBetween,
  kNoCommit,
  kOneGroupPending,
  kReadsSums,
  kWritesPart,
  kWritesMatrix,
  kNoBarrierBehind,
  kPendingCopy,
  kGivesUpPart,
  kLeavesOutWarp,
  kOtherMatrix,
  kReservedBits,
};
template <Wgmma kFault>
__device__ __forceinline__ void multiply_ones(const float* data, float* out) {
  const Shared<BFloat16> matrix = dynamic_shared<BFloat16>();  // of 16 x 8 elements, two of them
  const BFloat16 one = from_float<BFloat16>(1.0f);
  const int warp = threadIdx.x / 32;
  matrix[threadIdx.x] = one;
  matrix[kGroupThreads + threadIdx.x] = one;
  if (kFault == Wgmma::kPendingCopy) {
    __syncthreads();
    if (threadIdx.x == 0) cp_async16(shared_as<float>(matrix), data);
  }
  if (kFault != Wgmma::kNoProxyFence && kFault != Wgmma::kFenceBehindBarrier) fence_proxy_async();
  __syncthreads();
  if (kFault == Wgmma::kFenceBehindBarrier) fence_proxy_async();
  WgmmaSums<1> sums;
  WgmmaPart parts[1];
  for (int i = 0; i < 4; ++i) {
    sums[0][i] = 0.0f;
    parts[0][i] = pack_pair<BFloat16>(1.0f, 1.0f);
  }
  const auto start = [&](WgmmaPart& part, int which) {
    uint64_t descriptor = wgmma_matrix(matrix + which * kGroupThreads, 128, 256, Swizzle::kNone);
    if (kFault == Wgmma::kReservedBits) descriptor |= uint64_t{1} << 52;
    wgmma_m64k16<BFloat16>(sums, part, descriptor);
  };
  if (kFault != Wgmma::kNoFence) wgmma_fence(sums, parts);
  if (kFault == Wgmma::kGivesUpPart) {
    WgmmaPart brief[1];
    for (int i = 0; i < 4; ++i) brief[0][i] = parts[0][i];
    wgmma_fence(sums, brief);
    start(brief[0], 0);
  } else if (kFault != Wgmma::kLeavesOutWarp || warp != 2) {
    start(parts[0], kFault == Wgmma::kOtherMatrix && warp == 2 ? 1 : 0);
  }
  if (kFault == Wgmma::kWritesPart) parts[0][3] = 0;
  if (kFault == Wgmma::kWritesMatrix && threadIdx.x == 77) matrix[5] = one;
  if (kFault == Wgmma::kReadsSums) out[0] = sums[0][0];
  if (kFault != Wgmma::kNoCommit) wgmma_commit();
  wgmma_wait<kFault == Wgmma::kOneGroupPending ? 1 : 0>(sums, parts);
  // Once more, with other columns.
  for (int i = 0; i < 4; ++i) parts[0][i] = pack_pair<BFloat16>(2.0f, 2.0f);
  if (kFault != Wgmma::kNoBarrierBehind) named_barrier_wait(1, kGroupThreads);
  matrix[threadIdx.x] = from_float<BFloat16>(3.0f);
  fence_proxy_async();
  named_barrier_wait(1, kGroupThreads);
  if (kFault != Wgmma::kNoFenceBetween) wgmma_fence(sums, parts);
  start(parts[0], 0);
  wgmma_commit();
  wgmma_wait<0>(sums, parts);
  out[threadIdx.x] = sums[0][0];
}

#define EECORE_WGMMA_FAULT(name, fault) \
  template <bool kFaulty> \
  __global__ void name(const float* data, float* out) { \
    multiply_ones<kFaulty ? Wgmma::fault : Wgmma::kSound>(data, out); \
  }
EECORE_WGMMA_FAULT(wgmma_without_proxy_fence, kNoProxyFence)
EECORE_WGMMA_FAULT(wgmma_proxy_fence_too_late, kFenceBehindBarrier)
EECORE_WGMMA_FAULT(wgmma_without_fence, kNoFence)
EECORE_WGMMA_FAULT(wgmma_without_second_fence, kNoFenceBetween)
EECORE_WGMMA_FAULT(wgmma_without_commit, kNoCommit)
EECORE_WGMMA_FAULT(wgmma_with_group_pending, kOneGroupPending)
EECORE_WGMMA_FAULT(wgmma_sums_read, kReadsSums)
EECORE_WGMMA_FAULT(wgmma_part_written, kWritesPart)
EECORE_WGMMA_FAULT(wgmma_matrix_written, kWritesMatrix)
EECORE_WGMMA_FAULT(wgmma_matrix_written_by_others, kNoBarrierBehind)
EECORE_WGMMA_FAULT(wgmma_of_pending_copy, kPendingCopy)
EECORE_WGMMA_FAULT(wgmma_part_given_up, kGivesUpPart)
EECORE_WGMMA_FAULT(wgmma_without_a_warp, kLeavesOutWarp)
EECORE_WGMMA_FAULT(wgmma_of_other_matrix, kOtherMatrix)
EECORE_WGMMA_FAULT(wgmma_of_reserved_bits, kReservedBits)
#undef EECORE_WGMMA_FAULT

// ---- Products of boxes of tensors, which a warp copies for two warpgroups ----

constexpr int kBoxSize = 64 * 64;  // elements
constexpr int kCopiedThreads = 3 * kGroupThreads, kCopiedRows = 128;

enum class Copied {
  kSound,
  kNoWait,
  kOneLaneWaits,
  kReleasesEarly,
  kOneWarpReleases,
  kArrivalMissing,
  kNoFenceOfZeros,
  kTakesTooMany,
  kOneWarpTakes,
  kMisaligned,
  kOtherRank,
  kHalfAWarpElects,
};

// out[128, kColumns] = a[128, depth] b[columns, depth]^T, or a b[depth, columns] with kTransposed;
// a is in registers, or copied with kFromShared. Columns up to kColumns are zeros.
template <typename T, int kTiles, bool kTransposed, bool kFromShared, Copied kFault>
__global__ __launch_bounds__(kCopiedThreads,
                             1) void copied_product(const __grid_constant__ CUtensorMap a_map,
                                                    const __grid_constant__ CUtensorMap b_map,
                                                    const T* a, int depth, float* out) {
  constexpr int kStages = 2, kWarps = 8, kBoxesOfB = kTiles / 8;
  constexpr int kBoxes = kBoxesOfB + (kFromShared ? 2 : 0);
  const Shared<T> boxes = swizzled_shared<T>(kFault == Copied::kMisaligned ? 128 : 0);
  const Shared<uint64_t> full = swizzled_shared<uint64_t>(kStages * kBoxes * kBoxSize * 2 + 128);
  const Shared<uint64_t> empty = full + kStages;
  const auto box_of = [&](int stage, int box) { return boxes + (stage * kBoxes + box) * kBoxSize; };
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const int num_rounds = (depth + 63) / 64;
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(full + stage, 1);
      mbarrier_init(empty + stage, kFault == Copied::kOneWarpReleases  ? 2
                                   : kFault == Copied::kArrivalMissing ? kWarps + 1
                                                                       : kWarps);
    }
    fence_mbarrier_init();
  }
  // What is copied takes the place of numbers that threads wrote.
  box_of(0, 0)[thread] = from_float<T>(7.0f);
  if (kFault != Copied::kNoFenceOfZeros) fence_proxy_async();
  __syncthreads();
  if (warp < 4) {
    give_registers<24>();
    if (warp > 0 || (kFault == Copied::kHalfAWarpElects && lane % 2 == 1)) return;
    if (!elect_lane()) return;
    for (int round = 0; round < num_rounds; ++round) {
      const int stage = round % kStages, use = round / kStages;
      if (use > 0) mbarrier_wait(empty + stage, (use - 1) % 2);
      mbarrier_arrive(full + stage, kBoxes * kBoxSize * 2);
      for (int box = 0; box < kBoxesOfB; ++box) {
        if (kFault == Copied::kOtherRank) {
          const int at[3] = {0, 0, 0};
          tensor_copy(box_of(stage, box), b_map, at, full + stage);
        }
        const int at[2] = {64 * (kTransposed ? box : round), 64 * (kTransposed ? round : box)};
        tensor_copy(box_of(stage, box), b_map, at, full + stage);
      }
      for (int rows = 0; kFromShared && rows < 2; ++rows) {
        const int at[2] = {64 * round, 64 * rows};
        tensor_copy(box_of(stage, kBoxesOfB + rows), a_map, at, full + stage);
      }
    }
    return;
  }
  if (kFault != Copied::kOneWarpTakes || warp == 5) {
    take_registers<kFault == Copied::kTakesTooMany ? 248 : 240>();
  }
  const int group = warp / 4 - 1;
  const int row = 64 * group + warp % 4 * 16 + lane / 4, pair = lane % 4;
  WgmmaSums<kTiles> sums;
  for (int n = 0; n < kTiles; ++n) {
    for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
  }
  for (int round = 0; round < num_rounds; ++round) {
    const int stage = round % kStages, phase = round / kStages % 2;
    if (kFault != Copied::kNoWait && (group == 0 || lane == 0)) mbarrier_wait(full + stage, phase);
    if (group == 1 && kFault != Copied::kOneLaneWaits) __syncwarp();
    WgmmaPart parts[4];
    for (int i = 0; !kFromShared && i < 16; ++i) {
      const int column = 64 * round + i / 4 * 16 + i % 4 / 2 * 8 + 2 * pair;
      const T* const from = a + (row + i % 2 * 8) * depth + column;
      parts[i / 4][i % 4] =
          column < depth ? from[0].bits | static_cast<uint32_t>(from[1].bits) << 16 : 0;
    }
    wgmma_fence(sums, parts);
    for (int step = 0; step < 4; ++step) {
      const uint64_t b =
          kTransposed ? wgmma_transposed(box_of(stage, 0) + 16 * 64 * step, kBoxSize * 2)
                      : wgmma_matrix(box_of(stage, 0) + 16 * step, 0, 1024, Swizzle::k128Bytes);
      if constexpr (kFromShared) {
        const uint64_t of_a =
            wgmma_matrix(box_of(stage, kBoxesOfB + group) + 16 * step, 0, 1024, Swizzle::k128Bytes);
        wgmma_m64k16<T, true, kTransposed>(sums, of_a, b);
      } else {
        wgmma_m64k16<T, true, kTransposed>(sums, parts[step], b);
      }
    }
    wgmma_commit();
    if (kFault != Copied::kReleasesEarly) wgmma_wait<0>(sums, parts);
    __syncwarp();
    if (lane == 0 && (kFault != Copied::kOneWarpReleases || warp % 4 == 0)) {
      mbarrier_arrive(empty + stage);
    }
    if (kFault == Copied::kReleasesEarly) wgmma_wait<0>(sums, parts);
  }
  for (int n = 0; n < kTiles; ++n) {
    for (int i = 0; i < 4; ++i) {
      out[(row + i / 2 * 8) * 8 * kTiles + 8 * n + 2 * pair + i % 2] = sums[n][i];
    }
  }
}

template <typename T, int kTiles, bool kTransposed, bool kFromShared,
          Copied kFault = Copied::kSound>
void run_copied(const char* name, int depth, int columns, const T* a, const T* b, float* out) {
  constexpr uint32_t kBox = 64;
  const auto map = [&](const T* data, int inner, int outer) {
    return tensor_map<2>(data, 2,
                         {{static_cast<uint64_t>(inner), static_cast<uint64_t>(outer)},
                          {static_cast<uint64_t>(2 * inner)},
                          {kBox, kBox}});
  };
  const size_t bytes = 2 * (kTiles / 8 + (kFromShared ? 2 : 0)) * kBoxSize * 2 + 256;
  launch(name, copied_product<T, kTiles, kTransposed, kFromShared, kFault>,
         {dim3(1), dim3(kCopiedThreads), bytes}, {nullptr, 0}, map(a, depth, kCopiedRows),
         kTransposed ? map(b, columns, depth) : map(b, depth, columns), a, depth, out);
}

template <typename T>
void run_copied_product(bool transposed, bool from_shared, int tiles, int depth, int columns,
                        const T* a, const T* b, float* out) {
  const auto choose = [&](auto kTransposed, auto kFromShared) {
    const auto run = tiles == 8 ? run_copied<T, 8, kTransposed(), kFromShared()>
                                : run_copied<T, 16, kTransposed(), kFromShared()>;
    run("copied_product", depth, columns, a, b, out);
  };
  using No = std::false_type;
  using Yes = std::true_type;
  if (transposed) return from_shared ? choose(Yes{}, Yes{}) : choose(Yes{}, No{});
  return from_shared ? choose(No{}, Yes{}) : choose(No{}, No{});
}

// A product of ones; false if it is none of these faults.
template <bool kFaulty>
bool run_copied_fault(const std::string& fault) {
  constexpr int kDepth = 192, kColumns = 64;
  const std::vector<BFloat16> a(kCopiedRows * kDepth, from_float<BFloat16>(1.0f)),
      b(kColumns * kDepth, from_float<BFloat16>(1.0f));
  std::vector<float> out(kCopiedRows * kColumns);
  const auto is = [&](const char* name, auto which) {
    if (fault != name) return false;
    constexpr Copied kFault = kFaulty ? decltype(which)::value : Copied::kSound;
    run_copied<BFloat16, 8, true, true, kFault>(name, kDepth, kColumns, a.data(), b.data(),
                                                out.data());
    return true;
  };
#define EECORE_COPIED_FAULT(name, fault) is(#name, std::integral_constant<Copied, Copied::fault>{})
  return EECORE_COPIED_FAULT(tensor_copy_without_wait, kNoWait) ||
         EECORE_COPIED_FAULT(tensor_copy_that_one_lane_awaits, kOneLaneWaits) ||
         EECORE_COPIED_FAULT(tensor_copy_released_before_the_product, kReleasesEarly) ||
         EECORE_COPIED_FAULT(tensor_copy_released_by_one_warp, kOneWarpReleases) ||
         EECORE_COPIED_FAULT(tensor_copy_whose_release_lacks_an_arrival, kArrivalMissing) ||
         EECORE_COPIED_FAULT(tensor_copy_without_proxy_fence, kNoFenceOfZeros) ||
         EECORE_COPIED_FAULT(tensor_copy_to_no_multiple_of_1024, kMisaligned) ||
         EECORE_COPIED_FAULT(tensor_copy_at_too_many_coordinates, kOtherRank) ||
         EECORE_COPIED_FAULT(registers_that_are_not_given, kTakesTooMany) ||
         EECORE_COPIED_FAULT(registers_that_one_warp_takes, kOneWarpTakes) ||
         EECORE_COPIED_FAULT(elected_by_half_a_warp, kHalfAWarpElects);
#undef EECORE_COPIED_FAULT
}

struct BoxCoordinates {
  int at[4];
};

// Copies a box, and gives its 2-byte words in the order of the tensor.
template <int kRank>
__global__ void copied_box(const __grid_constant__ CUtensorMap map, BoxCoordinates from, int bytes,
                           uint16_t* out) {
  const Shared<uint16_t> box = swizzled_shared<uint16_t>(1024);
  const Shared<uint64_t> full = swizzled_shared<uint64_t>();
  if (threadIdx.x == 0) {
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_arrive(full, bytes);
    int at[kRank];
    for (int i = 0; i < kRank; ++i) at[i] = from.at[i];
    tensor_copy(box, map, at, full);
  }
  __syncthreads();
  mbarrier_wait(full, 0);
  for (int i = threadIdx.x; i < bytes / 2; i += kThreads) {
    out[i] = box[i ^ (i / 64 % 8) * 8];
  }
}

template <int kRank>
void run_copied_box(int element_bytes, const uint64_t* sizes, const uint32_t* box, const int* at,
                    const void* data, void* out) {
  TensorBoxes<kRank> of{};
  BoxCoordinates from{};
  uint64_t stride = element_bytes;
  int bytes = element_bytes;
  for (int i = 0; i < kRank; ++i) {
    of.sizes[i] = sizes[i];
    of.box[i] = box[i];
    from.at[i] = at[i];
    stride *= sizes[i];
    bytes *= static_cast<int>(box[i]);
    if (i < kRank - 1) of.strides[i] = stride;
  }
  launch("copied_box", copied_box<kRank>,
         {dim3(1), dim3(kThreads), static_cast<size_t>(1024 + bytes)}, {nullptr, 0},
         tensor_map(data, element_bytes, of), from, bytes, static_cast<uint16_t*>(out));
}

// ---- Clusters ----

// What is wrong with two blocks that add up each other's numbers.
enum class InCluster { kSound, kNotBegun, kNotWritten, kEndsEarly, kLeavesOutWarp, kNoSuchBlock };
template <InCluster kFault>
__device__ __forceinline__ void add_numbers_of_other(float* out) {
  const Shared<float> numbers = dynamic_shared<float>();
  const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
  if (kFault == InCluster::kNotWritten) cluster_sync();
  numbers[thread] = static_cast<float>(block + thread);
  if (kFault == InCluster::kNotBegun || kFault == InCluster::kNotWritten) {
    __syncthreads();
  } else if (kFault != InCluster::kLeavesOutWarp || thread / 32 != 1) {
    cluster_sync();
  }
  if (thread < 32) {
    const int other = kFault == InCluster::kNoSuchBlock ? 2 : 1 - block % 2;
    const Pack<float> four = cluster_load16(numbers + 4 * thread, other);
    out[32 * block + thread] = four.values[0] + four.values[1] + four.values[2] + four.values[3];
  }
  if (kFault != InCluster::kEndsEarly) cluster_sync();
}

#define EECORE_CLUSTER_FAULT(name, fault) \
  template <bool kFaulty> \
  __global__ void name(float* out) { \
    add_numbers_of_other<kFaulty ? InCluster::fault : InCluster::kSound>(out); \
  }
EECORE_CLUSTER_FAULT(cluster_not_begun, kNotBegun)
EECORE_CLUSTER_FAULT(cluster_not_written, kNotWritten)
EECORE_CLUSTER_FAULT(cluster_ends_early, kEndsEarly)
EECORE_CLUSTER_FAULT(cluster_without_a_warp, kLeavesOutWarp)
EECORE_CLUSTER_FAULT(cluster_of_no_such_block, kNoSuchBlock)
EECORE_CLUSTER_FAULT(cluster_of_odd_grid, kSound)

// A kernel behind others, each of which may start early; false if it is none of these.
template <bool kFaulty>
bool run_in_chain(const std::string& fault, float* data, float* out, Stream stream) {
  const LaunchShape shape{dim3(1), dim3(kThreads), 8 * kThreads * sizeof(float),
                          Launch::kAfterPrevious};
  const auto write = [&] { launch("write_data", write_data, shape, stream, data); };
  const auto pass = [&](auto kernel) { launch("lets_next_overtake", kernel, shape, stream, out); };
  if (fault == "early_read") {
    write();
    launch("early_read", early_read<kFaulty>, shape, stream, data, out);
  } else if (fault == "early_write") {
    launch("read_data", read_data, shape, stream, data, out);
    launch("early_write", early_write<kFaulty>, shape, stream, data);
  } else if (fault == "early_weight") {
    if (kFaulty) write();
    launch("early_weight", early_weight<kFaulty>, shape, stream, data, out);
  } else if (fault == "overtakes") {
    write();
    pass(lets_next_overtake<kFaulty>);
    launch("overtakes", overtakes<kFaulty>, shape, stream, data, out);
  } else if (fault == "waits_by_proxy") {
    write();
    launch("waits_by_proxy", waits_by_proxy<kFaulty>, shape, stream, data, out);
  } else {
    return false;
  }
  return true;
}

// ---- Faults of who launches ----

template <bool kFaulty>
__global__ void lowered_shared_limit(float* out) {
  out[threadIdx.x] = 1.0f;
}

template <bool kFaulty>
__global__ void loaded_in_capture(float* out) {
  out[threadIdx.x] = 1.0f;
}

template <bool kFaulty>
__global__ void early_behind_condition(float* out) {
  wait_for_previous_kernel();
  out[threadIdx.x] = 1.0f;
}

// Much shared memory, then less of it.
template <bool kFaulty>
void launch_with_less(float* out) {
  constexpr size_t kMuch = 64 * 1024, kLess = 56 * 1024;
  const auto kernel = lowered_shared_limit<kFaulty>;
  launch("lowered_shared_limit", kernel, {dim3(1), dim3(kThreads), kMuch}, {nullptr, 0}, out);
  if (kFaulty) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, kLess),
               "lowered_shared_limit");
  }
  launch("lowered_shared_limit", kernel, {dim3(1), dim3(kThreads), kLess}, {nullptr, 0}, out);
}

// work(stream) while the stream is captured, into a graph that is given up.
template <typename Work>
void in_capture(const Work& work) {
  cudaStream_t handle = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreate");
  const std::unique_ptr<void, cudaError_t (*)(cudaStream_t)> owner(handle, cudaStreamDestroy);
  const CapturedGraph graph({handle, 0});
  work(Stream{handle, 0});
}

template <bool kFaulty>
void launch_first_in_capture(float* out) {
  const LaunchShape shape{dim3(1), dim3(kThreads)};
  const auto kernel = loaded_in_capture<kFaulty>;
  if (!kFaulty) launch("loaded_in_capture", kernel, shape, {nullptr, 0}, out);
  in_capture([&](Stream stream) { launch("loaded_in_capture", kernel, shape, stream, out); });
}

template <bool kFaulty>
void launch_behind_condition(float* out) {
  const LaunchShape shape{dim3(1), dim3(kThreads), 0, Launch::kAfterPrevious};
  const auto kernel = early_behind_condition<kFaulty>;
  launch("early_behind_condition", kernel, shape, {nullptr, 0}, out);
  const uint8_t flag = 0;
  in_capture([&](Stream stream) {
    ConditionalBody(stream, &flag, true).end();
    if (!kFaulty) return launch("early_behind_condition", kernel, shape, stream, out);
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config{shape.grid, shape.block, 0, stream.handle, &early, 1};
    check_cuda(cudaLaunchKernelEx(&config, kernel, out), "early_behind_condition");
  });
}

template <bool kFaulty>
void run(const std::string& fault, float* data, float* out) {
  const Stream stream{nullptr, 0};
  LaunchShape shape{dim3(1), dim3(kThreads)};
#define EECORE_FAULT(name, ...) \
  if (fault == #name) return launch(#name, name<kFaulty>, shape, stream, ##__VA_ARGS__);
  EECORE_FAULT(missing_barrier, out)
  EECORE_FAULT(missing_barrier_of_atomics, out)
  EECORE_FAULT(missing_syncwarp, out)
  EECORE_FAULT(missing_second_barrier, out)
  EECORE_FAULT(shared_out_of_bounds, out)
  EECORE_FAULT(read_before_written, out)
  EECORE_FAULT(divergent_barrier, out)
  EECORE_FAULT(missing_named_barrier, out)
  EECORE_FAULT(miscounted_named_barrier, out)
  EECORE_FAULT(divergent_shuffle, out)
  EECORE_FAULT(strided_banks, out)
  EECORE_FAULT(scattered_sectors, static_cast<const float*>(data), out)
  EECORE_FAULT(unaligned_access, static_cast<const float*>(data), out)
  EECORE_FAULT(global_out_of_bounds, out)
  EECORE_FAULT(missing_barrier_of_block, out)
  shape.shared_bytes = 16 * kThreads * sizeof(float);
  EECORE_FAULT(draining_ring, static_cast<const float*>(data), out)
  EECORE_FAULT(missing_wait_group, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_without_arrival, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_of_more_bytes, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_of_fewer_bytes, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_of_other_phase, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_without_wait, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_without_release, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_released_twice, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_without_init_fence, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_without_init_barrier, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_without_proxy_fence, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_whose_mbarrier_is_read, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_that_is_not_awaited, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_of_unaligned_bytes, static_cast<const float*>(data), out)
  EECORE_FAULT(bulk_copy_released_by_one_lane, static_cast<const float*>(data), out)
  shape.order = Launch::kAfterPrevious;
  EECORE_FAULT(never_waits, out)
  shape = {dim3(1), dim3(kGroupThreads), 512};
  EECORE_FAULT(wgmma_without_proxy_fence, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_proxy_fence_too_late, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_without_fence, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_without_second_fence, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_without_commit, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_with_group_pending, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_sums_read, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_part_written, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_matrix_written, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_matrix_written_by_others, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_of_pending_copy, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_part_given_up, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_without_a_warp, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_of_other_matrix, static_cast<const float*>(data), out)
  EECORE_FAULT(wgmma_of_reserved_bits, static_cast<const float*>(data), out)
  shape = {dim3(4), dim3(kGroupThreads), 512, Launch::kInOrder, 2};
  EECORE_FAULT(cluster_not_begun, out)
  EECORE_FAULT(cluster_not_written, out)
  EECORE_FAULT(cluster_ends_early, out)
  EECORE_FAULT(cluster_without_a_warp, out)
  EECORE_FAULT(cluster_of_no_such_block, out)
  shape.grid.x = kFaulty ? 3 : 4;
  EECORE_FAULT(cluster_of_odd_grid, out)
  shape = {dim3(3), dim3(kThreads)};
  EECORE_FAULT(order_dependent, out)
  EECORE_FAULT(shared_place, out)
  EECORE_FAULT(merge_without_barrier, data, out)
  EECORE_FAULT(merge_without_fence, data, out)
  EECORE_FAULT(merge_without_fence_behind, data, out)
  EECORE_FAULT(merge_too_early, data, out)
#undef EECORE_FAULT
  if (run_in_chain<kFaulty>(fault, data, out, stream)) return;
  if (run_copied_fault<kFaulty>(fault)) return;
  if (fault == "lowered_shared_limit") return launch_with_less<kFaulty>(out);
  if (fault == "loaded_in_capture") return launch_first_in_capture<kFaulty>(out);
  if (fault == "early_behind_condition") return launch_behind_condition<kFaulty>(out);
  throw std::runtime_error("no such fault: " + fault);
}

}  // namespace eecore::cuda::faults

namespace {

// What went wrong in `run` goes to `message`. Returns whether anything did.
template <typename Run>
int reported(char* message, int message_size, const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    const int length = std::min<int>(message_size - 1, static_cast<int>(std::strlen(error.what())));
    std::memcpy(message, error.what(), length);
    message[length] = '\0';
    return 1;
  }
  return 0;
}

}  // namespace

// Runs a kernel on `data` (4 * 64 floats) into `out` (3 * 64 floats).
extern "C" __attribute__((visibility("default"))) int eecore_emulator_run_fault(
    const char* fault, int faulty, float* data, float* out, char* message, int message_size) {
  return reported(message, message_size, [&] {
    if (faulty != 0) {
      eecore::cuda::faults::run<true>(fault, data, out);
    } else {
      eecore::cuda::faults::run<false>(fault, data, out);
    }
  });
}

// out[64, columns] = a[64, 64] b[columns, 64]^T by wgmma.
extern "C" __attribute__((visibility("default"))) int eecore_emulator_run_product(
    int is_half, int swizzle, int columns, int shift, const float* a, const float* b, float* out,
    char* message, int message_size) {
  return reported(message, message_size, [&] {
    if (is_half != 0) {
      eecore::cuda::faults::run_product<eecore::cuda::Float16>(swizzle, columns, shift, a, b, out);
    } else {
      eecore::cuda::faults::run_product<eecore::cuda::BFloat16>(swizzle, columns, shift, a, b, out);
    }
  });
}

// out[128, 8 * tiles] = a[128, depth] b[columns, depth]^T, or a b[depth, columns], of 16-bit
// numbers that tensor copies bring.
extern "C" __attribute__((visibility("default"))) int eecore_emulator_run_copied_product(
    int is_half, int transposed, int from_shared, int tiles, int depth, int columns, const void* a,
    const void* b, float* out, char* message, int message_size) {
  return reported(message, message_size, [&] {
    const auto run = [&](auto number) {
      using T = decltype(number);
      eecore::cuda::faults::run_copied_product<T>(transposed != 0, from_shared != 0, tiles, depth,
                                                  columns, static_cast<const T*>(a),
                                                  static_cast<const T*>(b), out);
    };
    return is_half != 0 ? run(eecore::cuda::Float16{}) : run(eecore::cuda::BFloat16{});
  });
}

// A box of a contiguous tensor of 2 to 4 dimensions, the innermost first.
extern "C" __attribute__((visibility("default"))) int eecore_emulator_copy_box(
    int rank, int element_bytes, const uint64_t* sizes, const uint32_t* box, const int* at,
    const void* data, void* out, char* message, int message_size) {
  using namespace eecore::cuda::faults;
  return reported(message, message_size, [&] {
    const auto run = rank == 2   ? run_copied_box<2>
                     : rank == 3 ? run_copied_box<3>
                                 : run_copied_box<4>;
    run(element_bytes, sizes, box, at, data, out);
  });
}
