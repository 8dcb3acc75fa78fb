// exit_confidence_softmax: only a summary of each tile of logits leaves the registers, and
// summaries of tiles, warps and blocks are merged in an order that does not depend on the rows.
#pragma once

#include "eecore/let_rows_exit.cuh"
#include "eecore/panel_stream.cuh"
#include "eecore/params.h"
#include "eecore/place_row.cuh"
#include "eecore/skinny_rows.cuh"

namespace eecore::cuda {

constexpr int kHeadMTiles = 2;

// What is known about some of a row's logits. A NaN among them shows as a NaN in `total`.
struct alignas(16) LogitSummary {
  float largest;  // -infinity at first
  float second;   // the largest of the others
  float total;    // sum of exp(logit - largest)
  int32_t index;  // of the largest, the lowest among equals; kNoIndex where all are -infinity

  static constexpr int32_t kNoIndex = INT32_MAX;
  __device__ __forceinline__ static LogitSummary none() {
    return {-INFINITY, -INFINITY, 0.0f, kNoIndex};
  }
};

// Merges two summaries. The sum is spelled out: a compiler's choice of fma must not differ between
// kernels.
__device__ __forceinline__ LogitSummary merged(const LogitSummary& a, const LogitSummary& b) {
  LogitSummary both;
  both.largest = fmaxf(a.largest, b.largest);
  const bool a_wins = a.largest > b.largest || (a.largest == b.largest && a.index < b.index);
  both.index = a_wins ? a.index : b.index;
  both.second = fmaxf(a_wins ? b.largest : a.largest, fmaxf(a.second, b.second));
  // A summary of only -infinity adds its total of 0, or NaN, as it is.
  const float a_scale = a.largest > -INFINITY ? expf(a.largest - both.largest) : 1.0f;
  const float b_scale = b.largest > -INFINITY ? expf(b.largest - both.largest) : 1.0f;
  both.total = fmaf(a.total, a_scale, b.total * b_scale);
  return both;
}

// The summary of the logits of rows first_row, first_row + 8, .. below num_rows.
template <int kCount>
__device__ __forceinline__ LogitSummary summary_of(const float (&logits)[kCount], int64_t first_row,
                                                   int64_t num_rows) {
  LogitSummary summary = LogitSummary::none();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first_row + 8 * i >= num_rows) break;
    if (logits[i] > summary.largest) {
      summary.second = summary.largest;
      summary.largest = logits[i];
      summary.index = static_cast<int32_t>(first_row + 8 * i);
    } else if (logits[i] > summary.second) {
      summary.second = logits[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (first_row + 8 * i >= num_rows) break;
    // -infinity adds nothing, and must not be subtracted from itself.
    summary.total += logits[i] == -INFINITY ? 0.0f : expf(logits[i] - summary.largest);
  }
  return summary;
}

__device__ __forceinline__ LogitSummary shuffled(const LogitSummary& summary, int distance) {
  return {__shfl_xor_sync(kWholeWarp, summary.largest, distance),
          __shfl_xor_sync(kWholeWarp, summary.second, distance),
          __shfl_xor_sync(kWholeWarp, summary.total, distance),
          __shfl_xor_sync(kWholeWarp, summary.index, distance)};
}

__device__ __forceinline__ LogitSummary load_summary(Shared<float> from) {
  const Pack<float> four = shared_load16(from);
  return {four.values[0], four.values[1], four.values[2],
          static_cast<int32_t>(float_to_bits(four.values[3]))};
}

__device__ __forceinline__ void store_summary(Shared<float> to, const LogitSummary& summary) {
  shared_store16(to, Pack<float>{{summary.largest, summary.second, summary.total,
                                  bits_to_float(static_cast<uint32_t>(summary.index))}});
}

// The product of the states and the head, for the skinny kernels.
struct HeadProduct {
  const void *x, *norm_weight;
  const float* weight_scale;
  const int64_t* weight_table;
  int64_t num_tokens, in_features, x_stride;
  float eps;
  DType dtype;
  void* workspace;       // for rows that an earlier kernel makes ready
  bool constant_weight;  // the head may be read before the previous kernel has ended
};

__host__ __device__ inline HeadProduct head_product(const ExitConfidenceSoftmaxParams& params) {
  HeadProduct product{};
  product.x = params.hidden;
  product.norm_weight = params.norm_weight;
  product.weight_scale = params.lm_head_scale;
  product.weight_table = params.lm_head_table;
  product.num_tokens = params.num_seqs;
  product.in_features = params.hidden_size;
  product.x_stride = params.hidden_stride;
  product.eps = params.eps;
  product.dtype = params.dtype;
  return product;
}

// Whether results of some rows may be unused, because params.exit or params.place skips them.
__host__ __device__ inline bool may_be_unwanted(const ExitConfidenceSoftmaxParams& params) {
  return params.exit.all_exited != nullptr || params.place.kind != nullptr;
}

// Whether the result of a row is used.
__device__ __forceinline__ bool is_wanted(const ExitConfidenceSoftmaxParams& params, int64_t row) {
  if (params.exit.all_exited != nullptr) return is_wanted(params.exit, params.exit.row[row]);
  if (params.place.out_token == nullptr) return true;
  return is_wanted(params.place, placed_row(params.place, row));
}

// Bytes of a block's summaries in shared memory: [kSkinnyWarps, columns].
__host__ __device__ constexpr int head_summary_bytes(int n_tiles) {
  return kSkinnyWarps * 8 * n_tiles * static_cast<int>(sizeof(LogitSummary));
}

// The rows of the head are cut into tiles of as many rows as a warp multiplies at a time; block b
// of B takes tiles b, b + B, .., its warps in turns. So all multiprocessors have nearly as much to
// read, however few tiles there are. plan.num_tiles counts such tiles.
constexpr int kHeadTileRows = 16 * kHeadMTiles;

// This warp's number of tiles, given its block's number.
__device__ __forceinline__ int head_tiles_of_warp(int of_block, int warp) {
  return (max(of_block - warp, 0) + kSkinnyWarps - 1) / kSkinnyWarps;
}

// This thread's first row of its warp's tile i; past the last row it may pass INT32_MAX.
__device__ __forceinline__ int64_t head_row(const SkinnyPlan& plan, const SkinnyLane& lane,
                                            int block, int i) {
  const int64_t of_block = i * kSkinnyWarps + lane.group;
  return (of_block * plan.num_blocks.value + block) * kHeadTileRows + lane.row;
}

// rows_of of a WeightStream over the head.
template <typename W>
__device__ __forceinline__ void head_rows(const ExitConfidenceSoftmaxParams& params, int64_t first,
                                          WeightRow<W> (&rows)[2 * kHeadMTiles]) {
#pragma unroll
  for (int i = 0; i < 2 * kHeadMTiles; ++i) {
    int64_t row = first + 8 * i;
    if (row >= params.vocab_size) row = params.vocab_size - 1;
    rows[i] = weight_row<W>(params.lm_head, params.lm_head_table, row, params.lm_head_stride);
  }
}

// Adds the logits of a tile to the warp's summary of each column, [columns] of four numbers in
// shared memory: the lanes of row 0 keep them, each lane those of its own columns.
template <typename W, int kNTiles>
__device__ __forceinline__ void keep_logits(const ExitConfidenceSoftmaxParams& params,
                                            const SkinnyLane& lane, int64_t first,
                                            const float (&sums)[kHeadMTiles][kNTiles][4],
                                            Shared<float> of_warp, bool is_first) {
  float scales[2 * kHeadMTiles];
  if constexpr (kHasScales<W>) {
#pragma unroll
    for (int i = 0; i < 2 * kHeadMTiles; ++i) {
      const int64_t row = first + 8 * i;
      scales[i] = params.lm_head_scale[row < params.vocab_size ? row : params.vocab_size - 1];
    }
  }
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float logits[2 * kHeadMTiles];
#pragma unroll
      for (int i = 0; i < 2 * kHeadMTiles; ++i) {
        logits[i] = sums[i / 2][n][i % 2 * 2 + j];
        if constexpr (kHasScales<W>) logits[i] = __fmul_rn(logits[i], scales[i]);  // no fma
        if (params.multiplier != 1.0f) logits[i] = __fmul_rn(logits[i], params.multiplier);
        if (params.soft_cap > 0.0f) {
          logits[i] = __fmul_rn(params.soft_cap, tanhf(logits[i] / params.soft_cap));
        }
      }
      LogitSummary summary = summary_of(logits, first, params.vocab_size);
#pragma unroll
      for (int distance = 4; distance < 32; distance *= 2) {
        summary = merged(summary, shuffled(summary, distance));
      }
      if (lane.row != 0) continue;
      const Shared<float> kept = of_warp + (8 * n + 2 * lane.piece + j) * 4;
      if (!is_first) summary = merged(load_summary(kept), summary);
      store_summary(kept, summary);
    }
  }
}

// Merges the summaries of each column for the block, in the order of the warps that have tiles. All
// threads of the block call it.
template <int kColumns>
__device__ __forceinline__ void leave_summaries(Shared<float> of_warps, int warps, int count,
                                                LogitSummary* summaries, int64_t stride) {
  __syncthreads();
  const int column = static_cast<int>(threadIdx.x);
  if (column >= count) return;
  LogitSummary whole = load_summary(of_warps + column * 4);
  for (int warp = 1; warp < warps; ++warp) {
    whole = merged(whole, load_summary(of_warps + (warp * kColumns + column) * 4));
  }
  summaries[column * stride] = whole;
}

// Whether the result of any of the rows [first_seq, first_seq + kColumns) is used. All threads of
// the block call it; a kernel whose rows may be unused waits for the previous kernel first.
template <int kColumns>
__device__ __forceinline__ bool any_is_wanted(const ExitConfidenceSoftmaxParams& params,
                                              int64_t first_seq) {
  if (!may_be_unwanted(params)) return true;
  wait_for_previous_kernel();
  const int column = static_cast<int>(threadIdx.x);
  const bool exists = column < kColumns && first_seq + column < params.num_seqs;
  return any_in_block<kSkinnyThreads>(exists && is_wanted(params, first_seq + column));
}

// Grid: (blocks that share the tiles of the vocabulary, groups of 8 * kNTiles rows). The number of
// blocks must not depend on the rows: it is part of the order of the sums. With kMakesRows each
// block makes the rows ready, else params.hidden holds them in the format of SkinnyRows. Writes
// summaries: [num_seqs, blocks]; for a group of rows whose results are unused, it neither reads the
// head nor writes. Dynamic shared memory: the ring, the block's summaries, then the rows that the
// block makes ready.
template <typename T, int kNTiles, bool kMakesRows, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, 1)
    exit_confidence_softmax_kernel(ExitConfidenceSoftmaxParams params, SkinnyPlan plan,
                                   LogitSummary* summaries) {
  constexpr int kColumns = 8 * kNTiles;
  const SkinnyLane lane(plan);
  const int block = static_cast<int>(blockIdx.x), of_block = tiles_of_block(plan, plan.num_tiles);
  const int my_tiles = head_tiles_of_warp(of_block, lane.group);
  const auto rows_of = [&](int tile, WeightRow<W>(&rows)[2 * kHeadMTiles]) {
    head_rows<W>(params, head_row(plan, lane, block, tile), rows);
  };

  const int64_t first_seq = static_cast<int64_t>(blockIdx.y) * kColumns;
  if (!any_is_wanted<kColumns>(params, first_seq)) return;
  WeightStream<W, kHeadMTiles> weight(plan, lane, my_tiles);
  const int ring_bytes = skinny_ring_bytes(plan, kHeadMTiles);
  const auto x =
      start_product<T, kNTiles, kMakesRows>(head_product(params), plan, weight, rows_of, first_seq,
                                            ring_bytes + head_summary_bytes(kNTiles));

  const Shared<float> of_warps = dynamic_shared<float>(ring_bytes);
  const Shared<float> of_warp = of_warps + lane.group * (kColumns * 4);
  for (int tile = 0; tile < my_tiles; ++tile) {
    float sums[kHeadMTiles][kNTiles][4];
    multiply_tile(plan, lane, weight, rows_of, x, sums);
    keep_logits<W>(params, lane, head_row(plan, lane, block, tile), sums, of_warp, tile == 0);
  }
  leave_summaries<kColumns>(of_warps, min(of_block, kSkinnyWarps), x.count,
                            summaries + first_seq * plan.num_blocks.value + block,
                            plan.num_blocks.value);
}

// Rows that a block of the kernel below multiplies, in tiles of 8; elements from one row to the
// next in shared memory, which keeps the banks of two rows apart; and bytes of a stage.
constexpr int kManyTiles = 12;
template <typename T>
constexpr int kManyStride = kChunkSize<T> + 4 * kPieceSize<T>;
template <typename T>
constexpr int kManyStageBytes = 8 * kManyTiles * kManyStride<T> * static_cast<int>(sizeof(T));

// The same for many rows, which all warps of a block read in shared memory, one chunk at a time
// together with a chunk of the head. The sums are bit for bit those of the kernel above. Grid:
// (groups of 8 * kManyTiles rows, blocks that share the tiles of the vocabulary): groups come
// first, so that blocks that read the same rows of the head run together, and memory is read once.
// Dynamic shared memory: the ring, the block's summaries, then the ring of the rows, with as many
// stages.
template <typename T>
__global__ void __launch_bounds__(kSkinnyThreads, 1)
    exit_confidence_softmax_many_kernel(ExitConfidenceSoftmaxParams params, SkinnyPlan plan,
                                        LogitSummary* summaries) {
  constexpr int kColumns = 8 * kManyTiles, kPieces = kChunkSize<T> / kPieceSize<T>;
  constexpr int kStageSize = kColumns * kManyStride<T>;
  const SkinnyLane lane(plan);
  const int block = static_cast<int>(blockIdx.y);
  const int of_block = tiles_of_block(plan, plan.num_tiles, block);
  const int my_tiles = head_tiles_of_warp(of_block, lane.group);
  const auto rows_of = [&](int tile, const T*(&rows)[2 * kHeadMTiles]) {
    head_rows<T>(params, head_row(plan, lane, block, tile), rows);
  };
  const int64_t first_seq = static_cast<int64_t>(blockIdx.x) * kColumns;
  if (!any_is_wanted<kColumns>(params, first_seq)) return;
  wait_for_previous_kernel();  // returns at once the second time
  let_next_kernel_start();

  // Chunks of x, read again for each turn of the warps.
  const int ring_bytes = skinny_ring_bytes(plan, kHeadMTiles);
  const auto x_ring = dynamic_shared<T>(ring_bytes + head_summary_bytes(kManyTiles));
  const auto x = skinny_rows<kManyTiles>(static_cast<const T*>(params.hidden), params.hidden_stride,
                                         params.num_seqs, first_seq);
  const int num_turns = head_tiles_of_warp(of_block, 0);
  int left = num_turns * plan.num_chunks, chunk = 0, stage = -1;
  const auto send = [&] {
    stage = stage + 1 == plan.num_stages ? 0 : stage + 1;
    if (--left < 0) return;
#pragma unroll
    for (int i = static_cast<int>(threadIdx.x); i < kColumns * kPieces; i += kSkinnyThreads) {
      const int row = i / kPieces, at = i % kPieces * kPieceSize<T>;
      cp_async16(x_ring + (stage * kStageSize + row * kManyStride<T> + at),
                 x.data + min(row, x.count - 1) * x.stride + chunk * kChunkSize<T> + at);
    }
    chunk = chunk + 1 == plan.num_chunks ? 0 : chunk + 1;
  };
  WeightStream<T, kHeadMTiles> weight(plan, lane, my_tiles);
  weight.start(rows_of, send);

  const Shared<float> of_warps = dynamic_shared<float>(ring_bytes);
  const Shared<float> of_warp = of_warps + lane.group * (kColumns * 4);
  int read = plan.num_stages - 1;
#pragma unroll 1
  for (int tile = 0; tile < num_turns; ++tile) {
    float sums[kHeadMTiles][kManyTiles][4] = {};
#pragma unroll 1
    for (int i = 0; i < plan.num_chunks; ++i) {
      weight.advance(rows_of, [&] {
        __syncthreads();  // all warps have the chunk, and have read the previous one
        send();
      });
      read = read + 1 == plan.num_stages ? 0 : read + 1;
      if (tile >= my_tiles) continue;
      const Shared<T> from =
          x_ring + (read * kStageSize + lane.row * kManyStride<T> + lane.piece * kPieceSize<T>);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Pack<uint32_t> w[2 * kHeadMTiles];
#pragma unroll
        for (int row = 0; row < 2 * kHeadMTiles; ++row) w[row] = weight.piece(row, half);
#pragma unroll
        for (int n = 0; n < kManyTiles; ++n) {
          const Pack<uint32_t> piece =
              SharedRows<T>::piece(from + (8 * n * kManyStride<T> + half * (kChunkSize<T> / 2)));
          multiply_pieces<T, kHeadMTiles>(w, piece, sums, n);
        }
      }
    }
    if (tile < my_tiles) {
      keep_logits<T>(params, lane, head_row(plan, lane, block, tile), sums, of_warp, tile == 0);
    }
  }
  leave_summaries<kColumns>(of_warps, min(of_block, kSkinnyWarps), x.count,
                            summaries + first_seq * plan.num_blocks.value + block,
                            plan.num_blocks.value);
}

// Writes a row's outputs from the summary of its logits, and places them where that is asked for. A
// warp calls it.
__device__ __forceinline__ void end_row(const ExitConfidenceSoftmaxParams& params, int64_t row,
                                        const LogitSummary* summaries, int num_summaries) {
  const int lane = threadIdx.x % 32;
  LogitSummary whole = LogitSummary::none();
  for (int i = lane; i < num_summaries; i += 32) {
    whole = merged(whole, summaries[row * num_summaries + i]);
  }
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    whole = merged(whole, shuffled(whole, distance));
  }
  if (lane != 0) return;

  const float largest = whole.largest, total = whole.total;
  const bool finite = largest > -INFINITY && largest < INFINITY;
  const bool not_a_number = total != total && !(largest == INFINITY);
  // The softmax of infinite logits is not defined.
  params.confidence[row] = finite ? (0.0f - expm1f(whole.second - largest)) / total : NAN;
  params.token[row] = whole.index == LogitSummary::kNoIndex ? 0 : whole.index;
  if (params.logsumexp != nullptr) {
    params.logsumexp[row] = finite || not_a_number ? largest + logf(total) : largest;
  }
  if (params.top_logit != nullptr) params.top_logit[row] = not_a_number ? total : largest;
  if (params.place.out_token != nullptr) place_row(params.place, row);
}

constexpr int kSummaryWarps = 4;          // of a block, one for each row
constexpr int kSummaryExitingWarps = 16;  // where one block has all rows

// Grid: the rows by the block's warps. If `lets_exit`, one block has all rows, several per warp if
// there are more rows than warps, and then lets them exit.
__global__ void __launch_bounds__(32 * kSummaryExitingWarps)
    logit_summary_kernel(ExitConfidenceSoftmaxParams params, const LogitSummary* summaries,
                         int num_summaries, bool lets_exit) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t num_warps = int64_t{gridDim.x} * (blockDim.x / 32);
  int64_t row = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  for (; row < params.num_seqs; row += num_warps) {
    if (is_wanted(params, row)) end_row(params, row, summaries, num_summaries);
  }
  if (!lets_exit) return;
  __syncthreads();  // the measurements of all rows are written
  let_rows_exit(params.exit);
}

}  // namespace eecore::cuda
