// Skinny products by warpgroups (sm_90a): 64 rows of W at a time and up to 64 rows of x, which
// shared memory holds once for all warps that multiply the same chunk.
//
// The stream of the weight is that of the other skinny products: the pieces of a warp's 16 rows of
// W, widened in registers where they are int8 or packed, are its part of wgmma's A. Rows of x are
// copied 64 elements at a time, 64 bytes by a thread, and stored in the order of k that the pieces
// of W have (multiply_pieces, multiply_block): of 32 elements, 8 of each lane of four, the lane has
// two in each 8 of k.
//
// Where the weight has too few rows for all multiprocessors, a cluster of blocks shares 64 of them:
// each takes some slices, and then finishes a share of the sums, which it reads from the shared
// memory of all.
//
// A row's result depends only on the number of slices, neither on the other rows of x nor on
// kNTiles.
#pragma once

#include "eecore/skinny_append.cuh"
#include "eecore/skinny_gated_linear.cuh"
#include "eecore/skinny_linear.cuh"

namespace eecore::cuda {

constexpr int kWarpgroupRows = 64;
constexpr int kMaxWarpgroupSlices = kSkinnyThreads / 128;
constexpr int kMaxWarpgroupCluster = 4;
constexpr int kMaxWarpgroupAppendedRows = 64;  // one group of rows

// Elements of a row of x that are copied at a time, in two halves, and how many times that a chunk
// of W has them.
constexpr int kRowsChunk = 64;
template <typename W>
constexpr int kRowsChunks = kIsPacked<W> || kHasScales<W> ? 2 : 1;

// Bytes of a chunk of the rows of x, and of all buffers: two for each slice. For a packed weight
// the sum of each half of a row follows.
template <typename W, int kNTiles>
constexpr int kRowsChunkBytes = 8 * kNTiles * (2 * kRowsChunk + (kIsPacked<W> ? 2 * 4 : 0));
template <typename W, int kNTiles>
__host__ __device__ inline int rows_buffers_bytes(const SkinnyPlan& plan) {
  return plan.num_slices * 2 * kRowsChunkBytes<W, kNTiles>;
}

// Copies chunks of rows of x to the buffers of this thread's slice: 64 bytes of each chunk.
template <typename T, typename W, int kNTiles>
class ChunksOfRows {
  static_assert(sizeof(T) == 2 && kRowsChunks<W> * kRowsChunk == kChunkSize<W>);
  static constexpr int kColumns = 8 * kNTiles, kPieceBytes = kColumns * 16;
  static constexpr int kBufferSize = kRowsChunkBytes<W, kNTiles> / static_cast<int>(sizeof(T));
  // Where the elements of a half are: 8 for each lane, as far apart as its pieces of W.
  static constexpr int kHalfAt = kHasScales<W> ? kPieceSize<T> : kRowsChunk / 2;
  static constexpr int kLaneAt = kHasScales<W> ? kPieceSize<W> : kPieceSize<T>;

 public:
  // `buffers` are those of all slices of the block, of which the thread has `slice`; lane.slice is
  // that of the cluster.
  __device__ __forceinline__ ChunksOfRows(const SkinnyPlan& plan, const SkinnyLane& lane, int slice,
                                          const SkinnyRows<T>& x, Shared<T> buffers)
      : plan_(plan),
        lane_(lane),
        slice_(slice),
        num_threads_(kSkinnyThreads >> plan.slices_shift),
        buffers_(buffers + slice * (2 * kBufferSize)),
        at_(lane.slice * kChunkSize<W>) {
    const int thread = static_cast<int>(threadIdx.x) & (num_threads_ - 1);
    is_needed_ = thread < 2 * kColumns;
    half_ = thread / kColumns;
    column_ = thread % kColumns;
    from_ = x.data + (column_ < x.count ? column_ : x.count - 1) * x.stride + half_ % 2 * kHalfAt;
    load();
  }

  // Stores the chunk that was loaded in the next buffer, and loads the one after it, or the first
  // one of the next tile. No product reads that buffer any more: this thread has passed the barrier
  // of the chunk between, before which each warp waited for its products.
  __device__ __forceinline__ void advance(bool with_sums = false) {
    turn_ = 1 - turn_;
    if (is_needed_) {
      const Shared<uint32_t> to = shared_as<uint32_t>(buffer());
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Pack<uint32_t> piece{{pieces_[0].values[i], pieces_[1].values[i],
                                    pieces_[2].values[i], pieces_[3].values[i]}};
        shared_store16(to + ((4 * half_ + i) * kColumns + column_) * 4, piece);
      }
      if constexpr (kIsPacked<W>) {
        if (with_sums) sums()[half_ * kColumns + column_] = sum_of_pieces();
      }
    }
    fence_proxy_async();
    const int chunk_at = at_ & -kChunkSize<W>;
    at_ += kRowsChunk;
    if (at_ == chunk_at + kChunkSize<W> || at_ >= plan_.row_size) {
      at_ = chunk_at + plan_.num_slices * kChunkSize<W>;
      if (at_ >= plan_.row_size) at_ = lane_.slice * kChunkSize<W>;
    }
    load();
  }

  // Waits until all threads of the slice have stored their part of the buffer.
  __device__ __forceinline__ void wait() const { named_barrier_wait(1 + slice_, num_threads_); }

  // The descriptor of b in product `step` of the chunk's four. A piece is 8 elements of k of all
  // columns; pieces 2 * step and 2 * step + 1, one after the other, are b.
  __device__ __forceinline__ uint64_t matrix(int step) const {
    return wgmma_matrix(buffer() + step * (2 * kPieceBytes / static_cast<int>(sizeof(T))),
                        kPieceBytes, 128, Swizzle::kNone);
  }

  // The sum of a half of the chunk of row `column`.
  __device__ __forceinline__ float sum_of(int half, int column) const {
    return sums()[half * kColumns + column];
  }

 private:
  __device__ __forceinline__ Shared<T> buffer() const { return buffers_ + turn_ * kBufferSize; }
  __device__ __forceinline__ Shared<float> sums() const {
    return shared_as<float>(buffer() + kColumns * kRowsChunk);
  }

  __device__ __forceinline__ void load() {
    if (!is_needed_) return;
    // The last chunk of a packed weight may have but one block.
    if (kIsPacked<W> && at_ + half_ * kHalfAt >= plan_.row_size) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) pieces_[i] = SkinnyRows<T>::piece(from_ + at_ + i * kLaneAt);
  }

  // In the order in which a product adds them.
  __device__ __forceinline__ float sum_of_pieces() const {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int lane = 0; lane < 4; ++lane) {
        const Pack<T> elements = elements_of<T>(pieces_[lane]);
        sum += to_float(elements.values[2 * i]);
        sum += to_float(elements.values[2 * i + 1]);
      }
    }
    return sum;
  }

  const SkinnyPlan& plan_;
  const SkinnyLane& lane_;
  int slice_, num_threads_;
  Shared<T> buffers_;
  int at_;  // of the chunk that is loaded, in the row
  bool is_needed_;
  int half_, column_, turn_ = 1;
  const T* from_;
  Pack<uint32_t> pieces_[4] = {};
};

// What the formats of a tile's rows have: all warps of a warpgroup make the same products.
struct TileForms {
  bool are_q4_0 = true, are_q4_1 = true, has_minima = false, has_halves = false;

  // The formats of the `count` rows that row_of(i) gives.
  template <typename RowOf>
  __device__ __forceinline__ static TileForms of(int count, const RowOf& row_of) {
    TileForms forms;
    for (int i = static_cast<int>(threadIdx.x) % 32; i < count; i += 32) {
      const PanelForm form = row_of(i).form;
      forms.are_q4_0 &= form == PanelForm::of<BlockFormat::kQ4_0>();
      forms.are_q4_1 &= form == PanelForm::of<BlockFormat::kQ4_1>();
      forms.has_minima |= form.has_minima();
      forms.has_halves |= form.has_halves();
    }
    forms.are_q4_0 = __all_sync(kWholeWarp, forms.are_q4_0);
    forms.are_q4_1 = __all_sync(kWholeWarp, forms.are_q4_1);
    forms.has_minima = __any_sync(kWholeWarp, forms.has_minima);
    forms.has_halves = __any_sync(kWholeWarp, forms.has_halves);
    return forms;
  }
};

#if EECORE_HAS_WGMMA
// The multiply_tile of the other skinny products, by wgmma.
template <typename T, typename W, int kMTiles, int kNTiles, typename RowsOf>
__device__ __forceinline__ void multiply_tile(const SkinnyPlan& plan, const SkinnyLane& lane,
                                              WeightStream<W, kMTiles>& weight,
                                              const RowsOf& rows_of, ChunksOfRows<T, W, kNTiles>& x,
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
#pragma unroll 1
    for (int part = 0; part < kRowsChunks<W>; ++part) {
      if (part > 0 && chunk * kChunkSize<W> + part * kRowsChunk >= plan.row_size) break;
      x.advance();
      if (part == 0) weight.advance(rows_of);
      WgmmaPart parts[kMTiles][4];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const auto piece = [&](int i) {
            return kHasScales<W> ? widened<T, W>(weight.piece(i, part), half)
                                 : weight.piece(i, half);
          };
          const Pack<uint32_t> upper = piece(2 * m), lower = piece(2 * m + 1);
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

// The same for a packed weight: the products of a block's whole numbers are scaled and added one by
// one, while the next numbers are made ready.
template <typename T, int kMTiles, int kNTiles, typename RowsOf>
__device__ __forceinline__ void multiply_panels(const SkinnyPlan& plan, const SkinnyLane& lane,
                                                WeightStream<Panel, kMTiles>& weight,
                                                const RowsOf& rows_of, const TileForms& forms,
                                                ChunksOfRows<T, Panel, kNTiles>& x,
                                                float (&sums)[kMTiles][kNTiles][4]) {
  PanelPlaces<kMTiles> at;
  at.find(weight, rows_of, lane);
  WgmmaSums<kNTiles> products;
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      products[n][i] = 0.0f;
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) sums[m][n][i] = 0.0f;
    }
  }
  // Multiplies the blocks of the chunk that was waited for; form_of(i) is the form of the lane's
  // row i. With kHalves the numbers of each half are multiplied with zeros for the other half.
  const auto multiply_blocks = [&](int count, const auto& form_of, auto halves, bool with_minima) {
    constexpr int kHalves = decltype(halves)::value;
    // A part of A, and its factors.
    struct Numbers {
      uint32_t parts[2][4];
      float scales[2], minima[2];
    } next;
    const auto make_next = [&](int block, int m, int half) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const PanelForm form = form_of(2 * m + i);
        const int row = at.lanes[2 * m + i];
        const auto in_slot = block_of_slot(weight.slot(m), form, block);
        const Pack<uint32_t> w =
            elements_of<T>(quants_of(in_slot, form, row, lane.piece, at.swizzles[m]), form);
        const BlockScales scales = scales_of(in_slot, form, row);
        const bool is_kept = kHalves == 1 || half == (form.has_halves() ? lane.piece / 2 : 0);
#pragma unroll
        for (int j = 0; j < 4; ++j) next.parts[j / 2][j % 2 * 2 + i] = is_kept ? w.values[j] : 0;
        next.scales[i] = half == 0 ? scales.first : scales.last;
        next.minima[i] = scales.minimum;
      }
    };
    make_next(0, 0, 0);
#pragma unroll 1
    for (int block = 0; block < count; ++block) {
      if (block % 2 == 0) {
        x.advance(forms.has_minima);
        x.wait();
      }
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const float scales[2] = {next.scales[0], next.scales[1]};
          const float minima[2] = {next.minima[0], next.minima[1]};
          WgmmaPart parts[2];
#pragma unroll
          for (int i = 0; i < 8; ++i) parts[i / 4][i % 4] = next.parts[i / 4][i % 4];
          wgmma_fence(products, parts);
          wgmma_m64k16<T, false>(products, parts[0], x.matrix(block % 2 * 2));
          wgmma_m64k16<T>(products, parts[1], x.matrix(block % 2 * 2 + 1));
          wgmma_commit();
          const int next_half = (half + 1) % kHalves;
          const int next_m = next_half > 0 ? m : (m + 1) % kMTiles;
          const int next_block = next_half > 0 || next_m > 0 ? block : block + 1;
          if (next_block < count) make_next(next_block, next_m, next_half);
          if (with_minima && half == 0) {
#pragma unroll
            for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const float of_x = x.sum_of(block % 2, 8 * n + 2 * lane.piece + i % 2);
                sums[m][n][i] = fmaf(minima[i / 2], of_x, sums[m][n][i]);
              }
            }
          }
          wgmma_wait<0>(products, parts);
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              sums[m][n][i] = fmaf(scales[i / 2], products[n][i], sums[m][n][i]);
            }
          }
        }
      }
    }
  };
  using Whole = std::integral_constant<int, 1>;
  for (int chunk = lane.slice; chunk < plan.num_chunks; chunk += plan.num_slices) {
    weight.advance(rows_of);
    const int count = weight.count_blocks(chunk);
    const auto any_form = [&](int i) { return at.forms[i]; };
    // The compiler knows the usual formats.
    if (forms.are_q4_0) {
      const auto form_of = [](int) { return PanelForm::of<BlockFormat::kQ4_0>(); };
      multiply_blocks(count, form_of, Whole{}, false);
    } else if (forms.are_q4_1) {
      const auto form_of = [](int) { return PanelForm::of<BlockFormat::kQ4_1>(); };
      multiply_blocks(count, form_of, Whole{}, true);
    } else if (!forms.has_halves) {
      multiply_blocks(count, any_form, Whole{}, forms.has_minima);
    } else {
      multiply_blocks(count, any_form, std::integral_constant<int, 2>{}, forms.has_minima);
    }
  }
}
#endif

// Floats of shared memory in which a block leaves its sums to its cluster, in place of the ring and
// the rows of x.
template <int kMTiles>
constexpr int kClusterBuffer = kSkinnyWarps * kMTiles * kExchangeTile;  // for 8 columns
template <int kMTiles, int kNTiles>
constexpr int kClusterFloats = kNTiles * kClusterBuffer<kMTiles>;

// The blocks of a cluster, which share a tile of 64 rows, and their sums.
template <int kMTiles, int kNTiles>
class Cluster {
 public:
  __device__ __forceinline__ Cluster(const SkinnyPlan& plan, int shift)
      : plan_(plan),
        exchange_(dynamic_shared<float>()),
        number_(static_cast<int>(blockIdx.x) >> shift),
        num_blocks_(1 << shift),
        rank_(static_cast<int>(blockIdx.x) & (num_blocks_ - 1)) {}

  __device__ __forceinline__ bool is_one_block() const { return num_blocks_ == 1; }
  __device__ __forceinline__ int number() const { return number_; }  // of the grid's clusters
  __device__ __forceinline__ int num_blocks() const { return num_blocks_; }
  __device__ __forceinline__ int rank() const { return rank_; }

  // Leaves the block's sums to the others. Nothing of the ring and the rows of x is needed then.
  __device__ __forceinline__ void put(const SkinnyLane& lane,
                                      const float (&sums)[kMTiles][kNTiles][4]) const {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      put_products(exchange_ + n * kClusterBuffer<kMTiles>, first_warp(lane.group) + lane.slice,
                   lane, sums, n);
    }
    cluster_sync();
  }

  // Calls body(column, i) for this thread's share of `count` items of each column.
  template <typename Body>
  __device__ __forceinline__ void for_own(int count, const Body& body) const {
    for (int e = rank_ * kSkinnyThreads + static_cast<int>(threadIdx.x); e < 8 * kNTiles * count;
         e += num_blocks_ * kSkinnyThreads) {
      body(e / count, e % count);
    }
    cluster_sync();  // other blocks read this one's sums until then
  }

  // The sums of rows `row` to row + 3 of a group's 16 rows m over all slices, in their order.
  __device__ __forceinline__ Pack<float> sums_of(int group, int m, int row, int column) const {
    const Shared<float> at = exchange_ + (column / 8 * kClusterBuffer<kMTiles> +
                                          (first_warp(group) * kMTiles + m) * kExchangeTile +
                                          column % 8 * kExchangeColumn + row);
    Pack<float> of_slices[kMaxWarpgroupCluster][kMaxWarpgroupSlices] = {};
#pragma unroll
    for (int block = 0; block < kMaxWarpgroupCluster; ++block) {
#pragma unroll
      for (int slice = 0; slice < kMaxWarpgroupSlices; ++slice) {
        if (block >= num_blocks_) continue;
        of_slices[block][slice] = cluster_load16(at + slice * kMTiles * kExchangeTile, block);
      }
    }
    Pack<float> sums = of_slices[0][0];
#pragma unroll
    for (int i = 1; i < kMaxWarpgroupCluster * kMaxWarpgroupSlices; ++i) {
      const int block = i / kMaxWarpgroupSlices;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float addend = of_slices[block][i % kMaxWarpgroupSlices].values[j];
        if (block < num_blocks_) sums.values[j] += addend;
      }
    }
    return sums;
  }

 private:
  __device__ __forceinline__ int first_warp(int group) const { return group << plan_.slices_shift; }

  const SkinnyPlan& plan_;
  Shared<float> exchange_;
  int number_, num_blocks_, rank_;
};

// The work of the kernels. row_of(tile, row, m) is the row of the weight that is row `row` of tile
// `tile` of 16 rows, for each m below kMTiles. started() is called when x may be read, and
// finish(lane, first_tile, first_token, exchange, turn, sums) with the sums of each tile of the
// block, whose first 16 rows are first_tile. Dynamic shared memory: the ring, the exchange, then
// the buffers of rows of x. The blocks of a cluster have plan.num_slices slices each, and one tile.
template <typename T, typename W, int kMTiles, int kNTiles, typename Params, typename RowOf,
          typename Started, typename Finish>
__device__ __forceinline__ void multiply_by_warpgroups(const Params& params, const SkinnyPlan& plan,
                                                       const Cluster<kMTiles, kNTiles>& cluster,
                                                       const RowOf& row_of, const Started& started,
                                                       const Finish& finish) {
#if EECORE_HAS_WGMMA
  const SkinnyLane lane = SkinnyLane::of_warpgroup(plan);
  const int groups = skinny_tile_rows(plan, 1) / 16;
  const bool is_shared = !cluster.is_one_block();
  const int my_tiles = is_shared ? 1 : tiles_of_block(plan, plan.num_tiles);
  const auto first_tile = [&](int tile) {
    return (cluster.number() + tile * static_cast<int>(gridDim.x)) * groups;
  };
  const auto rows_of = [&](int tile, WeightRow<W>(&rows)[2 * kMTiles]) {
#pragma unroll
    for (int i = 0; i < 2 * kMTiles; ++i) {
      rows[i] = row_of(first_tile(tile) + lane.group, i % 2 * 8 + lane.row, i / 2);
    }
  };
  // The slices of all blocks, to which the chunks are dealt out.
  SkinnyPlan chunk_plan = plan;
  chunk_plan.num_slices = cluster.num_blocks() * plan.num_slices;
  SkinnyLane chunk_lane = lane;
  chunk_lane.slice += cluster.rank() * plan.num_slices;

  WeightStream<W, kMTiles> weight(chunk_plan, chunk_lane, my_tiles);
  const int64_t first_token = static_cast<int64_t>(blockIdx.y) * (8 * kNTiles);
  const int ring_bytes = skinny_ring_bytes(plan, kMTiles);
  const Shared<float> exchange = dynamic_shared<float>(ring_bytes);
  const int exchange_floats = is_shared ? 0 : skinny_exchange_floats(plan, kMTiles);
  const int rows_at = ring_bytes + exchange_floats * static_cast<int>(sizeof(float));
  const auto x =
      start_product<T, kNTiles, false>(params, plan, weight, rows_of, first_token, rows_at);
  started();
  ChunksOfRows<T, W, kNTiles> chunks(chunk_plan, chunk_lane, lane.slice, x,
                                     dynamic_shared<T>(rows_at));
  int turn = 0;
  for (int tile = 0; tile < my_tiles; ++tile) {
    float sums[kMTiles][kNTiles][4];
    if constexpr (kIsPacked<W>) {
      const auto forms = TileForms::of(kMTiles * 16 * groups, [&](int i) {
        return row_of(first_tile(tile) + i / kMTiles / 16, i / kMTiles % 16, i % kMTiles);
      });
      multiply_panels(chunk_plan, chunk_lane, weight, rows_of, forms, chunks, sums);
    } else {
      multiply_tile(chunk_plan, chunk_lane, weight, rows_of, chunks, sums);
    }
    finish(lane, first_tile(tile), first_token, exchange, turn, sums);
  }
#else
  __trap();  // the launcher asks for a GPU that has wgmma, and for a build for it
#endif
}

// The work of the products with one number of `out` for each row: finish(token, row, values) gets
// the products of row r of num_rows with rows r + m * num_rows of the weight, for each m.
template <typename T, typename W, int kMTiles, int kNTiles, typename Params, typename Finish>
__device__ __forceinline__ void multiply_rows_by_warpgroups(const Params& params,
                                                            const SkinnyPlan& plan,
                                                            int cluster_shift, int64_t num_rows,
                                                            const Finish& finish) {
  const Cluster<kMTiles, kNTiles> cluster(plan, cluster_shift);
  const auto row_of = [&](int tile, int row_of_tile, int m) {
    int64_t row = int64_t{tile} * 16 + row_of_tile;
    if (row >= num_rows) row = num_rows - 1;
    return weight_row<W>(params.weight, params.weight_table, row + m * num_rows,
                         params.weight_stride);
  };
  multiply_by_warpgroups<T, W>(
      params, plan, cluster, row_of, Nothing{},
      [&](const SkinnyLane& lane, int first_tile, int64_t first_token, Shared<float> exchange,
          int& turn, const float (&sums)[kMTiles][kNTiles][4]) {
        const auto finish_one = [&](int group, int row_of_group, int column,
                                    const float (&values)[kMTiles]) {
          const int64_t row = int64_t{first_tile + group} * 16 + row_of_group;
          const int64_t token = first_token + column;
          if (token < params.num_tokens && row < num_rows) finish(token, row, values);
        };
        if (cluster.is_one_block()) {
          for_each_product(plan, lane, exchange, turn, sums,
                           [&](int row, int column, int, const float (&values)[kMTiles]) {
                             finish_one(lane.group, row, column, values);
                           });
          return;
        }
        cluster.put(lane, sums);
        cluster.for_own(kWarpgroupRows / 4, [&](int column, int i) {
          Pack<float> fours[kMTiles];
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            fours[m] = cluster.sums_of(i / 4, m, i % 4 * 4, column);
          }
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            float values[kMTiles];
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) values[m] = fours[m].values[j];
            finish_one(i / 4, i % 4 * 4 + j, column, values);
          }
        });
      });
}

// skinny_linear_kernel by warpgroups.
template <typename T, int kNTiles, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, kIsPacked<W> ? 1 : 2)
    skinny_warpgroup_linear_kernel(SkinnyLinearParams params, SkinnyPlan plan, int cluster_shift) {
  multiply_rows_by_warpgroups<T, W, 1, kNTiles>(
      params, plan, cluster_shift, params.out_features,
      [&](int64_t token, int64_t row, const float (&values)[1]) {
        const Addends<T> addends = addends_of<T>(params, token, row, true);
        static_cast<T*>(params.out)[token * params.out_stride + row] =
            finished<T, W>(params, row, values[0], addends);
      });
}

// skinny_gated_linear_kernel by warpgroups.
template <typename T, int kNTiles, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, 1)
    skinny_warpgroup_gated_kernel(SkinnyGatedLinearParams params, SkinnyPlan plan,
                                  int cluster_shift) {
  multiply_rows_by_warpgroups<T, W, kGatedMTiles, kNTiles>(
      params, plan, cluster_shift, params.inner_size,
      [&](int64_t token, int64_t row, const float (&values)[kGatedMTiles]) {
        static_cast<T*>(params.out)[token * params.out_stride + row] =
            gated<T, W>(params, row, values[0], values[1]);
      });
}

// skinny_append_kernel by warpgroups.
template <typename T, int kNTiles, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, 2)
    skinny_warpgroup_append_kernel(SkinnyLinearParams params, SkinnyPlan plan, int cluster_shift,
                                   HeadTiles tiles) {
  EECORE_SHARED(CacheSlot, slots, 8 * kNTiles);
  EECORE_SHARED(int64_t, angles, 8 * kNTiles);
  const AppendedHeads<T, W> heads(params, tiles, slots, angles);
  if (plan.early_places) heads.load_places();
  const Cluster<1, kNTiles> cluster(plan, cluster_shift);
  const auto row_of = [&](int tile, int row, int) {
    const HeadTile at(tiles, min(tile, tiles.count - 1));
    const int64_t in_head = row < 8 ? at.first + row : at.second + row - 8;
    return static_cast<const W*>(params.weight) +
           (at.head * 16 * tiles.per_head.value + in_head) * params.weight_stride;
  };
  const auto started = [&] {
    if (!plan.early_places) heads.load_places();
    __syncthreads();
  };
  multiply_by_warpgroups<T, W>(
      params, plan, cluster, row_of, started,
      [&](const SkinnyLane& lane, int first_tile, int64_t, Shared<float> exchange, int& turn,
          const float (&sums)[1][kNTiles][4]) {
        const auto append = [&](int group, int row, int column, float first, float second) {
          const int tile = first_tile + group;
          heads.append(tile, row, column, first, second, heads.rotation_of(tile, row, column));
        };
        if (cluster.is_one_block()) {
          for_each_pair(plan, lane, exchange, turn, sums,
                        [&](int, int row, int column, int, float first, float second) {
                          append(lane.group, row, column, first, second);
                        });
          return;
        }
        cluster.put(lane, sums);
        cluster.for_own(kWarpgroupRows / 8, [&](int column, int i) {
          const Pack<float> first = cluster.sums_of(i / 2, 0, i % 2 * 4, column);
          const Pack<float> second = cluster.sums_of(i / 2, 0, i % 2 * 4 + 8, column);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            append(i / 2, i % 2 * 4 + j, column, first.values[j], second.values[j]);
          }
        });
      });
}

}  // namespace eecore::cuda
