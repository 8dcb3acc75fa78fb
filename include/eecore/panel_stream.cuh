// The stream of a packed weight and its product with few rows of x.
//
// A warp copies the blocks of 16 rows together, as they lie in their panel: 16-byte pieces that all
// of its lanes take numbers from. 16 rows of a tile need not be those of one panel: where they are
// not, nothing is copied, and each lane reads its rows where they are, which is slow.
//
// Where x is of 16 bits, the whole numbers of a block are multiplied as they are; its sums are
// scaled in float32, and its minimum meets the sum of x: nothing of the weight is rounded. Float32
// x meets the floats that the weight stands for.
#pragma once

#include "eecore/skinny_gemm.cuh"

namespace eecore::cuda {

// Whether a warp's 16 rows, of which each lane has two, lie in one panel.
__device__ __forceinline__ bool share_panel(const PanelRow& first, const PanelRow& second) {
  const auto place = reinterpret_cast<unsigned long long>(first.panel);
  const bool is_same = place == __shfl_sync(kWholeWarp, place, 0) && first.panel == second.panel;
  return __all_sync(kWholeWarp, is_same) != 0;
}

// The blocks of a chunk that was copied to `slot`, one plane behind the other.
__device__ __forceinline__ PanelBlocks<Shared<uint8_t>> blocks_of_slot(Shared<uint8_t> slot,
                                                                       PanelForm form) {
  const Shared<uint8_t> high_bits = slot + kPanelBlocks * form.quants();
  const Shared<uint8_t> sub_scales = high_bits + kPanelBlocks * form.high_bits();
  return {slot, high_bits, sub_scales, sub_scales + kPanelBlocks * form.sub_scales()};
}

template <int kMTiles>
class WeightStream<Panel, kMTiles> {
 public:
  static constexpr int kRows = 2 * kMTiles;

  // `num_tiles` of this block; 0 for a warp without work.
  __device__ __forceinline__ WeightStream(const SkinnyPlan& plan, const SkinnyLane& lane,
                                          int num_tiles)
      : plan_(plan),
        lane_(lane),
        slots_(dynamic_shared<uint8_t>() +
               static_cast<int>(threadIdx.x) / 32 * (kMTiles * kPanelSlotBytes)),
        num_blocks_(plan.row_size / static_cast<int>(kBlockColumns)),
        num_tiles_(num_tiles),
        chunk_(lane.slice) {}

  // There are only `num_tiles` of this block; those behind that are under way are never read.
  __device__ __forceinline__ void end_at(int num_tiles) { num_tiles_ = num_tiles; }

  // Fills all stages but one.
  template <typename RowsOf>
  __device__ __forceinline__ void start(const RowsOf& rows_of) {
    if (num_tiles_ > 0) find_panels(rows_of);
    for (int i = 1; i < plan_.num_stages; ++i) copy_next(rows_of);
  }

  // Brings the first chunks closer without reading them.
  template <typename RowsOf>
  __device__ __forceinline__ void prefetch(const RowsOf& rows_of) {
    if (num_tiles_ == 0) return;
    find_panels(rows_of);
    for (int i = static_cast<int>(threadIdx.x) % 32; i < 8 * kPrefetchedChunks; i += 32) {
      const int chunk = lane_.slice + i / 8 * plan_.num_slices;
      if (chunk >= plan_.num_chunks) break;
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        if (!copied_[m]) continue;
        prefetch_l2(blocks_of_panel(panels_[m], num_blocks_, chunk * kPanelBlocks).quants +
                    i % 8 * 128);
      }
    }
  }

  // Waits for the next chunk, and has the stage of the one before it filled anew: all lanes have
  // read that one.
  template <typename RowsOf>
  __device__ __forceinline__ void advance(const RowsOf& rows_of) {
    cp_async_wait_all_but(plan_.num_stages - 2);
    __syncwarp();
    copy_next(rows_of);
    read_ = write_ + 1 == plan_.num_stages ? 0 : write_ + 1;
  }

  // This lane's rows of the tile that is to be multiplied next.
  template <typename RowsOf>
  __device__ __forceinline__ void next_rows(const RowsOf& rows_of, PanelRow (&rows)[kRows]) {
    rows_of(read_tile_++, rows);
  }

  // The chunk of 16 rows m.
  __device__ __forceinline__ Shared<uint8_t> slot(int m) const { return slot(read_, m); }

  __device__ __forceinline__ int num_blocks() const { return num_blocks_; }

 private:
  __device__ __forceinline__ Shared<uint8_t> slot(int stage, int m) const {
    return slots_ + (stage * (kMTiles * kStageBytes<Panel>)+m * kPanelSlotBytes);
  }

  // Of the tile whose copies begin.
  template <typename RowsOf>
  __device__ __forceinline__ void find_panels(const RowsOf& rows_of) {
    PanelRow rows[kRows];
    rows_of(tile_, rows);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      panels_[m] = rows[2 * m];
      copied_[m] = share_panel(rows[2 * m], rows[2 * m + 1]);
    }
  }

  // A group of copies for each call, without any where no chunk is left: so the groups count right.
  template <typename RowsOf>
  __device__ __forceinline__ void copy_next(const RowsOf& rows_of) {
    write_ = write_ + 1 == plan_.num_stages ? 0 : write_ + 1;
    if (tile_ < num_tiles_) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        if (copied_[m]) copy_chunk(m);
      }
      chunk_ += plan_.num_slices;
      if (chunk_ >= plan_.num_chunks) {
        chunk_ = lane_.slice;
        if (++tile_ < num_tiles_) find_panels(rows_of);
      }
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void copy_chunk(int m) {
    const PanelForm form = panels_[m].form;
    const int first = chunk_ * kPanelBlocks;
    const int count = num_blocks_ - first < kPanelBlocks ? num_blocks_ - first : kPanelBlocks;
    const PanelBlocks<const uint8_t*> from = blocks_of_panel(panels_[m], num_blocks_, first);
    const PanelBlocks<Shared<uint8_t>> to = blocks_of_slot(slot(write_, m), form);
    const int lane = 16 * (static_cast<int>(threadIdx.x) % 32);
    const bool has_8_bits = form.is(BlockFormat::kQ8_0);
    const int quants = count * form.quants();
#pragma unroll
    for (int i = 0; i < kMostQuants; i += 512) {
      const int at = i + lane;
      if (at < quants) cp_async16(to.quants + swizzled(at, has_8_bits), from.quants + at);
    }
    // Of all other planes a lane has one piece at most.
    if (lane < count * form.high_bits()) cp_async16(to.high_bits + lane, from.high_bits + lane);
    if (lane < count * form.sub_scales()) cp_async16(to.sub_scales + lane, from.sub_scales + lane);
    if (lane < (form.has_sub_scales() ? 1 : count) * form.scales()) {
      cp_async16(to.scales + lane, from.scales + lane);
    }
  }

  static constexpr int kMostQuants = kPanelBlocks * 512;  // bytes, of Q8_0

  const SkinnyPlan& plan_;
  const SkinnyLane& lane_;
  Shared<uint8_t> slots_;
  const int num_blocks_;      // of a row
  PanelRow panels_[kMTiles];  // of the tile that is being copied
  bool copied_[kMTiles];      // whether it is
  int num_tiles_;
  int tile_ = 0, chunk_;       // to be copied next
  int read_tile_ = 0;          // to be multiplied next
  int write_ = -1, read_ = 0;  // stages
};

// sums += the products of 32 columns of 16 rows, of which the lane has pieces of two, with 8 rows
// of x.
template <typename T>
__device__ __forceinline__ void multiply_block(const Pack<uint32_t>& first,
                                               const Pack<uint32_t>& second,
                                               const Pack<uint32_t>& x, float (&sums)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t w_part[4] = {first.values[i], second.values[i], first.values[i + 1],
                                second.values[i + 1]};
    const uint32_t x_part[2] = {x.values[i], x.values[i + 1]};
    mma_m16n8k16<T>(sums, w_part, x_part);
  }
}

// multiply_tile of a packed weight.
template <int kMTiles, int kNTiles, typename RowsOf, typename Rows>
__device__ __forceinline__ void multiply_tile(const SkinnyPlan& plan, const SkinnyLane& lane,
                                              WeightStream<Panel, kMTiles>& weight,
                                              const RowsOf& rows_of, const Rows& x,
                                              float (&sums)[kMTiles][kNTiles][4]) {
  using T = typename Rows::Element;
  constexpr int kRows = 2 * kMTiles;
  constexpr int kColumns = static_cast<int>(kBlockColumns);
  PanelRow rows[kRows];
  weight.next_rows(rows_of, rows);
  bool copied[kMTiles];
#pragma unroll
  for (int m = 0; m < kMTiles; ++m) copied[m] = share_panel(rows[2 * m], rows[2 * m + 1]);

  // body(blocks, m) with the blocks of a chunk of this lane's rows 2 * m and 2 * m + 1.
  const auto with_blocks = [&](int chunk, int i, const auto& body) {
    if (copied[i / 2]) {
      body(blocks_of_slot(weight.slot(i / 2), rows[i].form));
    } else {
      body(blocks_of_panel(rows[i], weight.num_blocks(), chunk * kPanelBlocks));
    }
  };
  const auto count_of = [&](int chunk) {
    const int left = weight.num_blocks() - chunk * kPanelBlocks;
    return left < kPanelBlocks ? left : kPanelBlocks;
  };
  auto from = x.data + (lane.slice * kChunkSize<Panel> + 8 * lane.piece);
  const int step = plan.num_slices * kChunkSize<Panel>;

  if constexpr (std::is_same_v<T, float>) {
    // Each thread sums its pieces' part of the products of its rows with all rows of x.
    constexpr int kTokens = 8 * kNTiles;
    float parts[kRows][kTokens];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) parts[i][token] = 0.0f;
    }
    for (int chunk = lane.slice; chunk < plan.num_chunks; chunk += plan.num_slices, from += step) {
      weight.advance(rows_of);
      const int count = count_of(chunk);
#pragma unroll 1
      for (int block = 0; block < count; ++block) {
        Quants q[kRows];
        float scale[kRows], minimum[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          with_blocks(chunk, i, [&](const auto& blocks) {
            q[i] = quants_of(blocks, rows[i].form, block, rows[i].lane, lane.piece);
            const BlockScales scales = scales_of(blocks, rows[i].form, block, rows[i].lane);
            scale[i] = lane.piece < 2 ? scales.first : scales.last;
            minimum[i] = scales.minimum;
          });
        }
        // A part at a time: floats of all columns would not fit into the registers.
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
          float w[kRows][4];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            to_floats(q[i].first, rows[i].form, scale[i], minimum[i], w[i]);
            q[i].first = q[i].last;
          }
          auto row = from + (block * kColumns + 4 * part);
#pragma unroll
          for (int token = 0; token < kTokens; ++token) {
            const Pack<uint32_t> piece = x.piece(row);
            if (token + 1 < x.count) row += x.stride;
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
#pragma unroll
              for (int j = 0; j < 4; ++j) {
                parts[i][token] = fmaf(w[i][j], bits_to_float(piece.values[j]), parts[i][token]);
              }
            }
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        const float sum = reduce_lanes<4>(parts[i][token]);
        if (token % 8 / 2 == lane.piece) sums[i / 2][token / 8][i % 2 * 2 + token % 2] = sum;
      }
    }
  } else {
    bool has_minima = false;
    bool has_halves[kMTiles];  // of blocks, with scales of their own
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      has_minima |= rows[2 * m].form.has_minima() || rows[2 * m + 1].form.has_minima();
      has_halves[m] = __any_sync(kWholeWarp, rows[2 * m].form.is(BlockFormat::kQ6_K) ||
                                                 rows[2 * m + 1].form.is(BlockFormat::kQ6_K));
    }
    has_minima = __any_sync(kWholeWarp, has_minima);
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
    // With few rows of x all that a chunk needs of them is under way before the weight is waited
    // for; with many, registers are scarce.
    constexpr int kAhead = kNTiles > 2 ? 1 : kPanelBlocks;
    for (int chunk = lane.slice; chunk < plan.num_chunks; chunk += plan.num_slices) {
      const int count = count_of(chunk);
      Pack<uint32_t> ahead[kAhead][kNTiles];
      if constexpr (kAhead > 1) {
#pragma unroll
        for (int block = 0; block < kAhead; ++block) {
          if (block >= count) break;
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) {
            ahead[block][n] = x.piece(columns[n] + block * kColumns);
          }
        }
      }
      weight.advance(rows_of);
#pragma unroll(kAhead)
      for (int block = 0; block < kPanelBlocks; ++block) {
        if (block >= count) break;
        Pack<uint32_t> w[kRows];
        BlockScales scales[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          with_blocks(chunk, i, [&](const auto& blocks) {
            const PanelForm form = rows[i].form;
            w[i] = elements_of<T>(quants_of(blocks, form, block, rows[i].lane, lane.piece), form);
            scales[i] = scales_of(blocks, form, block, rows[i].lane);
          });
        }
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          Pack<uint32_t>& piece = ahead[block % kAhead][n];
          if constexpr (kAhead == 1) piece = x.piece(columns[n] + block * kColumns);
          if (has_minima) {
            const Pack<uint32_t> ones{
                {kPairOfOnes<T>, kPairOfOnes<T>, kPairOfOnes<T>, kPairOfOnes<T>}};
            float of_x[4] = {};
            multiply_block<T>(ones, ones, piece, of_x);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums[m][n][i] = fmaf(scales[2 * m + i / 2].minimum, of_x[i], sums[m][n][i]);
              }
            }
          }
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            if (!has_halves[m]) {
              float products[4] = {};
              multiply_block<T>(w[2 * m], w[2 * m + 1], piece, products);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums[m][n][i] = fmaf(scales[2 * m + i / 2].first, products[i], sums[m][n][i]);
              }
              continue;
            }
            // The numbers of one half and zeros for those of the other, which other lanes have.
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
              Pack<uint32_t> some[2] = {w[2 * m], w[2 * m + 1]};
              float products[4] = {}, scale[2];
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const bool is_half = rows[2 * m + i].form.is(BlockFormat::kQ6_K);
                const bool keeps = half == (is_half ? lane.piece / 2 : 0);
#pragma unroll
                for (int j = 0; j < 4; ++j) some[i].values[j] &= keeps ? ~0u : 0u;
                scale[i] = half == 0 ? scales[2 * m + i].first : scales[2 * m + i].last;
              }
              multiply_block<T>(some[0], some[1], piece, products);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums[m][n][i] = fmaf(scale[i / 2], products[i], sums[m][n][i]);
              }
            }
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) columns[n] += step;
    }
  }
}

}  // namespace eecore::cuda
