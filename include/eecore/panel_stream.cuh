// The stream of a packed weight and its product with few rows of x.
//
// A warp copies the blocks of 16 rows together, as they are laid out in their panel: 16-byte pieces
// from which all of its lanes read. The 16 rows of a tile may be in different panels: then each
// lane gathers its numbers from its own rows, word by word, which is slow.
//
// If x has 16 bits, the whole numbers of a block are multiplied as they are; the block's sums are
// scaled in float32, and its minimum is multiplied by the sum of x: nothing of the weight is
// rounded. Float32 x is multiplied by the floats that the weight stands for.
#pragma once

#include "eecore/skinny_gemm.cuh"

namespace eecore::cuda {

// Whether a warp's 16 rows, of which each lane has two, are in one panel.
__device__ __forceinline__ bool share_panel(const PanelRow& first, const PanelRow& second) {
  const auto place = reinterpret_cast<unsigned long long>(first.panel);
  const bool is_same = place == __shfl_sync(kWholeWarp, place, 0) && first.panel == second.panel;
  return __all_sync(kWholeWarp, is_same) != 0;
}

// Block i of a chunk in `slot`, as it was copied or gathered.
__device__ __forceinline__ PanelBlock<Shared<uint8_t>> block_of_slot(Shared<uint8_t> slot,
                                                                     PanelForm form, int i) {
  return {slot + i * form.quants(), slot + (kHighBitsAt + i * form.high_bits()),
          slot + (kSubScalesAt + 32 * i),
          slot + (kScalesAt + (form.has_sub_scales() ? 0 : i * form.scales()))};
}

template <int kMTiles>
class WeightStream<Panel, kMTiles> {
 public:
  static constexpr int kRows = 2 * kMTiles;

  // `num_tiles`: tiles of this block; 0 for a warp without work.
  __device__ __forceinline__ WeightStream(const SkinnyPlan& plan, const SkinnyLane& lane,
                                          int num_tiles)
      : plan_(plan),
        lane_(lane),
        slots_(dynamic_shared<uint8_t>() +
               static_cast<int>(threadIdx.x) / 32 * (kMTiles * kPanelSlotBytes)),
        num_blocks_(plan.row_size / static_cast<int>(kBlockColumns)),
        num_tiles_(num_tiles),
        chunk_(lane.slice) {}

  // Sets the block's number of tiles. Copies in flight for tiles after the last are never read.
  __device__ __forceinline__ void end_at(int num_tiles) { num_tiles_ = num_tiles; }

  // Fills all stages but one.
  template <typename RowsOf>
  __device__ __forceinline__ void start(const RowsOf& rows_of) {
    if (num_tiles_ > 0) find_panels(rows_of);
    for (int i = 1; i < plan_.num_stages; ++i) copy_next(rows_of);
  }

  // Prefetches the first chunks without reading them.
  template <typename RowsOf>
  __device__ __forceinline__ void prefetch(const RowsOf& rows_of) {
    if (num_tiles_ == 0) return;
    find_panels(rows_of);
    for (int i = static_cast<int>(threadIdx.x) % 32; i < 8 * kPrefetchedChunks; i += 32) {
      const int chunk = lane_.slice + i / 8 * plan_.num_slices;
      if (chunk >= plan_.num_chunks) break;
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        if (panels_[m] == nullptr) continue;
        const int first = chunk * (kPanelBlocks * forms_[m].quants());
        prefetch_l2(panels_[m] + first + i % 8 * 128);
      }
    }
  }

  // Waits for the next chunk, and refills the stage of the previous chunk, which all lanes have
  // read.
  template <typename RowsOf>
  __device__ __forceinline__ void advance(const RowsOf& rows_of) {
    cp_async_wait_all_but(plan_.num_stages - 2);
    __syncwarp();
    copy_next(rows_of);
    read_ = write_ + 1 == plan_.num_stages ? 0 : write_ + 1;
  }

  // This lane's rows of the tile that is multiplied next.
  template <typename RowsOf>
  __device__ __forceinline__ void next_rows(const RowsOf& rows_of, PanelRow (&rows)[kRows]) {
    rows_of(read_tile_++, rows);
  }

  // The blocks of a chunk.
  __device__ __forceinline__ int count_blocks(int chunk) const {
    const int left = num_blocks_ - chunk * kPanelBlocks;
    return left < kPanelBlocks ? left : kPanelBlocks;
  }

  // The chunk of the 16 rows m.
  __device__ __forceinline__ Shared<uint8_t> slot(int m) const { return slot(read_, m); }

 private:
  __device__ __forceinline__ Shared<uint8_t> slot(int stage, int m) const {
    return slots_ + (stage * (kMTiles * kStageBytes<Panel>)+m * kPanelSlotBytes);
  }

  // Finds the panels of the tile whose copies begin; null where its rows do not share one.
  template <typename RowsOf>
  __device__ __forceinline__ void find_panels(const RowsOf& rows_of) {
    PanelRow rows[kRows];
    rows_of(tile_, rows);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      forms_[m] = rows[2 * m].form;
      panels_[m] = share_panel(rows[2 * m], rows[2 * m + 1]) ? rows[2 * m].panel : nullptr;
    }
  }

  // Makes one group of copies per call, an empty one where no chunk is left, so that the count of
  // groups is right.
  template <typename RowsOf>
  __device__ __forceinline__ void copy_next(const RowsOf& rows_of) {
    write_ = write_ + 1 == plan_.num_stages ? 0 : write_ + 1;
    if (tile_ < num_tiles_) {
#pragma unroll
      for (int m = 0; m < kMTiles; ++m) {
        if (panels_[m] != nullptr) {
          copy_chunk(m);
        } else {
          gather_chunk(rows_of, m);
        }
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
    const PanelForm form = forms_[m];
    const int count = count_blocks(chunk_);
    const PanelBlock<const uint8_t*> from =
        block_of_panel(panels_[m], form, num_blocks_, chunk_ * kPanelBlocks);
    const PanelBlock<Shared<uint8_t>> to = block_of_slot(slot(write_, m), form, 0);
    const int lane = 16 * (static_cast<int>(threadIdx.x) % 32);
    const int quants = count * form.quants(), swizzle = form.has_2_bits() ? 0 : -1;
#pragma unroll
    for (int i = 0; i < kSubScalesAt; i += 512) {
      const int at = i + lane;
      if (at < quants) cp_async16(to.quants + swizzled(at, form, swizzle), from.quants + at);
    }
    // A lane has at most one piece of every other plane.
    if (lane < count * form.high_bits()) cp_async16(to.high_bits + lane, from.high_bits + lane);
    if (lane < count * form.sub_scales()) {
      const int spread = form.sub_scales() == 16 ? 2 * lane : lane;
      cp_async16(to.sub_scales + spread, from.sub_scales + lane);
    }
    if (lane < (form.has_sub_scales() ? 1 : count) * form.scales()) {
      cp_async16(to.scales + lane, from.scales + lane);
    }
  }

  // Copies this lane's part of rows 2 * m and 2 * m + 1 to the places of rows lane.row and lane.row
  // + 8 of a panel. Formats may differ from row to row: no two rows share bytes of a slot.
  template <typename RowsOf>
  __device__ __forceinline__ void gather_chunk(const RowsOf& rows_of, int m) {
    PanelRow rows[kRows];
    rows_of(tile_, rows);
    const int count = count_blocks(chunk_);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PanelRow& row = rows[2 * m + half];
      const PanelForm form = row.form;
      const int lane = lane_.row + 8 * half;
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const PanelBlock<const uint8_t*> from =
            block_of_panel(row.panel, form, num_blocks_, chunk_ * kPanelBlocks + i);
        const PanelBlock<Shared<uint8_t>> to = block_of_slot(slot(write_, m), form, i);
#pragma unroll 1
        for (int at = 64 * lane_.piece; at < form.quants(); at += 256) {
          *shared_as<uint32_t>(to.quants + (at + 4 * lane)) =
              number_at<uint32_t>(from.quants + (at + 4 * row.lane));
        }
        // Two rows share 16 bits of sub-scales, which one of their lanes writes.
#pragma unroll 1
        for (int at = 0; at < 32; at += 16) {
          uint32_t sub = 0;
          if (at < form.sub_scales()) sub = number_at<uint8_t>(from.sub_scales + (at + row.lane));
          sub |= __shfl_xor_sync(kWholeWarp, sub, 4) << 8;
          if (lane_.piece == 0 && lane % 2 == 0) {
            *shared_as<uint16_t>(to.sub_scales + (at + lane)) = static_cast<uint16_t>(sub);
          }
        }
        if (lane_.piece != 0) continue;
#pragma unroll 1
        for (int at = 0; at < form.high_bits(); at += 64) {
          *shared_as<uint32_t>(to.high_bits + (at + 4 * lane)) =
              number_at<uint32_t>(from.high_bits + (at + 4 * row.lane));
        }
#pragma unroll 1
        for (int at = 0; at < form.scales(); at += 32) {
          *shared_as<uint16_t>(to.scales + (at + 2 * lane)) =
              number_at<uint16_t>(from.scales + (at + 2 * row.lane));
        }
      }
    }
  }

  const SkinnyPlan& plan_;
  const SkinnyLane& lane_;
  Shared<uint8_t> slots_;
  const int num_blocks_;            // of a row
  const uint8_t* panels_[kMTiles];  // of the tile that is copied
  PanelForm forms_[kMTiles];
  int num_tiles_;
  int tile_ = 0, chunk_;       // the next ones to copy
  int read_tile_ = 0;          // the next one to multiply
  int write_ = -1, read_ = 0;  // stages
};

// sums += the products of 32 columns of 16 rows with 8 rows of x; the lane has pieces of two of the
// 16 rows.
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

// The places of a lane's rows in the slots of its warp: of a tile that shares panels they were
// copied, swizzled; of others each lane has gathered its own.
template <int kMTiles>
struct PanelPlaces {
  PanelForm forms[2 * kMTiles];
  int lanes[2 * kMTiles], swizzles[kMTiles];

  // Finds the places of the tile that is multiplied next.
  template <typename RowsOf>
  __device__ __forceinline__ void find(WeightStream<Panel, kMTiles>& weight, const RowsOf& rows_of,
                                       const SkinnyLane& lane) {
    PanelRow rows[2 * kMTiles];
    weight.next_rows(rows_of, rows);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      const bool is_copied = share_panel(rows[2 * m], rows[2 * m + 1]);
      swizzles[m] = is_copied ? -1 : 0;  // of words that two pieces share there is none
#pragma unroll
      for (int i = 2 * m; i < 2 * m + 2; ++i) {
        forms[i] = rows[i].form;
        lanes[i] = is_copied ? rows[i].lane : lane.row + i % 2 * 8;
      }
    }
  }
};

// multiply_tile for a packed weight.
template <int kMTiles, int kNTiles, typename RowsOf, typename Rows>
__device__ __forceinline__ void multiply_tile(const SkinnyPlan& plan, const SkinnyLane& lane,
                                              WeightStream<Panel, kMTiles>& weight,
                                              const RowsOf& rows_of, const Rows& x,
                                              float (&sums)[kMTiles][kNTiles][4]) {
  using T = typename Rows::Element;
  constexpr int kRows = 2 * kMTiles;
  constexpr int kColumns = static_cast<int>(kBlockColumns);
  PanelPlaces<kMTiles> at;
  at.find(weight, rows_of, lane);
  const auto block_of = [&](int i, int block) {
    return block_of_slot(weight.slot(i / 2), at.forms[i], block);
  };
  auto from = x.data + (lane.slice * kChunkSize<Panel> + 8 * lane.piece);
  const int step = plan.num_slices * kChunkSize<Panel>;

  if constexpr (std::is_same_v<T, float>) {
    // Each thread sums the part that its pieces have in the products of its rows with all rows of
    // x.
    constexpr int kTokens = 8 * kNTiles;
    float parts[kRows][kTokens];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
#pragma unroll
      for (int token = 0; token < kTokens; ++token) parts[i][token] = 0.0f;
    }
    for (int chunk = lane.slice; chunk < plan.num_chunks; chunk += plan.num_slices, from += step) {
      weight.advance(rows_of);
      const int count = weight.count_blocks(chunk);
#pragma unroll 1
      for (int block = 0; block < count; ++block) {
        Quants q[kRows];
        float scale[kRows], minimum[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const auto in_slot = block_of(i, block);
          q[i] = quants_of(in_slot, at.forms[i], at.lanes[i], lane.piece, at.swizzles[i / 2]);
          const BlockScales scales = scales_of(in_slot, at.forms[i], at.lanes[i]);
          scale[i] = lane.piece < 2 ? scales.first : scales.last;
          minimum[i] = lane.piece < 2 ? scales.minimum : scales.last_minimum;
        }
        // One part at a time: floats of all columns would not fit into the registers.
#pragma unroll 1
        for (int part = 0; part < 2; ++part) {
          float w[kRows][4];
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            to_floats(q[i].first, at.forms[i], scale[i], minimum[i], w[i]);
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
    bool has_minima = false, has_half_minima = false;
    bool has_halves[kMTiles];  // of blocks whose halves have scales of their own
    bool are_q4_0 = true, are_q4_1 = true, are_usual = true;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      has_minima |= at.forms[i].has_minima();
      has_half_minima |= at.forms[i].has_half_minima();
      are_usual = are_usual && at.forms[i].is_usual();
      are_q4_0 = are_q4_0 && at.forms[i] == PanelForm::of<BlockFormat::kQ4_0>();
      are_q4_1 = are_q4_1 && at.forms[i] == PanelForm::of<BlockFormat::kQ4_1>();
    }
    has_minima = __any_sync(kWholeWarp, has_minima);
    has_half_minima = __any_sync(kWholeWarp, has_half_minima);
    are_usual = __all_sync(kWholeWarp, are_usual);
    are_q4_0 = __all_sync(kWholeWarp, are_q4_0);
    are_q4_1 = __all_sync(kWholeWarp, are_q4_1);
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      has_halves[m] =
          __any_sync(kWholeWarp, at.forms[2 * m].has_halves() || at.forms[2 * m + 1].has_halves());
    }
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
    // With few rows of x, the pieces for the next block are loaded early; with many, registers are
    // scarce.
    constexpr bool kIsAhead = kNTiles <= 2;
    constexpr bool kKnowsForms = kNTiles <= 2 * kMTiles;
    Pack<uint32_t> pieces[kNTiles], next[kNTiles];
    // Multiplies the blocks of the chunk that was waited for; form_of(i) is the form of the lane's
    // row i.
    const auto multiply_blocks = [&](int count, const auto& form_of, bool with_minima,
                                     bool with_halves, bool with_half_minima) {
#pragma unroll 1
      for (int block = 0; block < count; ++block) {
        if constexpr (kIsAhead) {
#pragma unroll
          for (int n = 0; n < kNTiles; ++n) {
            pieces[n] = next[n];
            if (block + 1 < count) next[n] = x.piece(columns[n] + (block + 1) * kColumns);
          }
        }
        Pack<uint32_t> w[kRows];
        BlockScales scales[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const auto in_slot = block_of_slot(weight.slot(i / 2), form_of(i), block);
          w[i] = elements_of<T>(
              quants_of(in_slot, form_of(i), at.lanes[i], lane.piece, at.swizzles[i / 2]),
              form_of(i));
          scales[i] = scales_of(in_slot, form_of(i), at.lanes[i]);
        }
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) {
          Pack<uint32_t>& piece = pieces[n];
          if constexpr (!kIsAhead) piece = x.piece(columns[n] + block * kColumns);
          if (with_minima) {
            const Pack<uint32_t> ones{
                {kPairOfOnes<T>, kPairOfOnes<T>, kPairOfOnes<T>, kPairOfOnes<T>}};
            float of_x[4] = {};
            multiply_block<T>(ones, ones, piece, of_x);
#pragma unroll
            for (int m = 0; m < kMTiles; ++m) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                const float minimum =
                    form_of(2 * m + i / 2).has_half_minima() ? 0.0f : scales[2 * m + i / 2].minimum;
                sums[m][n][i] = fmaf(minimum, of_x[i], sums[m][n][i]);
              }
            }
          }
#pragma unroll
          for (int m = 0; m < kMTiles; ++m) {
            if (!with_halves || !has_halves[m]) {
              float products[4] = {};
              multiply_block<T>(w[2 * m], w[2 * m + 1], piece, products);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums[m][n][i] = fmaf(scales[2 * m + i / 2].first, products[i], sums[m][n][i]);
              }
              continue;
            }
            // The numbers of one half, and zeros for the other half, which other lanes have.
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
              Pack<uint32_t> some[2] = {w[2 * m], w[2 * m + 1]};
              float products[4] = {}, scale[2];
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const bool is_half = form_of(2 * m + i).has_halves();
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
              if (!with_half_minima) continue;
              float of_x[4] = {};
#pragma unroll
              for (int i = 0; i < 2; ++i) {
                const bool keeps = form_of(2 * m + i).has_half_minima() && half == lane.piece / 2;
#pragma unroll
                for (int j = 0; j < 4; ++j) some[i].values[j] = keeps ? kPairOfOnes<T> : 0u;
                scale[i] = half == 0 ? scales[2 * m + i].minimum : scales[2 * m + i].last_minimum;
              }
              multiply_block<T>(some[0], some[1], piece, of_x);
#pragma unroll
              for (int i = 0; i < 4; ++i) {
                sums[m][n][i] = fmaf(scale[i / 2], of_x[i], sums[m][n][i]);
              }
            }
          }
        }
      }
    };
    for (int chunk = lane.slice; chunk < plan.num_chunks; chunk += plan.num_slices) {
      const int count = weight.count_blocks(chunk);
      if constexpr (kIsAhead) {
#pragma unroll
        for (int n = 0; n < kNTiles; ++n) next[n] = x.piece(columns[n]);
      }
      weight.advance(rows_of);
      // The compiler knows the usual formats, where there are registers for that.
      if (kKnowsForms && are_q4_0) {
        const auto form_of = [](int) { return PanelForm::of<BlockFormat::kQ4_0>(); };
        multiply_blocks(count, form_of, false, false, false);
      } else if (kKnowsForms && are_q4_1) {
        const auto form_of = [](int) { return PanelForm::of<BlockFormat::kQ4_1>(); };
        multiply_blocks(count, form_of, true, false, false);
      } else if (are_usual) {
        const auto form_of = [&](int i) { return at.forms[i].usual(); };
        multiply_blocks(count, form_of, has_minima, true, false);
      } else {
        const auto form_of = [&](int i) { return at.forms[i]; };
        multiply_blocks(count, form_of, has_minima, true, has_half_minima);
      }
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) columns[n] += step;
    }
  }
}

}  // namespace eecore::cuda
