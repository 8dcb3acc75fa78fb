// Tiles of a weight that warpgroups multiply (sm_90a): 64 rows of W at a time and up to 128 rows of
// x, which shared memory holds once for all warps that multiply the same chunk.
//
// The stream of the weight is that of the other skinny products: the pieces of a warp's 16 rows of
// W, widened in registers where they are int8 or packed, are its part of wgmma's A. Rows of x are
// copied 64 elements at a time, 64 bytes by a thread, and stored in the order of k that the pieces
// of W have (multiply_pieces, multiply_block): of 32 elements, 8 of each lane of four, the lane has
// two in each 8 of k.
//
// A row's result depends only on the number of slices, neither on the other rows of x nor on
// kNTiles.
#pragma once

#include "eecore/panel_stream.cuh"
#include "eecore/skinny_gemm.cuh"

namespace eecore::cuda {

constexpr int kWarpgroupRows = 64;
constexpr int kMaxWarpgroupSlices = kSkinnyThreads / 128;

// Tiles of 8 rows of x in a pass for more than 64 rows. Their sums fill the registers of a
// multiprocessor's one block; for a packed weight, which needs more, a pass has 64 rows.
constexpr int kWideTiles = 16;
constexpr bool is_wide(int n_tiles) { return n_tiles > 8; }

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

// Copies chunks of rows of x to the buffers of this thread's slice: 64 bytes of each chunk, or of
// more than 64 rows twice as many where the slice has 128 threads. Columns without a row are zeros.
template <typename T, typename W, int kNTiles>
class ChunksOfRows {
  static_assert(sizeof(T) == 2 && kRowsChunks<W> * kRowsChunk == kChunkSize<W>);
  static constexpr int kColumns = 8 * kNTiles, kPieceBytes = kColumns * 16;
  static constexpr int kHalves = is_wide(kNTiles) ? 2 : 1;  // that a thread copies at most
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
    first_half_ = thread / kColumns;
    column_ = thread % kColumns;
    begin(x);
  }

  // Loads the first chunk of other rows of x, which the next tile is multiplied with. Called
  // between two tiles.
  __device__ __forceinline__ void begin(const SkinnyRows<T>& x) {
    is_row_ = column_ < x.count;
    from_ = x.data + (is_row_ ? column_ : 0) * x.stride;
    load();
  }

  // Stores the chunk that was loaded in the next buffer, and loads the one after it, or the first
  // one of the next tile. No product reads that buffer any more: this thread has passed the barrier
  // of the chunk between, before which each warp waited for its products.
  __device__ __forceinline__ void advance(bool with_sums = false) {
    turn_ = 1 - turn_;
    const Shared<uint32_t> to = shared_as<uint32_t>(buffer());
    for_each_half([&](int half, const Pack<uint32_t>(&pieces)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Pack<uint32_t> piece{
            {pieces[0].values[i], pieces[1].values[i], pieces[2].values[i], pieces[3].values[i]}};
        shared_store16(to + ((4 * half + i) * kColumns + column_) * 4, piece);
      }
      if constexpr (kIsPacked<W>) {
        if (with_sums) sums()[half * kColumns + column_] = sum_of(pieces);
      }
    });
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

  // Calls body(half, pieces) for each half that this thread copies.
  template <typename Body>
  __device__ __forceinline__ void for_each_half(const Body& body) {
#pragma unroll
    for (int i = 0; i < kHalves; ++i) {
      const int half = first_half_ + i * (num_threads_ / kColumns);
      if (half < 2) body(half, pieces_[i]);
    }
  }

  __device__ __forceinline__ void load() {
    if (!is_row_) return;
    for_each_half([&](int half, Pack<uint32_t>(&pieces)[4]) {
      const int at = at_ + half * kHalfAt;
      // The last chunk of a packed weight may have but one block.
      if (kIsPacked<W> && at >= plan_.row_size) return;
#pragma unroll
      for (int i = 0; i < 4; ++i) pieces[i] = SkinnyRows<T>::piece(from_ + at + i * kLaneAt);
    });
  }

  // In the order in which a product adds them.
  __device__ __forceinline__ static float sum_of(const Pack<uint32_t> (&pieces)[4]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int lane = 0; lane < 4; ++lane) {
        const Pack<T> elements = elements_of<T>(pieces[lane]);
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
  bool is_row_;
  int first_half_, column_, turn_ = 1;
  const T* from_;
  Pack<uint32_t> pieces_[kHalves][4] = {};
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

// Multiplies the next tile of the block with the rows of x. row_of(i) is row i of its weight rows,
// 16 * kMTiles for each group of warps; only the rows of a packed weight are asked for.
template <typename T, typename W, int kMTiles, int kNTiles, typename RowsOf, typename RowOf>
__device__ __forceinline__ void multiply_together(const SkinnyPlan& plan, const SkinnyLane& lane,
                                                  WeightStream<W, kMTiles>& weight,
                                                  const RowsOf& rows_of, const RowOf& row_of,
                                                  ChunksOfRows<T, W, kNTiles>& x,
                                                  float (&sums)[kMTiles][kNTiles][4]) {
  if constexpr (kIsPacked<W>) {
    const int num_rows = 16 * kMTiles * (kSkinnyWarps >> plan.slices_shift);
    multiply_panels(plan, lane, weight, rows_of, TileForms::of(num_rows, row_of), x, sums);
  } else {
    multiply_tile(plan, lane, weight, rows_of, x, sums);
  }
}
#endif

}  // namespace eecore::cuda
