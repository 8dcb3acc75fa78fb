// How a paged_attention call is divided: tiles of rows, splits of keys, and the partial results of
// a row's splits.
#pragma once

#include <type_traits>

#include "eecore/async_copy.cuh"
#include "eecore/division.cuh"
#include "eecore/element.cuh"
#include "eecore/params.h"
#include "eecore/reduce.cuh"

namespace eecore::cuda {

constexpr int kAttentionWarps = 4;
constexpr int kMaxTeamsShift = 2;  // one warp in each of the teams of a block
static_assert(kAttentionWarps == 1 << kMaxTeamsShift);
constexpr int kAttentionThreads = 32 * kAttentionWarps;
constexpr int kAttentionBlocksPerMultiprocessor = 2;
constexpr float kLog2E = 1.44269504f;
// With up to this many queries of a sequence, fixed splits give each query the same result whatever
// their number.
constexpr int kMaxRepeatedQueries = 32;
constexpr int kMaxSplitKeys = 1 << 28;  // a span of such splits stays in 32 bits
constexpr int kMinAttentionStages = 2, kMaxAttentionStages = kMaxPendingCopies + 2;

// How a call is divided into blocks; computed from its shapes alone.
struct AttentionPlan {
  Divisor group_size;        // query heads of a kv head
  Divisor kv_heads;          // of the call
  Divisor page_size;         // keys
  Divisor num_blocks;        // blocks that share the keys of a tile
  Divisor fixed_span;        // keys of a span: one split of the fixed size for each warp; else 1
  int32_t num_tiles;         // upper limit, over all sequences
  int32_t num_stages;        // stages of keys in flight to shared memory
  int32_t step_shift;        // AttentionSizes::kStepKeys is 1 << step_shift
  int32_t max_keys;          // keys that a row of the page table has room for
  int32_t num_partials;      // partial results per row in the workspace
  int32_t sliding_window;    // 0: none
  int32_t fixed_split_size;  // 0: chosen from the number of keys of a tile
  int32_t bias_before, bias_ahead;  // last positions with biases of their own, on either side
  int32_t bias_origin, bias_width;  // of a head's biases in shared memory
  bool last_merges;   // the last block of a tile merges its partial results, not a second kernel
  bool early_places;  // params.constant_places may be used
  float scale;        // of the scores, times log2(e)
  float soft_cap;     // of the scaled scores; 0: none
  bool q_aligned, kv_aligned, out_aligned;  // whether 16-byte accesses are possible
};

// The sizes of tiles for a head dimension. 16-bit elements use the tensor cores for any number of
// rows: the instructions of a step, including rows of padding, take a fraction of the time in which
// its keys arrive. C: the element type of the cache, T or float8. kBands: bands of rows of a warp,
// which share the keys that it loads from shared memory.
template <typename T, int kHeadDim, typename C = T, int kBands_ = 1>
struct AttentionSizes {
  static constexpr int kBands = kBands_;
  static constexpr bool kTensorCores = sizeof(T) == 2;
  static constexpr bool kWidens = !std::is_same_v<T, C>;
  static constexpr int kPack = Pack<T>::kSize;
  static constexpr int kPieces = kHeadDim / kPack;  // 16-byte pieces of a row
  static constexpr int kBandRows = kTensorCores ? 16 : 4;
  static constexpr int kWarpRows = kBands * kBandRows;
  static constexpr int kTileRows = kAttentionWarps * kBandRows;  // also with several bands
  static constexpr int kStepKeys = kTensorCores
                                       ? (kHeadDim > 64 ? 16 : 32)  // keys of a warp's step
                                       : (kHeadDim > 64 ? 8 : 16);
  static constexpr int kRowStride = kHeadDim + kPack;        // no two of 8 rows share banks
  static constexpr int kBlockSize = kStepKeys * kRowStride;  // elements of the keys of a step
  // The same for the ring, in the cache's type, and for widened keys. A row of float8 is read by
  // neighbouring lanes.
  static constexpr int kCachePack = 16 / static_cast<int>(sizeof(C));
  static constexpr int kCachePieces = kHeadDim / kCachePack;
  static constexpr int kCacheRowStride = kWidens ? kHeadDim : kRowStride;
  static constexpr int kCacheBlockSize = kStepKeys * kCacheRowStride;
  static constexpr int kStageBytes =
      kAttentionWarps * 2 * kCacheBlockSize * static_cast<int>(sizeof(C));
  static constexpr int kWideBytes =
      kWidens ? kAttentionWarps * 2 * kBlockSize * static_cast<int>(sizeof(T)) : 0;
  // Columns of the queries that stay in registers; the rest of the tile's rows is read from shared
  // memory again and again.
  static constexpr int kKeptColumns = !kTensorCores                 ? kHeadDim
                                      : kBands > 1 && kHeadDim > 96 ? (kWidens ? 64 : 80)
                                      : kHeadDim > 128              ? 112
                                                                    : kHeadDim;
  static constexpr int kRestStride = kHeadDim - kKeptColumns + kPack;
  static constexpr int kRestSize = kKeptColumns < kHeadDim ? kTileRows * kRestStride : 0;
  static constexpr int kRestBytes = kRestSize * static_cast<int>(sizeof(T));
  // The results of a warp's band take the place of keys that it has brought.
  static constexpr int kResultStride = kHeadDim + 8;  // floats of a row
  static constexpr int kResultSize =
      2 * kBlockSize * int{sizeof(T)} / int{sizeof(float)};  // floats
  static constexpr int kStatsSize = 4 * kTileRows * 2;       // floats
  static constexpr int kResultStatsSize = kTileRows * 2;     // floats
  static constexpr int kFixedBytes =                         // shared memory other than the stages
      (kStatsSize + kResultStatsSize) * int{sizeof(float)} +
      kAttentionWarps * kStepKeys * 2 * int{sizeof(int64_t)} +
      128;  // the tile, whether the block is the last one, and the alignment of the stages
  static_assert(kHeadDim % 16 == 0 && kStepKeys * kCachePieces % 32 == 0);
  static_assert(kBandRows * kResultStride <= kResultSize);
};

// Keys [begin, end) of a sequence.
struct KeyRange {
  int begin, end;
};

// A team's share of a span of keys: the steps from `first` to `end` that are 1 << stride_shift keys
// apart. So every team has a share however few keys there are, and teams next to each other read
// neighbouring keys.
struct Split {
  int first, stride_shift, end;
};

// The queries of a sequence are its last positions.
struct QuerySequence {
  int index, first_token, num_queries, length;

  __device__ __forceinline__ int position(int query) const { return length - num_queries + query; }
};

// A tile's rounds, [first, end), and its spans: the rounds whose splits share keys and are merged
// with each other first. With a fixed split size a span has kAttentionWarps splits, whatever the
// number of teams, so that a row's result does not depend on its tile. Otherwise a span is one
// round.
struct TileRounds {
  int first, end;
  int span_shift;  // a span has 1 << span_shift rounds

  __device__ __forceinline__ int first_of_span(int span) const {
    return max(span << span_shift, first);
  }
  __device__ __forceinline__ int span_of(int round) const { return round >> span_shift; }
  __device__ __forceinline__ int first_span() const { return span_of(first); }
  __device__ __forceinline__ int end_span() const { return span_of(end - 1) + 1; }
  __device__ __forceinline__ bool begins_span(int round) const {
    return round == first || span_of(round) != span_of(round - 1);
  }
  __device__ __forceinline__ bool ends_span(int round) const {
    return round + 1 >= end || span_of(round) != span_of(round + 1);
  }
  // The round that follows one in its block, which takes every num_blocks-th span; `end` or more
  // after the last.
  __device__ __forceinline__ int after(const AttentionPlan& plan, int round) const {
    return ends_span(round) ? first_of_span(span_of(round) + plan.num_blocks.value) : round + 1;
  }
  // Blocks that share the spans. Also a tile without keys has one block, which writes zeros.
  __device__ __forceinline__ int num_blocks(const AttentionPlan& plan) const {
    return max(min(plan.num_blocks.value, end_span() - first_span()), 1);
  }
};

// Rows [first_row, first_row + num_rows) of a sequence: row r of a kv head is query r / group_size,
// head r % group_size of the group. Teams of 1, 2 or 4 warps take a split each, so that all warps
// work whether the tile has few rows or many.
struct AttentionTile {
  QuerySequence seq;
  int first_row, num_rows;
  KeyRange used;                // the keys that any of the rows sees
  int teams_shift;              // there are 1 << teams_shift teams
  int span_keys, splits_shift;  // a span has 1 << splits_shift splits
  int first_split, end_split;   // the splits that hold used keys

  __device__ __forceinline__ int num_teams() const { return 1 << teams_shift; }
  __device__ __forceinline__ int team_warps() const { return kAttentionWarps >> teams_shift; }
  // The tile's rounds: in each, every team takes one split; a span has 1, 2 or 4 rounds.
  __device__ __forceinline__ TileRounds rounds() const {
    return {first_split >> teams_shift, (end_split + num_teams() - 1) >> teams_shift,
            splits_shift - teams_shift};
  }
  // The key at which spans begin; spans of a fixed size begin at the same keys for all rows.
  __device__ __forceinline__ int span_origin(const AttentionPlan& plan) const {
    return plan.fixed_split_size > 0 ? 0 : used.begin;
  }
  // Split `index` of the tile, without steps that no row sees; empty from end_split on.
  __device__ __forceinline__ Split split(const AttentionPlan& plan, int index) const {
    if (index >= end_split) return {used.end, 0, used.end};
    const int begin = span_origin(plan) + (index >> splits_shift) * span_keys;
    const int of_span = index & ((1 << splits_shift) - 1);
    const int stride_shift = plan.step_shift + splits_shift;
    const int unseen = max(used.begin - begin, 0) >> stride_shift << stride_shift;
    return {begin + unseen + (of_span << plan.step_shift), stride_shift,
            begin + min(span_keys, used.end - begin)};
  }
  // Stages of keys that a round takes: those of its first split, which has the most; at least one.
  __device__ __forceinline__ int num_stages(const AttentionPlan& plan, int round) const {
    const Split first = split(plan, round << teams_shift);
    const int keys = first.end - first.first;
    if (keys <= 0) return 1;
    return ((keys - 1) >> (first.stride_shift + kMaxTeamsShift - teams_shift)) + 1;
  }
};

// The last of the sequences [0, num_sequences) whose first(index, first_token) is at most `target`;
// `first` ascends and is at most `target` for sequence 0. All lanes of a warp call it, and each
// tries a different sequence.
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

// A tile's rows, the keys that they use and how the keys are split. A warp has kBands bands of
// kBandRows rows.
template <int kBandRows, int kBands = 1>
__device__ __forceinline__ AttentionTile make_tile(const PagedAttentionParams& params,
                                                   const AttentionPlan& plan,
                                                   const QuerySequence& seq, int first_row) {
  constexpr int kMinSplit = 128;  // keys: a fourth of the number that pays for another block
  AttentionTile tile{};
  tile.seq = seq;
  tile.first_row = first_row;
  tile.num_rows =
      min(seq.num_queries * plan.group_size.value - first_row, kAttentionWarps * kBandRows);
  if (tile.num_rows <= 0) return tile;
  const int last_row = first_row + tile.num_rows - 1;
  const auto visible = [&](int row) {
    return visible_keys(params, plan, seq.length, seq.position(plan.group_size.quotient(row)));
  };
  tile.used = {visible(first_row).begin, min(visible(last_row).end, plan.max_keys)};
  // Many queries make enough tiles without splits of a fixed size: one span has all the keys that
  // they see. Its splits are those of the teams, which therefore do not depend on kBands.
  const bool is_fixed = plan.fixed_split_size > 0;
  const bool is_repeated = is_fixed && seq.num_queries <= kMaxRepeatedQueries;
  const int of_warp = is_repeated ? kBands * kBandRows : kBandRows;
  tile.teams_shift = tile.num_rows <= of_warp ? 2 : tile.num_rows <= 2 * of_warp ? 1 : 0;
  const int origin = tile.span_origin(plan), end = tile.used.end - origin;
  int first = 0, last = 0;  // spans that hold used keys
  if (is_repeated) {
    tile.span_keys = plan.fixed_span.value;
    tile.splits_shift = kMaxTeamsShift;
    first = plan.fixed_span.quotient(max(tile.used.begin, 0));
    last = plan.fixed_span.quotient(max(end - 1, 0));
  } else {
    const int of_block = is_fixed ? end : plan.num_blocks.rounded_up(max(end, 0));
    const int keys = max((of_block + tile.num_teams() - 1) >> tile.teams_shift, kMinSplit);
    const int stage_shift = plan.step_shift + kMaxTeamsShift - tile.teams_shift;
    tile.span_keys = (((keys - 1) >> stage_shift) + 1) << (stage_shift + tile.teams_shift);
    tile.splits_shift = tile.teams_shift;
    if (!is_fixed && plan.num_blocks.value > 1) last = small_quotient(end - 1, tile.span_keys);
  }
  if (tile.used.begin < tile.used.end) {
    const int steps = ((end - last * tile.span_keys - 1) >> plan.step_shift) + 1;
    tile.first_split = first << tile.splits_shift;
    tile.end_split = (last << tile.splits_shift) + min(steps, 1 << tile.splits_shift);
  }
  return tile;
}

// The value that scores are relative to: the largest so far; 0 for rows that have only -inf.
__device__ __forceinline__ float reference_of(float maximum) {
  return maximum == -INFINITY ? 0.0f : maximum;
}

// The weighted values of a row, relative to its largest score, in base 2. That score is never NaN:
// a score of NaN makes the weight NaN.
template <int kSize>
struct PartialRow {
  float values[kSize] = {};
  float maximum = -INFINITY, weight = 0.0f;

  // Adds the result over the keys that come next.
  __device__ __forceinline__ void merge(const PartialRow& next) {
    const float largest = fmaxf(maximum, next.maximum), reference = reference_of(largest);
    const float before = exp2_fast(maximum - reference);
    const float now = exp2_fast(next.maximum - reference);
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = fmaf(next.values[i], now, values[i] * before);
    weight = fmaf(next.weight, now, weight * before);
    maximum = largest;
  }

  // Writes `kSize` elements of the row's result, times the values' scale; zeros where no key was
  // seen, or only scores of -inf.
  template <typename T>
  __device__ __forceinline__ void store(T* out, bool aligned, float scale) const {
    const float inverse = weight == 0.0f ? 0.0f : scale / weight;
    struct alignas(kSize * sizeof(T)) Results {
      T values[kSize];
    } results;
#pragma unroll
    for (int i = 0; i < kSize; ++i) results.values[i] = from_float<T>(values[i] * inverse);
    if (aligned) {
      *reinterpret_cast<Results*>(out) = results;
    } else {
#pragma unroll
      for (int i = 0; i < kSize; ++i) out[i] = results.values[i];
    }
  }
};

// The address of a row in the workspace: values [num_partials, num_tokens, num_q_heads, head_dim],
// then (maximum, weight) of each.
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
__device__ __forceinline__ void load_partial_stats(const PartialAddress& from,
                                                   PartialRow<kSize>& row) {
  row.maximum = from.stats[0];
  row.weight = from.stats[1];
}

template <int kSize>
__device__ __forceinline__ void load_partial_values(const PartialAddress& from, int at,
                                                    PartialRow<kSize>& row) {
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    const Pack<float> pack = load16(from.values + at + i);
#pragma unroll
    for (int j = 0; j < 4; ++j) row.values[i + j] = pack.values[j];
  }
}

constexpr int kMergedSize =
    4;  // elements of a row that a thread merges, so that all threads have some

// Merges the partial results of a row's spans in the workspace, in ascending order. They are in the
// L2 cache: a whole batch is loaded before its first is merged, without a branch in between.
template <int kBatch>
__device__ __forceinline__ PartialRow<kMergedSize> merge_partials(
    const PagedAttentionParams& params, const AttentionPlan& plan, const TileRounds& rounds,
    int token, int head, int at) {
  constexpr int kSize = kMergedSize;
  const int begin = rounds.first_span(), end = rounds.end_span();
  const PartialAddress first = partial_address(params, plan, begin, token, head);
  const int64_t stride = params.num_tokens * params.num_q_heads;  // in rows
  PartialRow<kSize> total;
#pragma unroll 1
  for (int done = 0; done < end - begin; done += kBatch) {
    const auto address_of = [&](int i) {  // the last one again beyond the last one
      const int64_t rows = min(done + i, end - begin - 1) * stride;
      return PartialAddress{first.values + rows * params.head_dim, first.stats + rows * 2};
    };
    PartialRow<kSize> partials[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load_partial_stats(address_of(i), partials[i]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load_partial_values(address_of(i), at, partials[i]);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      PartialRow<kSize> merged = total;
      merged.merge(partials[i]);
      const bool counts = done + i < end - begin;
#pragma unroll
      for (int j = 0; j < kSize; ++j) total.values[j] = counts ? merged.values[j] : total.values[j];
      total.maximum = counts ? merged.maximum : total.maximum;
      total.weight = counts ? merged.weight : total.weight;
    }
  }
  return total;
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

}  // namespace eecore::cuda
