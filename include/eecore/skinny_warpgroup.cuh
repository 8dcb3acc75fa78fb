// Skinny products by warpgroups (sm_90a): 64 rows of W at a time and up to 64 rows of x, which
// shared memory holds once for all warps that multiply the same chunk.
//
// The stream of the weight is that of the other skinny products: the pieces of a warp's 16 rows of
// W are its part of wgmma's A, from registers. Rows of x are copied chunk by chunk, 64 bytes by a
// thread, and stored in the order of k that the pieces of W have (multiply_pieces): elements 8 * t
// to 8 * t + 7 of half a chunk are two elements of lane t of four in each 8 of k.
//
// A row's result depends only on the number of slices, neither on the other rows of x nor on
// kNTiles.
#pragma once

#include "eecore/skinny_gated_linear.cuh"
#include "eecore/skinny_linear.cuh"

namespace eecore::cuda {

constexpr int kWarpgroupRows = 64;
constexpr int kMaxWarpgroupSlices = kSkinnyThreads / 128;

// Bytes of a chunk of the rows of x, and of all buffers: two for each slice.
template <int kNTiles>
constexpr int kRowsChunkBytes = 8 * kNTiles * 128;
template <int kNTiles>
__host__ __device__ inline int rows_buffers_bytes(const SkinnyPlan& plan) {
  return plan.num_slices * 2 * kRowsChunkBytes<kNTiles>;
}

// Copies chunks of rows of x to the buffers of this thread's slice: 64 bytes of each chunk.
template <typename T, int kNTiles>
class ChunksOfRows {
  static_assert(sizeof(T) == 2);
  static constexpr int kColumns = 8 * kNTiles, kPieceBytes = kColumns * 16;
  static constexpr int kBufferSize = kRowsChunkBytes<kNTiles> / static_cast<int>(sizeof(T));

 public:
  // `buffers` are those of all slices.
  __device__ __forceinline__ ChunksOfRows(const SkinnyPlan& plan, const SkinnyLane& lane,
                                          const SkinnyRows<T>& x, Shared<T> buffers)
      : plan_(plan),
        lane_(lane),
        num_threads_(kSkinnyThreads >> plan.slices_shift),
        buffers_(buffers + lane.slice * (2 * kBufferSize)) {
    const int thread = static_cast<int>(threadIdx.x) & (num_threads_ - 1);
    is_needed_ = thread < 2 * kColumns;
    half_ = thread / kColumns;
    column_ = thread % kColumns;
    from_ = x.data + (column_ < x.count ? column_ : x.count - 1) * x.stride +
            half_ % 2 * (kChunkSize<T> / 2);
    load(lane.slice);
  }

  // Stores the chunk that was loaded in the next buffer, and loads the one after `chunk`, or the
  // first one of the next tile. No product reads that buffer any more: this thread has passed the
  // barrier of the chunk between, before which each warp waited for its products.
  __device__ __forceinline__ void advance(int chunk) {
    turn_ = 1 - turn_;
    if (is_needed_) {
      const Shared<uint32_t> to = shared_as<uint32_t>(buffer());
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Pack<uint32_t> piece{{pieces_[0].values[i], pieces_[1].values[i],
                                    pieces_[2].values[i], pieces_[3].values[i]}};
        shared_store16(to + ((4 * half_ + i) * kColumns + column_) * 4, piece);
      }
    }
    fence_proxy_async();
    const int next = chunk + plan_.num_slices;
    load(next < plan_.num_chunks ? next : lane_.slice);
  }

  // Waits until all threads of the slice have stored their part of the buffer.
  __device__ __forceinline__ void wait() const {
    named_barrier_wait(1 + lane_.slice, num_threads_);
  }

  // The descriptor of b in product `step` of the chunk's four. A piece is 8 elements of k of all
  // columns; pieces 2 * step and 2 * step + 1, one after the other, are b.
  __device__ __forceinline__ uint64_t matrix(int step) const {
    return wgmma_matrix(buffer() + step * (kBufferSize / 4), kPieceBytes, 128, Swizzle::kNone);
  }

 private:
  __device__ __forceinline__ Shared<T> buffer() const { return buffers_ + turn_ * kBufferSize; }

  __device__ __forceinline__ void load(int chunk) {
    if (!is_needed_) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pieces_[i] = SkinnyRows<T>::piece(from_ + chunk * kChunkSize<T> + i * kPieceSize<T>);
    }
  }

  const SkinnyPlan& plan_;
  const SkinnyLane& lane_;
  int num_threads_;
  Shared<T> buffers_;
  bool is_needed_;
  int half_, column_, turn_ = 1;
  const T* from_;
  Pack<uint32_t> pieces_[4];
};

#if EECORE_HAS_WGMMA
// The multiply_tile of the other skinny products, by wgmma.
template <typename T, int kMTiles, int kNTiles, typename RowsOf>
__device__ __forceinline__ void multiply_tile(const SkinnyPlan& plan, const SkinnyLane& lane,
                                              WeightStream<T, kMTiles>& weight,
                                              const RowsOf& rows_of, ChunksOfRows<T, kNTiles>& x,
                                              float (&products)[kMTiles][kNTiles][4]) {
  WgmmaSums<kNTiles> sums[kMTiles];
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
    }
  }
  for (int chunk = lane.slice; chunk < plan.num_chunks; chunk += plan.num_slices) {
    x.advance(chunk);
    weight.advance(rows_of);
    WgmmaPart parts[kMTiles][4];
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Pack<uint32_t> upper = weight.piece(2 * m, half);
        const Pack<uint32_t> lower = weight.piece(2 * m + 1, half);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          parts[m][2 * half + i / 2][i % 2 * 2] = upper.values[i];
          parts[m][2 * half + i / 2][i % 2 * 2 + 1] = lower.values[i];
        }
      }
    }
    x.wait();
    wgmma_fence(sums, parts);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) wgmma_m64k16<T>(sums[m], parts[m][step], x.matrix(step));
    }
    wgmma_commit();
    wgmma_wait<0>(sums, parts);
  }
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) products[m][n][i] = sums[m][n][i];
    }
  }
}
#endif

// The work of both kernels. Row r of a tile is multiplied with rows r + m * num_rows of the weight,
// for each m below kMTiles; finish(token, row, values) gets these products. Dynamic shared memory:
// the ring, the exchange, then the buffers of rows of x.
template <typename T, int kMTiles, int kNTiles, typename Params, typename Finish>
__device__ __forceinline__ void multiply_by_warpgroups(const Params& params, const SkinnyPlan& plan,
                                                       int64_t num_rows, const Finish& finish) {
#if EECORE_HAS_WGMMA
  const SkinnyLane lane = SkinnyLane::of_warpgroup(plan);
  const int tile_rows = skinny_tile_rows(plan, 1);
  const int my_tiles = tiles_of_block(plan, plan.num_tiles);
  const auto first_row = [&](int tile) {
    return (blockIdx.x + static_cast<int64_t>(tile) * gridDim.x) * tile_rows + lane.group * 16;
  };
  const auto rows_of = [&](int tile, const T*(&rows)[2 * kMTiles]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int64_t row = first_row(tile) + 8 * i + lane.row;
      if (row >= num_rows) row = num_rows - 1;
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        rows[2 * m + i] =
            weight_row<T>(params.weight, nullptr, row + m * num_rows, params.weight_stride);
      }
    }
  };

  WeightStream<T, kMTiles> weight(plan, lane, my_tiles);
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * (8 * kNTiles);
  const int ring_bytes = skinny_ring_bytes(plan, kMTiles);
  const Shared<float> exchange = dynamic_shared<float>(ring_bytes);
  const int rows_at =
      ring_bytes + skinny_exchange_floats(plan, kMTiles) * static_cast<int>(sizeof(float));
  const auto x =
      start_product<T, kNTiles, false>(params, plan, weight, rows_of, first_token, rows_at);
  ChunksOfRows<T, kNTiles> chunks(plan, lane, x, dynamic_shared<T>(rows_at));
  int turn = 0;
  for (int tile = 0; tile < my_tiles; ++tile) {
    float sums[kMTiles][kNTiles][4];
    multiply_tile(plan, lane, weight, rows_of, chunks, sums);
    for_each_product(plan, lane, exchange, turn, sums,
                     [&](int row_in_tile, int column, int, const float (&values)[kMTiles]) {
                       const int64_t row = first_row(tile) + row_in_tile;
                       if (column >= x.count || row >= num_rows) return;
                       finish(first_token + column, row, values);
                     });
  }
#else
  __trap();  // the launcher asks for a GPU that has wgmma, and for a build for it
#endif
}

// Blocks that share a multiprocessor.
constexpr int warpgroup_blocks(int m_tiles) { return m_tiles == 1 ? 2 : 1; }

// skinny_linear_kernel by warpgroups.
template <typename T, int kNTiles>
__global__ void __launch_bounds__(kSkinnyThreads, warpgroup_blocks(1))
    skinny_warpgroup_linear_kernel(SkinnyLinearParams params, SkinnyPlan plan) {
  multiply_by_warpgroups<T, 1, kNTiles>(
      params, plan, params.out_features, [&](int64_t token, int64_t row, const float (&values)[1]) {
        const Addends<T> addends = addends_of<T>(params, token, row, true);
        static_cast<T*>(params.out)[token * params.out_stride + row] =
            finished<T, T>(params, row, values[0], addends);
      });
}

// skinny_gated_linear_kernel by warpgroups.
template <typename T, int kNTiles>
__global__ void __launch_bounds__(kSkinnyThreads, warpgroup_blocks(kGatedMTiles))
    skinny_warpgroup_gated_kernel(SkinnyGatedLinearParams params, SkinnyPlan plan) {
  multiply_by_warpgroups<T, kGatedMTiles, kNTiles>(
      params, plan, params.inner_size,
      [&](int64_t token, int64_t row, const float (&values)[kGatedMTiles]) {
        static_cast<T*>(params.out)[token * params.out_stride + row] =
            gated<T, T>(params, row, values[0], values[1]);
      });
}

}  // namespace eecore::cuda
