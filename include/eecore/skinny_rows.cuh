// Rows of x that each block of a skinny product makes ready itself, in shared memory: bit for bit
// what rms_norm_kernel writes to global memory, without another kernel.
#pragma once

#include "eecore/panel_stream.cuh"
#include "eecore/rms_norm.cuh"
#include "eecore/skinny_gemm.cuh"

namespace eecore::cuda {

// The maximum number of rows that a block makes ready. Packed weights and float32 leave no
// registers for more.
template <typename T, typename W>
constexpr int kMaxSharedRows = sizeof(T) == 2 && !kIsPacked<W> ? 32 : 8;
constexpr int kFewRows = 8;  // a thread has a piece of each in registers

// Elements from one row to the next, with the chunks of a weight of elements W; the offset keeps
// the banks of two rows apart.
template <typename T, typename W>
__host__ __device__ constexpr int shared_row_stride(int num_chunks) {
  return num_chunks * kChunkSize<W> + (kXPieces<T, W> > 1 ? 1 : 4) * kPieceSize<T>;
}

// Bytes of shared memory of `num_rows` rows, followed by the norm's weight.
template <typename T, typename W>
__host__ __device__ constexpr int64_t shared_rows_bytes(int64_t num_rows, int num_chunks) {
  return (num_rows + 1) * shared_row_stride<T, W>(num_chunks) * int64_t{sizeof(T)};
}

// SkinnyRows in shared memory.
template <typename T>
struct SharedRows {
  using Element = T;

  Shared<T> data;
  int stride, count;

  __device__ __forceinline__ static Pack<uint32_t> piece(Shared<T> at) {
    return shared_load16(shared_as<uint32_t>(at));
  }
};

// Prefetches a row without reading it.
template <typename T>
__device__ __forceinline__ void prefetch_row(const T* row, int64_t size) {
  constexpr int kLine = 128 / static_cast<int>(sizeof(T));
#pragma unroll 1
  for (int64_t i = static_cast<int64_t>(threadIdx.x) * kLine; i < size;
       i += kSkinnyThreads * kLine) {
    prefetch_l2(row + i);
  }
}

// Makes `count` rows, at most kMax, ready from `to` on. kWhole: all rows and the norm's weight are
// read 16 bytes at a time. kIsSmall: the rows are scaled one by one.
template <int kMax, bool kWhole, bool kIsSmall, typename T>
__device__ __forceinline__ void fill_shared_rows(const RmsNormRows& rows, int count, Shared<T> to,
                                                 int stride) {
  static_assert(kSkinnyThreads == kRmsNormThreads, "else sums of squares are in another order");
  constexpr int kSize = Pack<T>::kSize, kStep = kSkinnyThreads * kSize;
  const int first = static_cast<int>(threadIdx.x) * kSize;
  const int size = static_cast<int>(rows.size), padded_size = static_cast<int>(rows.padded_size);
  const T* x = static_cast<const T*>(rows.x);
  const T* norm_weight = static_cast<const T*>(rows.norm_weight);
  const bool is_normed = norm_weight != nullptr;
  const Shared<T> weight = to + count * stride;
  const auto load = [&](const T* row, int i, bool aligned) {
    if constexpr (kWhole) {
      return i < size ? load16(reinterpret_cast<const uint32_t*>(row + i)) : Words{};
    } else {
      return load_words(row + i, size - i, aligned);
    }
  };

  // What all rows have at a place is loaded together, and the weight with it, or x where there is
  // no weight. Each thread reads back what it wrote.
  const T* factors_from = is_normed ? norm_weight : x;
  float squares[kMax] = {};
  for (int i = first; i < padded_size; i += kStep) {
    Words words[kMax], factors;
#pragma unroll
    for (int row = 0; row < kMax; ++row) {
      if (row < count) words[row] = load(x + row * rows.x_stride, i, rows.x_aligned);
    }
    factors = load(factors_from, i, rows.weight_aligned && rows.x_aligned);
#pragma unroll
    for (int row = 0; row < kMax; ++row) {
      if (row >= count) break;
      const Pack<T> pack = elements_of<T>(words[row]);
      shared_store16(to + (row * stride + i), pack);
      add_squares(pack, squares[row]);
    }
    shared_store16(weight + i, elements_of<T>(factors));
  }
  if (!is_normed) return;

  EECORE_SHARED(float, parts, kMax* kSkinnyWarps);
#pragma unroll
  for (int row = 0; row < kMax; ++row) {
    const float part = reduce_lanes(squares[row]);
    if (threadIdx.x % 32 == 0) parts[static_cast<int>(threadIdx.x) / 32 * kMax + row] = part;
  }
  __syncthreads();
  // Each lane takes a row: divisions and roots of different rows run in parallel.
  const int lane = static_cast<int>(threadIdx.x) % 32, own = lane < count ? lane : 0;
  float total = parts[own];
#pragma unroll
  for (int warp = 1; warp < kSkinnyWarps; ++warp) total += parts[warp * kMax + own];
  const float own_scale = inverse_rms(total, size, rows.eps);
  if constexpr (kIsSmall) {
#pragma unroll 1
    for (int row = 0; row < count; ++row) {
      const float scale = __shfl_sync(kWholeWarp, own_scale, row);
      for (int i = first; i < padded_size; i += kStep) {
        Pack<T> pack = shared_load16(to + (row * stride + i));
        scale_pack(pack, shared_load16(weight + i), scale);
        shared_store16(to + (row * stride + i), pack);
      }
    }
    return;
  }
  float scales[kMax];
#pragma unroll
  for (int row = 0; row < kMax; ++row) scales[row] = __shfl_sync(kWholeWarp, own_scale, row);
  for (int i = first; i < padded_size; i += kStep) {
    const Pack<T> factors = shared_load16(weight + i);
    Pack<T> packs[kMax];
#pragma unroll
    for (int row = 0; row < kMax; ++row) {
      if (row < count) packs[row] = shared_load16(to + (row * stride + i));
    }
#pragma unroll
    for (int row = 0; row < kMax; ++row) {
      if (row >= count) break;
      scale_pack(packs[row], factors, scales[row]);
      shared_store16(to + (row * stride + i), packs[row]);
    }
  }
}

// The same for more than kFewRows rows: each warp makes every eighth row ready alone. A row's
// squares are summed in the order of fill_shared_rows: lanes take the place of the threads that
// have the pieces there, warp by warp.
template <typename T>
__device__ __forceinline__ void fill_rows_by_warps(const RmsNormRows& rows, int count, Shared<T> to,
                                                   int stride) {
  constexpr int kSize = Pack<T>::kSize, kWarpStep = 32 * kSize, kBatch = 8;
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int size = static_cast<int>(rows.size), padded_size = static_cast<int>(rows.padded_size);
  const T* x = static_cast<const T*>(rows.x);
  const T* norm_weight = static_cast<const T*>(rows.norm_weight);

  // The rows of the warp; a batch of pieces of a row is loaded at a time.
#pragma unroll 1
  for (int row = warp; row < count; row += kSkinnyWarps) {
    const T* const from = x + row * rows.x_stride;
    const Shared<T> kept = to + row * stride;
#pragma unroll 1
    for (int first = lane * kSize; first < padded_size; first += kBatch * kWarpStep) {
      Words words[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * kWarpStep;
        words[j] = rows.x_aligned && i + kSize <= size
                       ? load16(reinterpret_cast<const uint32_t*>(from + i))
                       : Words{};
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = first + j * kWarpStep;
        if (i >= padded_size) break;
        if (!rows.x_aligned || i + kSize > size) words[j] = load_words(from + i, size - i, false);
        shared_store16(kept + i, elements_of<T>(words[j]));
      }
    }
  }
  if (norm_weight == nullptr) return;

#pragma unroll 1
  for (int row = warp; row < count; row += kSkinnyWarps) {
    const Shared<T> kept = to + row * stride;
    float squares[kSkinnyWarps] = {};
#pragma unroll 1
    for (int first = lane * kSize; first < padded_size; first += kSkinnyWarps * kWarpStep) {
#pragma unroll
      for (int j = 0; j < kSkinnyWarps; ++j) {
        const int i = first + j * kWarpStep;
        if (i < padded_size) add_squares(shared_load16(kept + i), squares[j]);
      }
    }
    float total = reduce_lanes(squares[0]);
#pragma unroll
    for (int j = 1; j < kSkinnyWarps; ++j) total += reduce_lanes(squares[j]);
    const float scale = inverse_rms(total, size, rows.eps);
#pragma unroll 2
    for (int i = lane * kSize; i < padded_size; i += kWarpStep) {
      Pack<T> pack = shared_load16(kept + i);
      scale_pack(pack, load_pack(norm_weight + i, size - i, rows.weight_aligned), scale);
      shared_store16(kept + i, pack);
    }
  }
}

// Makes `count` rows (1 to kMax) ready from `to` on, `stride` elements apart, where
// shared_rows_bytes are free. All threads of the block call it; `out` of the rows is not used. The
// usual cases have code of their own, which is short, because code that runs once is waited for.
// For a packed weight, whose kernels have no registers to spare, that is only the case of a single
// row.
template <int kMax, bool kIsOfPacked, typename T>
__device__ __forceinline__ SharedRows<T> make_shared_rows(const RmsNormRows& rows, int count,
                                                          Shared<T> to, int stride) {
  if constexpr (kMax > kFewRows) {
    fill_rows_by_warps(rows, count, to, stride);
    __syncthreads();
    return {to, stride, count};
  }
  const bool is_whole = rows.x_aligned && rows.weight_aligned && rows.size % Pack<T>::kSize == 0;
  if (is_whole && count == 1) {
    fill_shared_rows<1, true, kIsOfPacked>(rows, count, to, stride);
  } else if (!kIsOfPacked && is_whole) {
    fill_shared_rows<kFewRows, true, kIsOfPacked>(rows, count, to, stride);
  } else {
    fill_shared_rows<kFewRows, false, kIsOfPacked>(rows, count, to, stride);
  }
  __syncthreads();
  return {to, stride, count};
}

// Starts the stream of the weight, waits for the previous kernel, and returns the rows of x from
// `first_token` on, for a product whose Params has x, norm_weight, eps and in_features: where they
// are, or made ready from byte `shared_at` of shared memory on.
template <typename T, int kNTiles, bool kMakesRows, typename W, int kMTiles, typename RowsOf,
          typename Params>
__device__ __forceinline__ auto start_product(const Params& params, const SkinnyPlan& plan,
                                              WeightStream<W, kMTiles>& weight,
                                              const RowsOf& rows_of, int64_t first_token,
                                              int shared_at) {
  if constexpr (kMakesRows) {
    if (params.norm_weight != nullptr) {
      prefetch_row(static_cast<const T*>(params.norm_weight), params.in_features);
    }
  }
  start_stream(plan, weight, rows_of);
  const auto x = skinny_rows<kNTiles>(static_cast<const T*>(params.x), params.x_stride,
                                      params.num_tokens, first_token);
  if constexpr (kMakesRows) {
    static_assert(8 * kNTiles <= kMaxSharedRows<T, W>);
    const RmsNormRows rows{x.data,
                           params.norm_weight,
                           nullptr,
                           params.in_features,
                           plan.num_chunks * kChunkSize<W>,
                           params.x_stride,
                           params.eps,
                           plan.x_aligned,
                           plan.norm_aligned};
    return make_shared_rows<8 * kNTiles, kIsPacked<W>, T>(
        rows, x.count, dynamic_shared<T>(shared_at), shared_row_stride<T, W>(plan.num_chunks));
  } else {
    return x;
  }
}

}  // namespace eecore::cuda
