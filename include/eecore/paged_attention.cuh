// paged_attention: a block holds the rows (query, head of the group) of one tile of a sequence that
// share a kv head, and streams their keys and values through shared memory with an online softmax
// in base 2. The keys are cut into splits; the rows of a split are merged with those of the others
// in ascending order, in the block or, where several blocks share a tile, by a second kernel.
//
// A row's arithmetic over a split depends on its own keys and on where the split begins alone: one
// warp walks the split in steps of kStepKeys keys, and keys that only a neighbour sees weigh
// exactly 0. With a fixed split size the row therefore does not depend on its company, to the bit.
#pragma once

#include <type_traits>

#include "eecore/element.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kAttentionWarps = 4;
constexpr int kAttentionThreads = 32 * kAttentionWarps;
constexpr int kAttentionBlocksPerMultiprocessor = 2;
constexpr int kMinAttentionStages = 2, kMaxAttentionStages = 6;

// How a call is cut into blocks, worked out from its shapes alone.
struct AttentionPlan {
  int32_t group_size;                       // query heads of a kv head
  int32_t num_tiles;                        // at most, of all sequences
  int32_t num_blocks;                       // that share the keys of a tile
  int32_t num_stages;                       // of keys under way to shared memory
  int32_t step_keys;                        // AttentionSizes::kStepKeys
  int32_t num_partials;                     // of each row in the workspace
  int32_t sliding_window;                   // 0: none
  int32_t fixed_split_size;                 // 0: from the keys of a tile
  float scale;                              // of the scores, times log2(e)
  bool q_aligned, kv_aligned, out_aligned;  // whether 16-byte accesses are possible
};

// What a head dimension makes of the tiles. 16-bit elements go through the tensor cores whatever
// the number of rows: a step's instructions, rows of padding included, take a fraction of the time
// that its keys take to arrive.
template <typename T, int kHeadDim>
struct AttentionSizes {
  static constexpr bool kTensorCores = sizeof(T) == 2;
  static constexpr int kPack = Pack<T>::kSize;
  static constexpr int kPieces = kHeadDim / kPack;  // 16-byte pieces of a row
  static constexpr int kWarpRows = kTensorCores ? 16 : 4;
  static constexpr int kTileRows = kAttentionWarps * kWarpRows;
  static constexpr int kStepKeys = kTensorCores
                                       ? (kHeadDim > 64 ? 16 : 32)  // keys of a warp's step
                                       : (kHeadDim > 64 ? 8 : 16);
  static constexpr int kRowStride = kHeadDim + kPack;        // no two of 8 rows in the same banks
  static constexpr int kBlockSize = kStepKeys * kRowStride;  // elements of the keys of a step
  static constexpr int kStageBytes = kAttentionWarps * 2 * kBlockSize * static_cast<int>(sizeof(T));
  // Columns of the queries that stay in registers; what has no room there is read again and again
  // from shared memory of each warp.
  static constexpr int kKeptColumns = kTensorCores && kHeadDim > 128 ? 128 : kHeadDim;
  static constexpr int kRestStride = kHeadDim - kKeptColumns + kPack;
  static constexpr int kRestSize = kKeptColumns < kHeadDim ? kWarpRows * kRestStride : 0;
  static constexpr int kRestBytes = kAttentionWarps * kRestSize * static_cast<int>(sizeof(T));
  static constexpr int kPartStride = kHeadDim + 8;  // floats of a row of a warp's result
  static constexpr int kPartBytes = kTileRows * (kPartStride + 2) * static_cast<int>(sizeof(float));
  static constexpr int kStatsSize = 2 * kTileRows * 2;  // floats, beside the stages
  static_assert(kHeadDim % 16 == 0 && kStepKeys * kPieces % 32 == 0);
  static_assert(kPartBytes <= kMinAttentionStages * kStageBytes);
};

// Keys [begin, end) of a sequence.
struct KeyRange {
  int begin, end;
};

__device__ __forceinline__ KeyRange intersect(KeyRange a, KeyRange b) {
  return {max(a.begin, b.begin), min(a.end, b.end)};
}

// The queries of a sequence are its last positions.
struct QuerySequence {
  int index, first_token, num_queries, length;

  __device__ __forceinline__ int position(int query) const { return length - num_queries + query; }
};

// Rows [first_row, first_row + num_rows) of a sequence: row r of a kv head is query r / group_size,
// head r % group_size of the group. Teams of 1, 2 or 4 warps take a split each, so that all warps
// work whether the tile has few rows or many.
struct AttentionTile {
  QuerySequence seq;
  int first_row, num_rows;
  KeyRange used;  // the keys that any of the rows sees
  int team_warps;
  int split_origin, split_size;
  int first_split, end_split;  // those that hold used keys

  __device__ __forceinline__ int num_teams() const { return kAttentionWarps / team_warps; }
  __device__ __forceinline__ KeyRange split(int index) const {
    const int begin = split_origin + index * split_size;
    return {begin, begin + split_size};
  }
};

// The last of the sequences [0, num_sequences) whose first(index, first_token) is at most `target`;
// first ascends and is at most `target` for sequence 0. All lanes of a warp call it; each tries
// another sequence.
template <typename First>
__device__ __forceinline__ QuerySequence find_sequence(const PagedAttentionParams& params,
                                                       int target, First first) {
  const int lane = threadIdx.x % 32;
  int begin = 0, count = static_cast<int>(params.num_seqs);
  while (count > 32) {
    const int stride = (count + 31) / 32;
    const bool tries = lane * stride < count;
    const int index = begin + (tries ? lane * stride : 0);
    const bool reached = first(index, params.query_start_loc[index]) <= target;
    const int skipped = (__popc(__ballot_sync(kWholeWarp, tries && reached)) - 1) * stride;
    begin += skipped;
    count = min(stride, count - skipped);
  }
  const int index = begin + min(lane, count - 1);
  const int first_token = params.query_start_loc[index];
  const int end_token = params.query_start_loc[index + 1];
  const int length = params.seq_lens[index];
  const bool reached = lane < count && first(index, first_token) <= target;
  const int found = __popc(__ballot_sync(kWholeWarp, reached)) - 1;
  return {begin + found, __shfl_sync(kWholeWarp, first_token, found),
          __shfl_sync(kWholeWarp, end_token - first_token, found),
          __shfl_sync(kWholeWarp, length, found)};
}

// The keys that a query at `position` of a sequence of `length` keys sees.
__device__ __forceinline__ KeyRange visible_keys(const PagedAttentionParams& params,
                                                 const AttentionPlan& plan, int length,
                                                 int position) {
  const int begin = plan.sliding_window > 0 ? position + 1 - plan.sliding_window : 0;
  return {max(begin, 0), max(params.causal ? position + 1 : length, 0)};
}

// A tile's rows, the keys that they use and how those are split.
template <int kWarpRows>
__device__ __forceinline__ AttentionTile make_tile(const PagedAttentionParams& params,
                                                   const AttentionPlan& plan,
                                                   const QuerySequence& seq, int first_row) {
  constexpr int kMinSplit = 64;
  AttentionTile tile{};
  tile.seq = seq;
  tile.first_row = first_row;
  tile.num_rows = min(seq.num_queries * plan.group_size - first_row, kAttentionWarps * kWarpRows);
  if (tile.num_rows <= 0) return tile;
  const int last_row = first_row + tile.num_rows - 1;
  const auto visible = [&](int row) {
    return visible_keys(params, plan, seq.length, seq.position(row / plan.group_size));
  };
  tile.used = {visible(first_row).begin, visible(last_row).end};
  tile.team_warps = tile.num_rows <= kWarpRows ? 1 : tile.num_rows <= 2 * kWarpRows ? 2 : 4;
  if (plan.fixed_split_size > 0) {
    tile.split_size = plan.fixed_split_size;
  } else {
    const int num_splits = tile.num_teams() * plan.num_blocks;
    const int step = plan.step_keys * tile.team_warps;
    const int keys =
        max((tile.used.end - tile.used.begin + num_splits - 1) / num_splits, kMinSplit);
    tile.split_origin = tile.used.begin;
    tile.split_size = (keys + step - 1) / step * step;
  }
  if (tile.used.begin < tile.used.end) {
    tile.first_split = (tile.used.begin - tile.split_origin) / tile.split_size;
    tile.end_split = (tile.used.end - 1 - tile.split_origin) / tile.split_size + 1;
  }
  return tile;
}

// Weighted values of a row, relative to its largest score, which is in base 2.
template <int kSize>
struct PartialRow {
  float values[kSize] = {};
  float maximum = -INFINITY, weight = 0.0f;

  // Adds the keys of the next split.
  __device__ __forceinline__ void merge(const PartialRow& next) {
    const float largest = fmaxf(maximum, next.maximum);
    if (largest == -INFINITY) return;
    const float before = exp2_fast(maximum - largest), now = exp2_fast(next.maximum - largest);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = fmaf(next.values[i], now, values[i] * before);
    weight = fmaf(next.weight, now, weight * before);
    maximum = largest;
  }

  // Writes the row's `kSize` elements of the result; zeros where no key was seen.
  template <typename T>
  __device__ __forceinline__ void store(T* out, bool aligned) const {
    const float inverse = weight > 0.0f ? 1.0f / weight : 0.0f;
    float results[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) results[i] = values[i] * inverse;
    store_pack(out, from_floats<T>(results), kSize, aligned);
  }
};

// A row in the workspace: values [num_partials, num_tokens, num_q_heads, head_dim], then (maximum,
// weight) of each.
struct PartialAddress {
  float* values;
  float* stats;
};

__device__ __forceinline__ PartialAddress partial_address(const PagedAttentionParams& params,
                                                          const AttentionPlan& plan, int partial,
                                                          int token, int head) {
  float* const workspace = static_cast<float*>(params.workspace);
  const int64_t row = (partial * params.num_tokens + token) * params.num_q_heads + head;
  const int64_t num_rows = plan.num_partials * params.num_tokens * params.num_q_heads;
  return {workspace + row * params.head_dim, workspace + num_rows * params.head_dim + row * 2};
}

template <int kSize>
__device__ __forceinline__ PartialRow<kSize> load_partial(const PartialAddress& from, int at) {
  PartialRow<kSize> row;
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    const Pack<float> pack = load16(from.values + at + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) row.values[i + j] = pack.values[j];
  }
  row.maximum = from.stats[0];
  row.weight = from.stats[1];
  return row;
}

template <int kSize>
__device__ __forceinline__ void store_partial_values(const PartialAddress& to, int at,
                                                     const PartialRow<kSize>& row) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    Pack<float> pack;
#pragma unroll
    for (int j = 0; j < 4; ++j) pack.values[j] = row.values[i + j];
    store16(to.values + at + i, pack);
  }
}

// What a row gives a key before the softmax, in base 2: the one place where a bias joins.
__device__ __forceinline__ float attention_score(float dot, float scale) { return dot * scale; }

// exp2(x - maximum) with nothing seen yet, of which the maximum is -inf, as 0.
__device__ __forceinline__ float reference_of(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// A warp's 16 rows on the tensor cores; rows past the tile's last repeat it and are never stored.
// Lane l has rows l / 4 and l / 4 + 8.
template <typename T, int kHeadDim>
class TensorCoreRows {
  using Sizes = AttentionSizes<T, kHeadDim>;
  static constexpr int kStepKeys = Sizes::kStepKeys, kRowStride = Sizes::kRowStride;
  static constexpr int kKeptSteps = Sizes::kKeptColumns / 16;

 public:
  __device__ __forceinline__ TensorCoreRows(const PagedAttentionParams& params,
                                            const AttentionPlan& plan, const AttentionTile& tile,
                                            int first_row)
      : params_(params), plan_(plan), lane_(threadIdx.x % 32), length_(tile.seq.length) {
    const int last = tile.first_row + tile.num_rows - 1;
    const auto position = [&](int row) {
      return tile.seq.position(min(row, last) / plan.group_size);
    };
    has_rows_ = first_row <= last;
#pragma unroll
    for (int i = 0; i < 2; ++i) position_[i] = position(first_row + lane_ / 4 + 8 * i);
    first_position_ = position(first_row);
    last_position_ = position(first_row + Sizes::kWarpRows - 1);
  }

  // The queries, by way of shared memory of this warp; `offset` is where the row lane % 16 lies.
  // The columns without room in registers stay in `rest`.
  __device__ __forceinline__ void load_queries(const T* q, int64_t offset, int64_t head_dim,
                                               bool aligned, Shared<T> shared, Shared<T> rest) {
#pragma unroll 1
    for (int i = lane_; i < Sizes::kWarpRows * Sizes::kPieces; i += 32) {
      const int row = i / Sizes::kPieces, at = i % Sizes::kPieces * Sizes::kPack;
      const int64_t from = __shfl_sync(kWholeWarp, offset, row);
      const Pack<T> pack = load_pack(q + from + at, head_dim - at, aligned);
      if (at < Sizes::kKeptColumns) {
        shared_store16(shared + row * kRowStride + at, pack);
      } else {
        shared_store16(rest + row * Sizes::kRestStride + (at - Sizes::kKeptColumns), pack);
      }
    }
    __syncwarp();
#pragma unroll
    for (int d = 0; d < kKeptSteps; ++d) {
      ldmatrix_x4(q_[d], shared + lane_ % 16 * kRowStride + lane_ / 16 * 8 + d * 16);
    }
    rest_ = rest + lane_ % 16 * Sizes::kRestStride + lane_ / 16 * 8;
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      maximum_[i] = -INFINITY;
      weight_[i] = 0.0f;
    }
#pragma unroll
    for (int d = 0; d < kHeadDim / 8; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[d][i] = 0.0f;
    }
  }

  // Adds the keys [first_key, first_key + kStepKeys) that lie before `end`.
  __device__ __forceinline__ void attend(Shared<T> k, Shared<T> v, int first_key, int end) {
    // Rows past the tile's last see what it sees, so these bounds hold for all 16.
    const KeyRange first = visible(first_position_), last = visible(last_position_);
    if (!has_rows_ || first_key >= min(last.end, end) || first_key + kStepKeys <= first.begin)
      return;
    float scores[kStepKeys / 8][4] = {};
    const int matrix = lane_ / 8, matrix_row = lane_ % 8;
    const Shared<T> k_lane = k + (matrix / 2 * 8 + matrix_row) * kRowStride + matrix % 2 * 8;
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t queries[4];
      if (d < kKeptSteps) {
#pragma unroll
        for (int i = 0; i < 4; ++i) queries[i] = q_[d < kKeptSteps ? d : 0][i];
      } else {
        ldmatrix_x4(queries, rest_ + (d - kKeptSteps) * 16);
      }
#pragma unroll
      for (int j = 0; j < kStepKeys / 16; ++j) {
        uint32_t keys[4];
        ldmatrix_x4(keys, k_lane + j * 16 * kRowStride + d * 16);
        mma_m16n8k16<T>(scores[2 * j], queries, {keys[0], keys[1]});
        mma_m16n8k16<T>(scores[2 * j + 1], queries, {keys[2], keys[3]});
      }
    }

#pragma unroll
    for (int j = 0; j < kStepKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] = attention_score(scores[j][i], plan_.scale);
    }
    if (first_key < last.begin || first_key + kStepKeys > min(first.end, end)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const KeyRange seen = visible(position_[i / 2]);
#pragma unroll
        for (int j = 0; j < kStepKeys / 8; ++j) {
          const int key = first_key + j * 8 + lane_ % 4 * 2 + i % 2;
          if (key < seen.begin || key >= min(seen.end, end)) scores[j][i] = -INFINITY;
        }
      }
    }

    // Online softmax. Most steps leave every maximum as it is.
    float largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = maximum_[i];
#pragma unroll
      for (int j = 0; j < kStepKeys / 8; ++j) {
        largest[i] = fmaxf(largest[i], fmaxf(scores[j][2 * i], scores[j][2 * i + 1]));
      }
      largest[i] = reduce_lanes<4>(largest[i], Max{});
    }
    if (__any_sync(kWholeWarp, largest[0] != maximum_[0] || largest[1] != maximum_[1])) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        factor[i] = exp2_fast(maximum_[i] - reference_of(largest[i]));
        maximum_[i] = largest[i];
        weight_[i] *= factor[i];
      }
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[d][i] *= factor[i / 2];
      }
    }
    const float reference[2] = {reference_of(maximum_[0]), reference_of(maximum_[1])};
#pragma unroll
    for (int j = 0; j < kStepKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[j][i] = exp2_fast(scores[j][i] - reference[i / 2]);
        weight_[i / 2] += scores[j][i];
      }
    }

    const Shared<T> v_lane = v + (matrix % 2 * 8 + matrix_row) * kRowStride + matrix / 2 * 8;
#pragma unroll
    for (int j = 0; j < kStepKeys / 16; ++j) {
      const float (&low)[4] = scores[2 * j];
      const float (&high)[4] = scores[2 * j + 1];
      const uint32_t weights[4] = {pack_pair<T>(low[0], low[1]), pack_pair<T>(low[2], low[3]),
                                   pack_pair<T>(high[0], high[1]), pack_pair<T>(high[2], high[3])};
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
        uint32_t values[4];
        ldmatrix_x4_transposed(values, v_lane + j * 16 * kRowStride + d * 16);
        mma_m16n8k16<T>(sums_[2 * d], weights, {values[0], values[1]});
        mma_m16n8k16<T>(sums_[2 * d + 1], weights, {values[2], values[3]});
      }
    }
  }

  // The rows' results: values [kWarpRows, kPartStride], (maximum, weight) [kWarpRows, 2].
  __device__ __forceinline__ void store(Shared<float> values, Shared<float> stats) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = lane_ / 4 + 8 * i;
      const float weight = reduce_lanes<4>(weight_[i]);
      if (lane_ % 4 == 0) {
        stats[row * 2] = maximum_[i];
        stats[row * 2 + 1] = weight;
      }
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d) {
        values[row * Sizes::kPartStride + d * 8 + lane_ % 4 * 2] = sums_[d][2 * i];
        values[row * Sizes::kPartStride + d * 8 + lane_ % 4 * 2 + 1] = sums_[d][2 * i + 1];
      }
    }
  }

 private:
  __device__ __forceinline__ KeyRange visible(int position) const {
    return visible_keys(params_, plan_, length_, position);
  }

  const PagedAttentionParams& params_;
  const AttentionPlan& plan_;
  int lane_, length_;
  bool has_rows_;
  int position_[2], first_position_, last_position_;  // of this lane's rows, of the warp's
  uint32_t q_[kKeptSteps][4];
  Shared<T> rest_;
  float sums_[kHeadDim / 8][4];
  float maximum_[2], weight_[2];  // the weight is of this lane's keys alone
};

// A warp's 4 rows of float32 on the CUDA cores. kLanes neighbouring lanes share a key, kGroups keys
// are under way at a time, and each group has a softmax of its own until the end.
template <int kHeadDim>
class PlainRows {
  using Sizes = AttentionSizes<float, kHeadDim>;
  static constexpr int kRows = Sizes::kWarpRows;
  static constexpr int kLanes = kHeadDim > 128 ? 16 : 8;
  static constexpr int kGroups = 32 / kLanes;
  static constexpr int kGroupKeys = Sizes::kStepKeys / kGroups;
  static constexpr int kLanePieces = (Sizes::kPieces + kLanes - 1) / kLanes;

 public:
  __device__ __forceinline__ PlainRows(const PagedAttentionParams& params,
                                       const AttentionPlan& plan, const AttentionTile& tile,
                                       int first_row)
      : params_(params),
        plan_(plan),
        lane_(threadIdx.x % kLanes),
        group_(threadIdx.x % 32 / kLanes),
        length_(tile.seq.length) {
    const int last = tile.first_row + tile.num_rows - 1;
    has_rows_ = first_row <= last;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      position_[r] = tile.seq.position(min(first_row + r, last) / plan.group_size);
    }
  }

  __device__ __forceinline__ void load_queries(const float* q, int64_t offset, int64_t head_dim,
                                               bool aligned, Shared<float>, Shared<float>) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t from = __shfl_sync(kWholeWarp, offset, r);
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        const int at = (i * kLanes + lane_) * 4;
        const Pack<float> pack = load_pack(q + from + at, head_dim - at, aligned);
#pragma unroll
        for (int e = 0; e < 4; ++e) q_[r][i][e] = pack.values[e];
      }
    }
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      maximum_[r] = -INFINITY;
      weight_[r] = 0.0f;
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_[r][i][e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void attend(Shared<float> k, Shared<float> v, int first_key, int end) {
    if (!has_rows_ || first_key >= min(visible(position_[kRows - 1]).end, end) ||
        first_key + Sizes::kStepKeys <= visible(position_[0]).begin) {
      return;
    }
    float scores[kGroupKeys][kRows] = {};
#pragma unroll
    for (int j = 0; j < kGroupKeys; ++j) {
      const Shared<float> row = k + (j * kGroups + group_) * Sizes::kRowStride;
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        if (!has_piece(i)) continue;
        const Pack<float> keys = shared_load16(row + (i * kLanes + lane_) * 4);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            scores[j][r] = fmaf(q_[r][i][e], keys.values[e], scores[j][r]);
          }
        }
      }
    }
    float largest[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest[r] = maximum_[r];
      const KeyRange seen = visible(position_[r]);
#pragma unroll
      for (int j = 0; j < kGroupKeys; ++j) {
        const int key = first_key + j * kGroups + group_;
        scores[j][r] = attention_score(reduce_lanes<kLanes>(scores[j][r]), plan_.scale);
        if (key < seen.begin || key >= min(seen.end, end)) scores[j][r] = -INFINITY;
        largest[r] = fmaxf(largest[r], scores[j][r]);
      }
      const float reference = reference_of(largest[r]);
      const float factor = exp2_fast(maximum_[r] - reference);
      maximum_[r] = largest[r];
      weight_[r] *= factor;
#pragma unroll
      for (int j = 0; j < kGroupKeys; ++j) {
        scores[j][r] = exp2_fast(scores[j][r] - reference);
        weight_[r] += scores[j][r];
      }
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_[r][i][e] *= factor;
      }
    }
#pragma unroll
    for (int j = 0; j < kGroupKeys; ++j) {
      const Shared<float> row = v + (j * kGroups + group_) * Sizes::kRowStride;
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        if (!has_piece(i)) continue;
        const Pack<float> values = shared_load16(row + (i * kLanes + lane_) * 4);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            sums_[r][i][e] = fmaf(scores[j][r], values.values[e], sums_[r][i][e]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store(Shared<float> values, Shared<float> stats) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int distance = kLanes; distance < 32; distance *= 2) {
        const float other = __shfl_xor_sync(kWholeWarp, maximum_[r], distance);
        const float other_weight = __shfl_xor_sync(kWholeWarp, weight_[r], distance);
        const float largest = fmaxf(maximum_[r], other);
        const float mine = exp2_fast(maximum_[r] - reference_of(largest));
        const float theirs = exp2_fast(other - reference_of(largest));
        maximum_[r] = largest;
        weight_[r] = fmaf(other_weight, theirs, weight_[r] * mine);
#pragma unroll
        for (int i = 0; i < kLanePieces; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float sum = __shfl_xor_sync(kWholeWarp, sums_[r][i][e], distance);
            sums_[r][i][e] = fmaf(sum, theirs, sums_[r][i][e] * mine);
          }
        }
      }
      if (group_ != 0) continue;
      if (lane_ == 0) {
        stats[r * 2] = maximum_[r];
        stats[r * 2 + 1] = weight_[r];
      }
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        if (!has_piece(i)) continue;
        Pack<float> pack;
#pragma unroll
        for (int e = 0; e < 4; ++e) pack.values[e] = sums_[r][i][e];
        shared_store16(values + r * Sizes::kPartStride + (i * kLanes + lane_) * 4, pack);
      }
    }
  }

 private:
  // Whether the last pieces, which not all lanes have, are this lane's too.
  __device__ __forceinline__ bool has_piece(int i) const {
    return (i + 1) * kLanes <= Sizes::kPieces || i * kLanes + lane_ < Sizes::kPieces;
  }

  __device__ __forceinline__ KeyRange visible(int position) const {
    return visible_keys(params_, plan_, length_, position);
  }

  const PagedAttentionParams& params_;
  const AttentionPlan& plan_;
  int lane_, group_, length_;
  bool has_rows_;
  int position_[kRows];
  float q_[kRows][kLanePieces][4];
  float sums_[kRows][kLanePieces][4];
  float maximum_[kRows], weight_[kRows];
};

// Waits for the oldest of num_stages - 1 groups of copies.
__device__ __forceinline__ void wait_for_stage(int num_stages) {
  static_assert(kMinAttentionStages == 2 && kMaxAttentionStages == 6);
  switch (num_stages) {
    case 2:
      return cp_async_wait<0>();
    case 3:
      return cp_async_wait<1>();
    case 4:
      return cp_async_wait<2>();
    case 5:
      return cp_async_wait<3>();
    default:
      return cp_async_wait<4>();
  }
}

// Where a slot of the cache lies; page -1: no key that is used.
struct SlotAddress {
  int page, offset;
};

// One split's keys and values on their way through the ring, as seen by one warp of the team that
// takes the split. Each warp brings a part of every stage: the keys of one step.
template <typename T, int kHeadDim>
class KeyStream {
  using Sizes = AttentionSizes<T, kHeadDim>;
  static constexpr int kCopyUnroll = 8;

 public:
  // Steps begin at multiples of kStepKeys from the split's first key.
  __device__ __forceinline__ KeyStream(const PagedAttentionParams& params,
                                       const AttentionTile& tile, int kv_head, KeyRange split)
      : params_(params),
        page_table_(params.page_table + tile.seq.index * params.page_table_stride),
        k_(static_cast<const T*>(params.k_cache) + kv_head * params.head_dim),
        v_(static_cast<const T*>(params.v_cache) + kv_head * params.head_dim),
        keys_(intersect(tile.used, split)),
        stage_keys_(tile.team_warps * Sizes::kStepKeys) {
    first_key_ = split.begin + (keys_.begin - split.begin) / stage_keys_ * stage_keys_;
    num_stages_ = (keys_.end - first_key_ + stage_keys_ - 1) / stage_keys_;
    if (keys_.begin >= keys_.end) num_stages_ = 0;
  }

  __device__ __forceinline__ int num_stages() const { return num_stages_; }
  __device__ __forceinline__ int end() const { return keys_.end; }
  __device__ __forceinline__ int first_key(int stage, int warp_of_team) const {
    return first_key_ + stage * stage_keys_ + warp_of_team * Sizes::kStepKeys;
  }

  // Of this lane's key among those that the warp brings to a stage.
  __device__ __forceinline__ SlotAddress locate(int stage, int warp_of_team) const {
    const int key = first_key(stage, warp_of_team) + threadIdx.x % 32 % Sizes::kStepKeys;
    if (key < keys_.begin || key >= keys_.end) return {-1, 0};
    const uint32_t page_size = static_cast<uint32_t>(params_.page_size);
    const uint32_t index = static_cast<uint32_t>(key) / page_size;
    return {page_table_[index], key - static_cast<int>(index * page_size)};
  }

  // Starts the copies of the keys that the lanes have located; what is not used becomes zeros.
  __device__ __forceinline__ void copy(SlotAddress slot, bool aligned, Shared<T> k_to,
                                       Shared<T> v_to) const {
    const bool used = slot.page >= 0;
    const int64_t k_slot =
        used ? slot.page * params_.k_page_stride + slot.offset * params_.k_slot_stride : -1;
    const int64_t v_slot =
        used ? slot.page * params_.v_page_stride + slot.offset * params_.v_slot_stride : -1;
    const int lane = threadIdx.x % 32, head_dim = static_cast<int>(params_.head_dim);
    if (aligned) {
#pragma unroll kCopyUnroll
      for (int i = 0; i < Sizes::kStepKeys * Sizes::kPieces / 32; ++i) {
        const int key = (i * 32 + lane) / Sizes::kPieces;
        const int at = (i * 32 + lane) % Sizes::kPieces * Sizes::kPack;
        const int64_t k_from = __shfl_sync(kWholeWarp, k_slot, key);
        const int64_t v_from = __shfl_sync(kWholeWarp, v_slot, key);
        const bool exists = k_from >= 0 && at < head_dim;
        const int to = key * Sizes::kRowStride + at;
        cp_async16(k_to + to, k_ + (exists ? k_from + at : 0), exists ? 16 : 0);
        cp_async16(v_to + to, v_ + (exists ? v_from + at : 0), exists ? 16 : 0);
      }
    } else {
#pragma unroll 1
      for (int i = lane; i < Sizes::kStepKeys * Sizes::kPieces; i += 32) {
        const int key = i / Sizes::kPieces, at = i % Sizes::kPieces * Sizes::kPack;
        const int64_t k_from = __shfl_sync(kWholeWarp, k_slot, key);
        const int64_t v_from = __shfl_sync(kWholeWarp, v_slot, key);
        const int count = k_from >= 0 ? head_dim - at : 0;
        const int to = key * Sizes::kRowStride + at;
        shared_store16(k_to + to, load_pack(k_ + k_from + at, count, false));
        shared_store16(v_to + to, load_pack(v_ + v_from + at, count, false));
      }
    }
  }

 private:
  const PagedAttentionParams& params_;
  const int32_t* page_table_;
  const T* k_;
  const T* v_;
  KeyRange keys_;
  int stage_keys_, first_key_, num_stages_;
};

// Grid: (num_tiles * num_kv_heads, num_blocks), heads first, so that neighbours read neighbouring
// memory; tiles backwards, so that those of a causal prefill with the most keys start first.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kAttentionThreads, kAttentionBlocksPerMultiprocessor)
    paged_attention_kernel(PagedAttentionParams params, AttentionPlan plan) {
  using Sizes = AttentionSizes<T, kHeadDim>;
  using Rows =
      std::conditional_t<Sizes::kTensorCores, TensorCoreRows<T, kHeadDim>, PlainRows<kHeadDim>>;
  constexpr int kWarpRows = Sizes::kWarpRows, kPack = Sizes::kPack;
  EECORE_SHARED(float, total_stats, Sizes::kStatsSize);
  wait_for_previous_kernel();
  let_next_kernel_start();

  // This block's tile and splits.
  const int num_kv_heads = static_cast<int>(params.num_kv_heads);
  const int kv_head = static_cast<int>(blockIdx.x) % num_kv_heads;
  const int tile_index = plan.num_tiles - 1 - static_cast<int>(blockIdx.x) / num_kv_heads;
  const auto first_tile = [&](int seq, int token) {
    return static_cast<int>(int64_t{token} * plan.group_size / Sizes::kTileRows) + seq;
  };
  const QuerySequence seq = find_sequence(params, tile_index, first_tile);
  const int tile_of_seq = tile_index - first_tile(seq.index, seq.first_token);
  const AttentionTile tile =
      make_tile<kWarpRows>(params, plan, seq, tile_of_seq * Sizes::kTileRows);
  if (tile.num_rows <= 0) return;
  const int num_teams = tile.num_teams();
  const int end_round = (tile.end_split + num_teams - 1) / num_teams;
  int round = tile.first_split / num_teams + static_cast<int>(blockIdx.y);
  if (plan.num_blocks > 1 && round >= end_round) return;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int team = warp / tile.team_warps, warp_of_team = warp % tile.team_warps;
  const int first_row = tile.first_row + warp_of_team * kWarpRows;
  Rows rows(params, plan, tile, first_row);
  // Stage s of the ring holds the keys, then the values, that each warp has brought.
  const Shared<T> ring = dynamic_shared<T>(Sizes::kRestBytes);
  constexpr int kStageSize = kAttentionWarps * 2 * Sizes::kBlockSize;
  const auto block_of = [&](int stage, int of_warp) {
    return ring + (stage * kStageSize + of_warp * 2 * Sizes::kBlockSize);
  };
  const auto sync_team = [&] {
    if (tile.team_warps == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  };

  bool is_first = true;
  do {
    const KeyStream<T, kHeadDim> stream(params, tile, kv_head,
                                        tile.split(round * num_teams + team));
    int num_steps = stream.num_stages();
    if (tile.team_warps == 2) {  // both teams meet at the same barriers
      const KeyStream<T, kHeadDim> other(params, tile, kv_head,
                                         tile.split(round * num_teams + 1 - team));
      num_steps = max(num_steps, other.num_stages());
    }

    // All stages but the last set out at once.
    SlotAddress slots[kMaxAttentionStages - 1];
#pragma unroll
    for (int i = 0; i < kMaxAttentionStages - 1; ++i) {
      slots[i] = {-1, 0};
      if (i < plan.num_stages - 1) slots[i] = stream.locate(i, warp_of_team);
    }
#pragma unroll
    for (int i = 0; i < kMaxAttentionStages - 1; ++i) {
      if (i >= plan.num_stages - 1) continue;
      if (i < num_steps) {
        const Shared<T> to = block_of(i, warp);
        stream.copy(slots[i], plan.kv_aligned, to, to + Sizes::kBlockSize);
      }
      cp_async_commit();
    }
    SlotAddress next = stream.locate(plan.num_stages - 1, warp_of_team);
    if (is_first) {
      const int row = min(first_row + lane % kWarpRows, tile.first_row + tile.num_rows - 1);
      const int query = row / plan.group_size;
      const int64_t offset =
          (seq.first_token + query) * params.q_token_stride +
          (kv_head * plan.group_size + row - query * plan.group_size) * params.q_head_stride;
      rows.load_queries(static_cast<const T*>(params.q), offset, params.head_dim, plan.q_aligned,
                        block_of(plan.num_stages - 1, warp),
                        dynamic_shared<T>() + warp * Sizes::kRestSize);
    }

    rows.start();
    int stage = 0;
    for (int step = 0; step < num_steps; ++step) {
      wait_for_stage(plan.num_stages);
      sync_team();  // the stage is here, and that of the step before is read
      const int ahead = step + plan.num_stages - 1;
      if (ahead < num_steps) {
        const Shared<T> to = block_of(stage == 0 ? plan.num_stages - 1 : stage - 1, warp);
        stream.copy(next, plan.kv_aligned, to, to + Sizes::kBlockSize);
      }
      cp_async_commit();
      next = stream.locate(ahead + 1, warp_of_team);
      for (int i = 0; i < tile.team_warps; ++i) {
        const Shared<T> from = block_of(stage, team * tile.team_warps + i);
        rows.attend(from, from + Sizes::kBlockSize, stream.first_key(step, i), stream.end());
      }
      stage = stage + 1 == plan.num_stages ? 0 : stage + 1;
    }

    // The teams' results, where the ring was.
    __syncthreads();
    const Shared<float> values = dynamic_shared<float>(Sizes::kRestBytes);
    const Shared<float> stats = values + Sizes::kTileRows * Sizes::kPartStride;
    rows.store(values + warp * kWarpRows * Sizes::kPartStride, stats + warp * kWarpRows * 2);
    __syncthreads();
    const bool is_last = round + plan.num_blocks >= end_round;
    const bool keeps_splits = plan.fixed_split_size > 0 && plan.num_blocks > 1;
    for (int i = threadIdx.x; i < tile.num_rows * Sizes::kPieces; i += kAttentionThreads) {
      const int row = i / Sizes::kPieces, at = i % Sizes::kPieces * kPack;
      if (at >= params.head_dim) continue;
      const int query = (tile.first_row + row) / plan.group_size;
      const int token = seq.first_token + query;
      const int head = kv_head * plan.group_size + tile.first_row + row - query * plan.group_size;
      const Shared<float> last_stats = total_stats + (round & 1) * Sizes::kTileRows * 2 + row * 2;
      const Shared<float> next_stats = total_stats + (~round & 1) * Sizes::kTileRows * 2 + row * 2;

      PartialRow<kPack> total;
      if (!is_first && !keeps_splits) {
        const PartialAddress from = partial_address(params, plan, 0, token, head);
        total = load_partial<kPack>(from, at);
        total.maximum = last_stats[0];
        total.weight = last_stats[1];
      }
      for (int t = 0; t < num_teams; ++t) {
        const int part = t * tile.team_warps * kWarpRows + row;
        PartialRow<kPack> next_part;
#pragma unroll
        for (int j = 0; j < kPack; j += 4) {
          const Pack<float> pack = shared_load16(values + part * Sizes::kPartStride + at + j);
#pragma unroll
          for (int e = 0; e < 4; ++e) next_part.values[j + e] = pack.values[e];
        }
        next_part.maximum = stats[part * 2];
        next_part.weight = stats[part * 2 + 1];
        if (!keeps_splits) {
          total.merge(next_part);
        } else if (round * num_teams + t < tile.end_split) {
          const PartialAddress to =
              partial_address(params, plan, round * num_teams + t, token, head);
          store_partial_values(to, at, next_part);
          if (at == 0) {
            to.stats[0] = next_part.maximum;
            to.stats[1] = next_part.weight;
          }
        }
      }
      if (keeps_splits) continue;
      if (plan.num_blocks == 1 && is_last) {
        T* const out = static_cast<T*>(params.out) + token * params.out_token_stride +
                       head * params.out_head_stride + at;
        total.store(out, plan.out_aligned);
        continue;
      }
      // The block's share of the row, or the total so far: stats of that stay in the block, written
      // to where no one reads them in this round.
      const PartialAddress to =
          partial_address(params, plan, plan.num_blocks > 1 ? round : 0, token, head);
      store_partial_values(to, at, total);
      if (at == 0) {
        const bool in_block = plan.num_blocks == 1;
        if (in_block) {
          next_stats[0] = total.maximum;
          next_stats[1] = total.weight;
        } else {
          to.stats[0] = total.maximum;
          to.stats[1] = total.weight;
        }
      }
    }
    is_first = false;
    round += plan.num_blocks;
    if (round < end_round) __syncthreads();  // the results are read before the ring is filled again
  } while (round < end_round);
}

constexpr int kAttentionCombineThreads = 128;

// out = the rows' partials merged in ascending order.
// Grid: (num_tokens, ceil(num_q_heads * head_dim / Pack<T>::kSize / kAttentionCombineThreads)).
template <typename T, int kWarpRows>
__global__ void __launch_bounds__(kAttentionCombineThreads)
    paged_attention_combine_kernel(PagedAttentionParams params, AttentionPlan plan) {
  constexpr int kPack = Pack<T>::kSize, kTileRows = kAttentionWarps * kWarpRows;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int token = static_cast<int>(blockIdx.x);
  const QuerySequence seq =
      find_sequence(params, token, [](int, int first_token) { return first_token; });
  const int pieces = static_cast<int>(params.head_dim) / kPack;
  const int index = static_cast<int>(blockIdx.y) * kAttentionCombineThreads + threadIdx.x;
  const int head = index / pieces, at = index % pieces * kPack;
  if (head >= params.num_q_heads) return;

  const int row = (token - seq.first_token) * plan.group_size + head % plan.group_size;
  const AttentionTile tile = make_tile<kWarpRows>(params, plan, seq, row / kTileRows * kTileRows);
  int begin = tile.first_split, end = tile.end_split;
  if (plan.fixed_split_size == 0) end = (end + tile.num_teams() - 1) / tile.num_teams();
  PartialRow<kPack> total;
#pragma unroll 4
  for (int partial = begin; partial < end; ++partial) {
    total.merge(load_partial<kPack>(partial_address(params, plan, partial, token, head), at));
  }
  T* const out = static_cast<T*>(params.out) + token * params.out_token_stride +
                 head * params.out_head_stride + at;
  total.store(out, plan.out_aligned);
}

}  // namespace eecore::cuda
