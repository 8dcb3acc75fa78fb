// How a paged_attention call is divided into work items, and whether sequences are split.
#pragma once

#include "position_bias.h"

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int64_t kMaxTileRows = 128;
constexpr int64_t kMaxTileGroups = 8;       // of rows, in matrix tiles
constexpr int64_t kTileFloats = 128 * 128;  // of a tile of queries
constexpr int64_t kBlockFloats = 64 * 128;  // of a block of keys

// A call with its plan. Split s holds the keys [s * split_size, (s + 1) * split_size).
struct AttentionPlan : PagedAttentionParams {
  // [num_tokens, num_q_heads, max_splits, partial_size]: weighted values, then the largest score
  // and the sum of weights; null: no sequence is spread over threads.
  float* partials;
  PositionBias bias;
  int64_t split_size, max_splits, partial_size;
  int64_t tile_rows;    // maximum rows (query, query head) of a work item
  int64_t tile_heads;   // maximum kv heads of a work item
  bool has_tiles;       // whether matrix tiles are used
  int64_t num_threads;  // that the work pays for
};

// The rows of a kv head as a thread holds them: for matrix tiles groups of up to 16, all of one
// size.
struct RowGroups {
  int64_t count, size;
  int64_t rows() const { return count * size; }
};
inline RowGroups groups_of(const AttentionPlan& plan, int64_t num_rows) {
  constexpr int64_t kMaxRows = 16;
  if (!plan.has_tiles || num_rows == 0) return {1, num_rows};
  const int64_t count = ceil_div(num_rows, kMaxRows);
  return {count, ceil_div(num_rows, count)};
}
// The maximum kv heads of a work item, given the rows of each.
inline int64_t most_heads(const AttentionPlan& plan, int64_t num_rows) {
  const RowGroups groups = groups_of(plan, num_rows);
  const int64_t fit = plan.tile_rows / max_of(groups.rows(), 1);
  return max_of(plan.has_tiles ? min_of(fit, kMaxTileGroups / groups.count) : fit, 1);
}

// The work, in (row, key) pairs, of one sequence and kv head, of its largest tile, and of the call.
struct AttentionWork {
  int64_t total = 0, largest_tile = 0, largest_tile_rows = 1, longest = 0;
};

inline AttentionWork measure_work(const AttentionPlan& plan) {
  AttentionWork work;
  const int64_t group_size = plan.num_q_heads / plan.num_kv_heads;
  for (int64_t seq = 0; seq < plan.num_seqs; ++seq) {
    const int64_t num_queries = plan.query_start_loc[seq + 1] - plan.query_start_loc[seq];
    const int64_t length = plan.seq_lens[seq];
    if (num_queries == 0) continue;
    int64_t keys = length;
    if (plan.sliding_window > 0) keys = min_of(keys, plan.sliding_window + num_queries);
    const int64_t rows = num_queries * group_size;
    const int64_t tile_rows = min_of(rows, plan.tile_rows);
    work.total += rows * keys * plan.num_kv_heads;
    work.longest = max_of(work.longest, length);
    if (tile_rows * keys > work.largest_tile) {
      work.largest_tile = tile_rows * keys;
      work.largest_tile_rows = tile_rows;
    }
  }
  return work;
}

// The plan of a call, without partials and the table of biases; max_splits is the number of
// partials that a row needs, or 0 where threads have whole rows. Keys are split before heads,
// because the heads of a slot are mostly adjacent. A fixed split size is kept, so that the call
// only decides which thread computes a split.
inline AttentionPlan plan_attention(const PagedAttentionParams& params, const Parallel& parallel,
                                    bool has_tiles) {
  constexpr int64_t kBytesPerMultiply = 2;  // bytes that could be read during one multiplication
  constexpr int64_t kMaxPerThread = 1
                                    << 16;  // multiplications that are worth waking another thread
  constexpr int64_t kItemsPerThread = 4;    // so that the last items even out
  constexpr int64_t kMinSplit = 256, kSplitStep = 64;  // keys
  constexpr int64_t kMaxPartials = 64 << 20;           // floats
  AttentionPlan plan{};
  static_cast<PagedAttentionParams&>(plan) = params;
  plan.bias = plan_position_bias(params);
  plan.has_tiles = has_tiles;
  const int64_t width = ceil_div(plan.head_dim, 32) * 32;
  plan.partial_size = width + 2;
  plan.tile_rows = min_of(has_tiles ? 64 : kMaxTileRows, kTileFloats / width);
  const AttentionWork work = measure_work(plan);
  const int64_t per_thread =
      min_of(parallel.bytes_per_range / kBytesPerMultiply + 1, kMaxPerThread);
  plan.num_threads =
      max_of(min_of(work.total * plan.head_dim / per_thread, parallel.num_threads), 1);

  const int64_t rows = work.largest_tile_rows;
  const int64_t wanted = max_of(work.total / (plan.num_threads * kItemsPerThread), 1);
  const int64_t heads = min_of(plan.num_kv_heads, most_heads(plan, rows));
  bool split = plan.num_threads > 1 && work.largest_tile * heads > 2 * wanted;
  plan.split_size = plan.fixed_split_size;
  if (plan.split_size == 0) {
    const int64_t keys = wanted / (rows * heads) / kSplitStep * kSplitStep;
    plan.split_size = split ? max_of(keys, kMinSplit) : INT32_MAX;
  }
  plan.max_splits = ceil_div(work.longest, plan.split_size);
  split = split &&
          plan.num_tokens * plan.num_q_heads * plan.max_splits * plan.partial_size <= kMaxPartials;
  plan.tile_heads = heads;
  if (split) {
    const int64_t keys = min_of(plan.split_size, work.longest);
    plan.tile_heads = max_of(min_of(wanted / (rows * keys), heads), 1);
  }
  if (!split || plan.max_splits == 1) plan.max_splits = 0;
  return plan;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
