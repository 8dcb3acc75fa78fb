// Products of few rows of x with many rows of a weight that is read once: W x^T with the rows of W
// as the M axis of the MMA and the rows of x as its N axis.
//
// A warp multiplies 16 * kMTiles rows of W with 8 * kNTiles rows of x. The order of the elements
// inside a product is free as long as both sides keep it, so each thread takes whole 16-byte pieces
// of W and x as its parts of the MMA's fragments, without transposition or exchange between
// threads. Each thread copies its own pieces of W through slots of shared memory that only it
// reads, many chunks ahead and across the ends of tiles: the stream of the weight never waits for a
// barrier.
//
// W may have the type of x, or be int8 with a scale for each row: whole numbers that every type of
// x holds exactly. They are converted to the type of x in registers, right before they are
// multiplied; the complete sums are scaled. Packed weights have their own stream and product, in
// panel_stream.cuh.
//
// A row's result depends only on the number of slices that its products are summed in: neither on
// the other rows of x nor on kMTiles, kNTiles or the number of stages.
#pragma once

#include <type_traits>

#include "eecore/async_copy.cuh"
#include "eecore/division.cuh"
#include "eecore/element.cuh"
#include "eecore/panel_block.cuh"
#include "eecore/reduce.cuh"
#include "eecore/shared.cuh"
#include "eecore/whole_pair.cuh"

namespace eecore::cuda {

constexpr int kSkinnyWarpsShift = 3;
constexpr int kSkinnyWarps = 1 << kSkinnyWarpsShift;
constexpr int kSkinnyThreads = 32 * kSkinnyWarps;
constexpr int kSkinnyMaxStages = kMaxPendingCopies + 2;
constexpr int kPrefetchedChunks = 8;  // of each warp, while the weight has to wait

// Elements of the 16 bytes of a row that a thread takes, and of the 128 bytes that a warp takes.
template <typename T>
constexpr int kPieceSize = 16 / static_cast<int>(sizeof(T));
template <typename T>
constexpr int kChunkSize = 8 * kPieceSize<T>;

// Whether a weight with elements of this type has a scale for each row.
template <typename W>
constexpr bool kHasScales = std::is_same_v<W, int8_t>;

// Stands for the elements of a packed weight, whose chunk is kPanelBlocks blocks of 32 columns.
struct Panel {
  uint8_t byte;
};
template <typename W>
constexpr bool kIsPacked = std::is_same_v<W, Panel>;
constexpr int kPanelBlocks = kChunkSize<Panel> / static_cast<int>(kBlockColumns);

// Bytes of a slot for a chunk of 16 rows of a packed weight, and the offsets of its planes: quants
// of 8 bits take twice the space and have no high bits; there are sub-scales and scales for each
// block.
constexpr int kHighBitsAt = kPanelBlocks * 256, kSubScalesAt = kPanelBlocks * 512,
              kScalesAt = kSubScalesAt + kPanelBlocks * 32,
              kPanelSlotBytes = kScalesAt + kPanelBlocks * 64;

// Bytes of a chunk of 16 rows, for all warps of a block.
template <typename W>
constexpr int kStageBytes = kIsPacked<W> ? kSkinnyWarps * kPanelSlotBytes : kSkinnyThreads * 64;

// A row of W that the stream takes pieces of.
template <typename W>
using WeightRow = std::conditional_t<kIsPacked<W>, PanelRow, const W*>;
template <typename W>
__device__ __forceinline__ WeightRow<W> weight_row(const void* weight, const int64_t* table,
                                                   int64_t row, int64_t stride) {
  if constexpr (kIsPacked<W>) {
    return panel_row(weight, table[row]);
  } else {
    return static_cast<const W*>(weight) + row * stride;
  }
}

// How the warps of a block share a product; the same for every block of a launch.
struct SkinnyPlan {
  int row_size;    // elements of a row of W
  int num_chunks;  // of a row, the last one padded with zeros
  int num_slices;  // warps that share rows of W: warp i of them takes chunks i, i + num_slices, ..
  int slices_shift;    // num_slices is 1 << slices_shift
  int num_stages;      // chunks that a warp has slots for, 2 to kSkinnyMaxStages
  int stage_bytes;     // kStageBytes of the weight
  int num_tiles;       // of W, of skinny_tile_rows rows each
  Divisor num_blocks;  // blocks that share the tiles
  bool aligned;        // rows of W start at multiples of 16 bytes
  bool early_weight;   // W may be read before the previous kernel has ended
  bool
      early_places;  // params.append.constant_places may be used, for rows whose heads are appended
  bool x_aligned, norm_aligned;  // x and the norm's weight, where blocks make the rows of x ready
};

// Rows of a tile, which a block works on at a time.
__host__ __device__ inline int skinny_tile_rows(const SkinnyPlan& plan, int m_tiles) {
  return 16 * m_tiles * (kSkinnyWarps >> plan.slices_shift);
}

// Bytes of the ring of a block.
__host__ __device__ inline int skinny_ring_bytes(const SkinnyPlan& plan, int m_tiles) {
  return plan.num_stages * m_tiles * plan.stage_bytes;
}

// This thread's part of its warp's fragments, and the warp's part of the block's work.
struct SkinnyLane {
  int row, piece;    // lane / 4 and lane % 4
  int group, slice;  // of the warp: which rows of the tile, which chunks of them

  __device__ __forceinline__ explicit SkinnyLane(const SkinnyPlan& plan) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    row = lane / 4;
    piece = lane % 4;
    group = warp >> plan.slices_shift;
    slice = warp - (group << plan.slices_shift);
  }
};

// The number of tiles of block b of the plan's, which are b, b + num_blocks, ...
__device__ __forceinline__ int tiles_of_block(const SkinnyPlan& plan, int num_tiles, int block) {
  return plan.num_blocks.rounded_up(max(num_tiles - block, 0));
}
__device__ __forceinline__ int tiles_of_block(const SkinnyPlan& plan, int num_tiles) {
  return tiles_of_block(plan, num_tiles, static_cast<int>(blockIdx.x));
}

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

// This thread's pieces of W, chunk after chunk and tile after tile. `rows_of(i, rows)` gives the
// rows of the block's tile i that the thread takes pieces of: rows[2 * m] and rows[2 * m + 1] are
// its rows lane / 4 and lane / 4 + 8 of the warp's 16 rows m.
template <typename W, int kMTiles>
class WeightStream {
 public:
  static constexpr int kRows = 2 * kMTiles;
  static constexpr int kPieces = 2 * kRows;                         // of a thread and chunk
  static constexpr int kStageWords = kPieces * kSkinnyThreads * 4;  // 4-byte words

  // `num_tiles`: tiles of this block; 0 for a warp without work.
  __device__ __forceinline__ WeightStream(const SkinnyPlan& plan, const SkinnyLane& lane,
                                          int num_tiles)
      : plan_(plan),
        lane_(lane),
        slots_(dynamic_shared<uint32_t>() + static_cast<int>(threadIdx.x) * 4),
        num_tiles_(num_tiles),
        chunk_(lane.slice) {}

  // Sets the block's number of tiles. Copies in flight for tiles after the last are never read.
  __device__ __forceinline__ void end_at(int num_tiles) { num_tiles_ = num_tiles; }

  // Fills all stages but one. What `also` copies before each stage belongs to its chunk.
  template <typename RowsOf, typename Also = Nothing>
  __device__ __forceinline__ void start(const RowsOf& rows_of, const Also& also = {}) {
    if (num_tiles_ > 0) rows_of(0, rows_);
    for (int i = 1; i < plan_.num_stages; ++i) {
      also();
      copy_next(rows_of);
    }
  }

  // Prefetches the first chunks without reading them.
  template <typename RowsOf>
  __device__ __forceinline__ void prefetch(const RowsOf& rows_of) {
    if (num_tiles_ == 0) return;
    rows_of(0, rows_);
    for (int i = lane_.piece; i < kPrefetchedChunks; i += 4) {
      const int chunk = lane_.slice + i * plan_.num_slices;
      if (chunk >= plan_.num_chunks) break;
#pragma unroll
      for (int row = 0; row < kRows; ++row) prefetch_l2(rows_[row] + chunk * kChunkSize<W>);
    }
  }

  // Waits for the next chunk, and refills the stage of the previous one, after calling `also`.
  template <typename RowsOf, typename Also = Nothing>
  __device__ __forceinline__ void advance(const RowsOf& rows_of, const Also& also = {}) {
    cp_async_wait_all_but(plan_.num_stages - 2);
    also();
    copy_next(rows_of);
    read_ = write_ + 1 == plan_.num_stages ? 0 : write_ + 1;
  }

  // Piece `half` (0 or 1) of row i of the chunk.
  __device__ __forceinline__ Pack<uint32_t> piece(int i, int half) const {
    return shared_load16<uint32_t>(slot(read_, i, half));
  }

 private:
  __device__ __forceinline__ Shared<uint32_t> slot(int stage, int i, int half) const {
    return slots_ + (stage * kStageWords + (2 * i + half) * kSkinnyThreads * 4);
  }

  // Makes one group of copies per call, an empty one where no chunk is left, so that the count of
  // groups is right.
  template <typename RowsOf>
  __device__ __forceinline__ void copy_next(const RowsOf& rows_of) {
    write_ = write_ + 1 == plan_.num_stages ? 0 : write_ + 1;
    if (tile_ < num_tiles_) {
      copy_chunk();
      chunk_ += plan_.num_slices;
      if (chunk_ >= plan_.num_chunks) {
        chunk_ = lane_.slice;
        if (++tile_ < num_tiles_) rows_of(tile_, rows_);
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void copy_chunk() {
    const int first = chunk_ * kChunkSize<W> + lane_.piece * kPieceSize<W>;
    if (plan_.aligned) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = first + half * (kChunkSize<W> / 2);
        int count = plan_.row_size - at;
        count = count < 0 ? 0 : count > kPieceSize<W> ? kPieceSize<W> : count;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const W* from = rows_[i] + (count > 0 ? at : 0);
          cp_async16(slot(write_, i, half), reinterpret_cast<const uint32_t*>(from),
                     count * static_cast<int>(sizeof(W)));
        }
      }
      return;
    }
    // Element by element, for rows that start at any address; only this thread reads the slot back.
#pragma unroll
    for (int piece = 0; piece < kPieces; ++piece) {
      const int at = first + piece % 2 * (kChunkSize<W> / 2);
      const Shared<W> to = shared_as<W>(slot(write_, piece / 2, piece % 2));
#pragma unroll 1
      for (int i = 0; i < kPieceSize<W>; ++i) {
        to[i] = at + i < plan_.row_size ? rows_[piece / 2][at + i] : W{};
      }
    }
  }

  const SkinnyPlan& plan_;
  const SkinnyLane& lane_;
  Shared<uint32_t> slots_;
  const W* rows_[kRows];  // of the tile that is copied
  int num_tiles_;
  int tile_ = 0, chunk_;       // the next ones to copy
  int write_ = -1, read_ = 0;  // stages
};

// Starts the stream and waits for the previous kernel: the stream starts first if that kernel does
// not write W, and after the wait if it may. In the second case W is prefetched into the L2 cache
// during the wait.
template <typename W, int kMTiles, typename RowsOf>
__device__ __forceinline__ void start_stream(const SkinnyPlan& plan,
                                             WeightStream<W, kMTiles>& weight,
                                             const RowsOf& rows_of) {
  if (!plan.early_weight) {
    weight.prefetch(rows_of);
    wait_for_previous_kernel();
  }
  weight.start(rows_of);
  wait_for_previous_kernel();  // returns at once the second time
  let_next_kernel_start();
}

// Rows of x, each starting at a multiple of 16 bytes and padded to whole chunks of W.
template <typename T>
struct SkinnyRows {
  using Element = T;

  const T* data;
  int64_t stride;
  int count;  // at least one; results of later rows have no meaning

  // The 16 bytes at a place in a row.
  __device__ __forceinline__ static Pack<uint32_t> piece(const T* at) {
    return load16(reinterpret_cast<const uint32_t*>(at));
  }
};

// The rows of `num_tokens`, from `first` on, that fit in 8 * kNTiles columns.
template <int kNTiles, typename T>
__device__ __forceinline__ SkinnyRows<T> skinny_rows(const T* x, int64_t stride, int64_t num_tokens,
                                                     int64_t first) {
  const int64_t left = num_tokens - first;
  return {x + first * stride, stride, left < 8 * kNTiles ? static_cast<int>(left) : 8 * kNTiles};
}

// Elements of W in the form that is multiplied with 16 bytes of x; a piece of W covers kXPieces
// such.
template <typename T, typename W>
constexpr int kXPieces = static_cast<int>(sizeof(T) / sizeof(W));
template <typename T>
constexpr int kXPieces<T, Panel> = static_cast<int>(sizeof(T)) / 2;  // a piece: 8 columns
template <typename T, typename W>
__device__ __forceinline__ Pack<uint32_t> widened(const Pack<uint32_t>& piece, int part) {
  if constexpr (!kHasScales<W>) {
    return piece;
  } else {
    Pack<uint32_t> wide;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (std::is_same_v<T, float>) {
        const auto byte = static_cast<int8_t>(piece.values[part] >> 8 * i);
        wide.values[i] = float_to_bits(static_cast<float>(byte));
      } else {
        wide.values[i] = whole_pair<T>(piece.values[2 * part + i / 2], i % 2);
      }
    }
    return wide;
  }
}

// Adds the products of 16 bytes of each of a warp's rows with those of 8 rows of x.
template <typename T, int kMTiles, int kNTiles>
__device__ __forceinline__ void multiply_pieces(const Pack<uint32_t> (&w)[2 * kMTiles],
                                                const Pack<uint32_t>& x,
                                                float (&sums)[kMTiles][kNTiles][4], int n) {
#pragma unroll
  for (int quarter = 0; quarter < 2; ++quarter) {
    const uint32_t x_part[2] = {x.values[2 * quarter], x.values[2 * quarter + 1]};
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      const uint32_t w_part[4] = {w[2 * m].values[2 * quarter], w[2 * m + 1].values[2 * quarter],
                                  w[2 * m].values[2 * quarter + 1],
                                  w[2 * m + 1].values[2 * quarter + 1]};
      mma_m16n8k16<T>(sums[m][n], w_part, x_part);
    }
  }
}

// The products of this warp's rows of its next tile with the rows of x (SkinnyRows, or rows that a
// block made ready itself), over the warp's chunks: sums[m][n] has the layout of the sums of
// mma_m16n8k16.
template <typename W, int kMTiles, int kNTiles, typename RowsOf, typename Rows>
__device__ __forceinline__ void multiply_tile(const SkinnyPlan& plan, const SkinnyLane& lane,
                                              WeightStream<W, kMTiles>& weight,
                                              const RowsOf& rows_of, const Rows& x,
                                              float (&sums)[kMTiles][kNTiles][4]) {
  using T = typename Rows::Element;
  constexpr int kRows = 2 * kMTiles, kParts = kXPieces<T, W>;
  auto from = x.data + (lane.slice * kChunkSize<W> + lane.piece * kPieceSize<W>);
  const int step = plan.num_slices * kChunkSize<W>;
  // The place in a chunk of the piece of x that belongs to a part of a half of the chunk.
  const auto offset = [](int half, int part) {
    return half * (kChunkSize<W> / 2) + part * kPieceSize<T>;
  };

  if constexpr (std::is_same_v<T, float>) {
    // Each thread sums the part that its pieces have in the products of its rows with all rows of
    // x.
    constexpr int kColumns = 8 * kNTiles;
    float parts[kRows][kColumns];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) parts[i][column] = 0.0f;
    }
    for (int chunk = lane.slice; chunk < plan.num_chunks; chunk += plan.num_slices, from += step) {
      weight.advance(rows_of);
#pragma unroll(kParts == 1 ? 2 : 1)
      for (int half = 0; half < 2; ++half) {
        Pack<uint32_t> pieces[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) pieces[i] = weight.piece(i, half);
        // One part at a time: x for all parts would not fit into the registers.
#pragma unroll 1
        for (int part = 0; part < kParts; ++part) {
          Pack<uint32_t> w[kRows];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            w[i] = widened<T, W>(pieces[i], 0);
#pragma unroll
            for (int j = 1; j < kParts; ++j) pieces[i].values[j - 1] = pieces[i].values[j];
          }
          auto row = from + offset(half, part);
#pragma unroll
          for (int column = 0; column < kColumns; ++column) {
            const Pack<uint32_t> piece = x.piece(row);
            if (column + 1 < x.count) row += x.stride;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                parts[i][column] = fmaf(bits_to_float(w[i].values[j]),
                                        bits_to_float(piece.values[j]), parts[i][column]);
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int column = 0; column < kColumns; ++column) {
        const float sum = reduce_lanes<4>(parts[i][column]);
        if (column % 8 / 2 == lane.piece) sums[i / 2][column / 8][i % 2 * 2 + column % 2] = sum;
      }
    }
  } else {
    decltype(from) columns[kNTiles];
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
      const int column = 8 * n + lane.row;
      columns[n] = from + (column < x.count ? column : x.count - 1) * x.stride;
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
      }
    }
    // With many rows of x, the later pieces of a chunk are loaded late: registers are scarce.
    constexpr int kAhead = kNTiles > 4 ? 1 : kNTiles > 2 ? 2 : 2 * kParts;
    constexpr bool kIsLoop = kNTiles > 4 && kParts > 1;  // for the same reason
    for (int chunk = lane.slice; chunk < plan.num_chunks; chunk += plan.num_slices) {
      Pack<uint32_t> b[kAhead][kNTiles];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          b[i][n] = x.piece(columns[n] + offset(i / kParts, i % kParts));
        }
      }
      weight.advance(rows_of);
#pragma unroll(kIsLoop ? 1 : 2)
      for (int half = 0; half < 2; ++half) {
        Pack<uint32_t> pieces[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) pieces[i] = weight.piece(i, half);
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
          Pack<uint32_t> w[kRows];
#pragma unroll
          for (int i = 0; i < kRows; ++i) w[i] = widened<T, W>(pieces[i], part);
          const int turn = half * kParts + part;
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) {
            Pack<uint32_t>& piece = b[turn % kAhead][n];
            if (turn >= kAhead) piece = x.piece(columns[n] + offset(half, part));
            multiply_pieces<T, kMTiles>(w, piece, sums, n);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) columns[n] += step;
    }
  }
}

// Floats of shared memory that for_each_product needs where products are summed in slices.
constexpr int kExchangeColumn = 20;  // 16 rows, and an offset that keeps the banks apart
constexpr int kExchangeTile = 8 * kExchangeColumn;
__host__ __device__ inline int skinny_exchange_floats(const SkinnyPlan& plan, int m_tiles) {
  return plan.num_slices == 1 ? 0 : 2 * kSkinnyWarps * m_tiles * kExchangeTile;
}

// Puts a warp's sums with 8 rows of x, those from 8 * n on, into a buffer of the exchange.
template <int kMTiles, int kNTiles>
__device__ __forceinline__ void put_products(Shared<float> buffer, int warp, const SkinnyLane& lane,
                                             const float (&sums)[kMTiles][kNTiles][4], int n) {
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) {
    const Shared<float> mine = buffer + (warp * kMTiles + m) * kExchangeTile;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      mine[(2 * lane.piece + i % 2) * kExchangeColumn + lane.row + i / 2 * 8] = sums[m][n][i];
    }
  }
}

// This thread's number among those of its warp's group.
__device__ __forceinline__ int thread_of_slices(const SkinnyLane& lane) {
  return lane.slice * 32 + static_cast<int>(threadIdx.x) % 32;
}

// Slices from which on a thread finishes at most one product, and one pair, of a warp's 16 rows
// with 8 rows of x.
constexpr int kSlicesOfOneEach = 4;

// The sum of one product over the slices, in their order; `first` is where the sum of the first
// slice is.
template <int kMTiles>
__device__ __forceinline__ float sum_of_slices(Shared<float> first, int num_slices) {
  float sum = first[0];
#pragma unroll
  for (int slice = 1; slice < kSkinnyWarps; ++slice) {
    if (slice < num_slices) sum += first[slice * kMTiles * kExchangeTile];
  }
  return sum;
}

// Calls finish(row, column, n, values) once for each product of the block's tile: values[m] of row
// `row` (0 to 15) of the warp's 16 rows m, in a column of the 8 from 8 * n on; the slices are
// summed in order. All threads of the block call it; the caller keeps `turn`, which starts at 0.
template <int kMTiles, int kNTiles, typename Finish>
__device__ __forceinline__ void for_each_product(const SkinnyPlan& plan, const SkinnyLane& lane,
                                                 Shared<float> exchange, int& turn,
                                                 const float (&sums)[kMTiles][kNTiles][4],
                                                 const Finish& finish) {
  if (plan.num_slices == 1) {
#pragma unroll
    for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float values[kMTiles];
#pragma unroll
        for (int m = 0; m < kMTiles; ++m) values[m] = sums[m][n][i];
        finish(lane.row + i / 2 * 8, 8 * n + 2 * lane.piece + i % 2, n, values);
      }
    }
    return;
  }
  // Two buffers in turn: a thread that writes one has passed the barrier after which the other was
  // read.
  const int first = lane.group << plan.slices_shift;  // warp of the group
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
    const Shared<float> buffer = exchange + turn * (kSkinnyWarps * kMTiles * kExchangeTile);
    turn = 1 - turn;
    put_products(buffer, first + lane.slice, lane, sums, n);
    __syncthreads();
    for (int e = thread_of_slices(lane); e < 128; e += plan.num_slices * 32) {
      const int row = e % 16, column = e / 16;
      float values[kMTiles];
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        const int at = (first * kMTiles + m) * kExchangeTile + column * kExchangeColumn + row;
        values[m] = sum_of_slices<kMTiles>(buffer + at, plan.num_slices);
      }
      finish(row, 8 * n + column, n, values);
    }
  }
}

}  // namespace eecore::cuda
