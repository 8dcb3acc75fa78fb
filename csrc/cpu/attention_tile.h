// The parts of a work item of paged_attention: rows of one sequence, the keys that they see, and
// the thread's buffers for them; and the softmax of a row over a block of keys.
#pragma once

#include "activation.h"
#include "attention_plan.h"
#include "pair.h"
#include "scratch.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Keys of a block: it stays in cache together with the next block, which is being prefetched.
constexpr int64_t kMaxBlock = 32;
// Rows that share a key in registers; kPanelRows: where keys are laid out for many rows.
#if defined(__AVX512F__)
constexpr int kGroupRows = 4, kPanelRows = 6;
#elif defined(__AVX2__)
constexpr int kGroupRows = 3, kPanelRows = kGroupRows;
#else
constexpr int kGroupRows = 2, kPanelRows = kGroupRows;
#endif
constexpr float kInfinity = __builtin_inff();

// Keys [begin, end).
struct Range {
  int64_t begin, end;
  bool empty() const { return begin >= end; }
};

inline Range intersect(Range a, Range b) {
  return {max_of(a.begin, b.begin), min_of(a.end, b.end)};
}

struct Sequence {
  int64_t index, first_token, num_queries, length;
};

inline Sequence sequence_at(const AttentionPlan& params, int64_t index) {
  const int64_t first_token = params.query_start_loc[index];
  return {index, first_token, params.query_start_loc[index + 1] - first_token,
          params.seq_lens[index]};
}

// The position of a query; negative, before the first key, where a sequence has more queries than
// keys.
inline int64_t position_of(const Sequence& seq, int64_t query) {
  return seq.length - seq.num_queries + query;
}

// The keys that a query of a sequence sees.
inline Range visible_keys(const AttentionPlan& params, const Sequence& seq, int64_t query) {
  const int64_t position = position_of(seq, query);
  const int64_t end = params.causal ? position + 1 : seq.length;
  const int64_t begin = params.sliding_window > 0 ? position + 1 - params.sliding_window : 0;
  return {max_of(begin, 0), max_of(end, 0)};
}

// Rows of one sequence, for each of num_heads kv heads from first_head on: row r of a kv head is
// query (first_row + r) / group_size, head (first_row + r) % group_size of the group.
struct AttentionTile {
  Sequence seq;
  int64_t group_size, first_head, num_heads, first_row, num_rows;
  RowGroups groups;  // of a kv head's rows
  Range used;        // the keys that any of the rows sees

  int64_t query(int64_t row) const { return (first_row + row) / group_size; }
  // The index of a kv head's row in the thread's buffers.
  int64_t held(int64_t head, int64_t row) const { return head * groups.rows() + row; }
  int64_t num_held() const { return num_heads * groups.rows(); }
};

// A thread's buffers for a tile; the rows of one kv head follow those of another. With matrix tiles
// the rows of a head are padded to whole groups.
struct TileScratch {
  alignas(64) float q[kTileFloats];         // [rows, width], in the form that the blocks read
  alignas(64) float acc[kTileFloats];       // [rows, width]: weights times values
  alignas(64) float total[kTileFloats];     // the same, for the splits merged so far
  alignas(64) float k_block[kBlockFloats];  // [block, width], when gathered, or a panel
  alignas(64) float v_block[kBlockFloats];  // [block, width], when gathered
  alignas(64) uint8_t k_widened[kBlockFloats * sizeof(float)];  // [block, width], of float8
  alignas(64) uint8_t v_widened[kBlockFloats * sizeof(float)];  // [block, width], of float8
  alignas(64) float scores[kMaxTileRows * kMaxBlock];           // [rows, block], or of one group
  alignas(64) float corrections[kMaxTileRows * kWidth];         // factors of the rows' sums so far
#if defined(__AVX512BF16__)
  alignas(64) uint32_t q_pairs[kTileFloats / 2];  // [rows, width / 2], of pairs of bfloat16
  alignas(64) uint32_t k_pairs[kMaxAttentionHeadDim / 2 * kMaxBlock];
  alignas(64) uint32_t v_pairs[kMaxBlock / 2 * kMaxAttentionHeadDim];
  alignas(64) uint32_t weight_pairs[kGroupRows * kMaxBlock / 2];
  // For matrix tiles. Queries of each group: [pairs of columns, 16 rows]; scores of each: [block,
  // 16 rows]; weights: [rows, pairs of keys].
  alignas(64) uint32_t q_turned[kMaxTileGroups * kMaxAttentionHeadDim / 2 * 16];
  alignas(64) float turned_scores[kMaxTileGroups * kMaxBlock * 16];
  alignas(64) uint32_t tile_weights[kMaxTileRows * kMaxBlock / 2];
  alignas(64) float part[16 * kMaxAttentionHeadDim];
  uint32_t seen[kMaxTileRows];  // one bit per key of a block, [rows of one kv head]
#endif
  alignas(64) float weight_sum[kMaxTileRows * kWidth];
  float maximum[kMaxTileRows];
  float total_maximum[kMaxTileRows], total_weight[kMaxTileRows];
  Range visible[kMaxTileRows];          // [rows of one kv head]
  int64_t position[kMaxTileRows];       // [rows of one kv head]
  PositionBias bias;                    // of the call
  float soft_cap;                       // of the call; 0: none
  const float* bias_row[kMaxTileRows];  // where there is a bias
};

// The addresses of the rows of a block's keys and values, for the first kv head of the tile.
template <typename T>
struct BlockRows {
  const T* k[kMaxBlock];
  const T* v[kMaxBlock];
};

// The keys or values of a block for one kv head: pointers to rows, and an offset into each. Null:
// no block.
template <typename T>
struct HeadRows {
  const T* const* rows;
  int64_t offset;

  const T* operator[](int64_t j) const { return rows[j] + offset; }
};

// A block for one kv head.
template <typename T>
struct HeadBlock {
  HeadRows<T> k, v;

  bool exists() const { return k.rows != nullptr; }
};

// Floats between the rows of a tile: whole pairs of vectors.
inline int64_t row_width(int64_t head_dim) { return ceil_div(head_dim, 32) * 32; }

// Keys per block: a block of float32 keys fits in the scratch.
inline int64_t block_size(int64_t head_dim) {
  return min_of(kMaxBlock, kBlockFloats / row_width(head_dim) / 16 * 16);
}

// The value that scores are relative to: the largest so far; 0 for rows that have only -inf.
inline float base_of(float maximum) { return maximum == -kInfinity ? 0.0f : maximum; }

// Turns the scores of some rows into weights relative to each row's new maximum; corrections: the
// factors of the rows' earlier weights. A score of NaN is never the maximum; its weight is NaN.
template <int kRows>
void softmax_rows(float* scores, int64_t begin, int64_t end, float* maximum, float* weight_sums,
                  Vec* corrections) {
  float largest[kRows];
  bool is_larger = false;
  EECORE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    const float* row = scores + r * kMaxBlock;
    Vec of_row = load(row + begin);
    for (int64_t j = begin + kWidth; j < end; j += kWidth) of_row = max(of_row, load(row + j));
    largest[r] = max_element(max(broadcast(-kInfinity), of_row));
    is_larger = is_larger || largest[r] > maximum[r];
    corrections[r] = broadcast(1.0f);
  }
  for (int r = 0; is_larger && r < kRows; ++r) {
    if (!(largest[r] > maximum[r])) continue;
    corrections[r] = exp_at_most_one(broadcast(maximum[r] - largest[r]));
    maximum[r] = largest[r];
  }
  Vec sums[kRows];
  EECORE_UNROLL
  for (int r = 0; r < kRows; ++r) sums[r] = load(weight_sums + r * kWidth) * corrections[r];
  for (int64_t j = begin; j < end; j += kWidth) {
    EECORE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      float* at = scores + r * kMaxBlock + j;
      const Vec weight = exp_at_most_one(load(at) - broadcast(base_of(maximum[r])));
      store(at, weight);
      sums[r] = sums[r] + weight;
    }
  }
  EECORE_UNROLL
  for (int r = 0; r < kRows; ++r) store(weight_sums + r * kWidth, sums[r]);
}

// The functions below take a block of keys for the rows of one kv head. Its score<kRows> writes the
// scores of the keys `seen` and possibly their neighbours; weigh<kRows> is called once they are
// weights; add<kRows> sums acc[d] = acc[d] * correction + weight * value[d] over some keys for
// kRows rows, and may handle keys together where the range begins and ends at multiples of kStep.
// quiet() is the same block without prefetching.

// The keys of a block, counted from its first, that each of some rows sees, that any of them sees,
// and that all of them see.
template <int kRows>
struct SeenKeys {
  Range of_row[kRows], any, all;
};

// The keys that rows of a kv head see, from `row` on.
template <int kRows>
SeenKeys<kRows> seen_keys(const TileScratch& scratch, int64_t row, Range keys) {
  const int64_t num_keys = keys.end - keys.begin;
  SeenKeys<kRows> seen;
  seen.any = {num_keys, 0};
  seen.all = {0, num_keys};
  for (int r = 0; r < kRows; ++r) {
    const Range of_row = intersect(scratch.visible[row + r], keys);
    seen.of_row[r] =
        of_row.empty() ? Range{0, 0} : Range{of_row.begin - keys.begin, of_row.end - keys.begin};
    seen.all = intersect(seen.all, seen.of_row[r]);
    if (of_row.empty()) continue;
    seen.any = {min_of(seen.any.begin, seen.of_row[r].begin),
                max_of(seen.any.end, seen.of_row[r].end)};
  }
  return seen;
}

// Turns the scores [begin, end) of some rows, whole vectors, into weights.
template <int kRows>
void weigh_rows(TileScratch& scratch, int64_t row, int64_t at, Range keys,
                const SeenKeys<kRows>& seen, int64_t begin, int64_t end, float* scores,
                Vec* correction) {
  for (int r = 0; r < kRows; ++r) {
    float* of_row = scores + r * kMaxBlock;
    if (scratch.bias.data != nullptr) {
      scratch.bias.add(scratch.bias_row[at + r], keys.begin - scratch.position[row + r], begin, end,
                       of_row);
    }
    if (scratch.soft_cap > 0.0f) {
      for (int64_t i = begin; i < end; i += kWidth) {
        store(of_row + i, soft_capped(load(of_row + i), scratch.soft_cap));
      }
    }
    for (int64_t i = begin; i < min_of(seen.of_row[r].begin, end); ++i) of_row[i] = -kInfinity;
    for (int64_t i = max_of(seen.of_row[r].end, begin); i < end; ++i) of_row[i] = -kInfinity;
  }
  softmax_rows<kRows>(scores, begin, end, scratch.maximum + at, scratch.weight_sum + at * kWidth,
                      correction);
}

// Adds what some rows see of a block. Keys that not all of the rows see are added row by row: a
// weight of 0 does not cancel a value of NaN.
template <int kRows, typename Block>
void add_values_seen(TileScratch& scratch, const Block& block, const Vec* correction,
                     const SeenKeys<kRows>& seen, int64_t head_dim, float* acc) {
  if (seen.all.begin == seen.any.begin && seen.all.end == seen.any.end) [[likely]] {
    return block.template add<kRows>(scratch, 0, seen.any, correction, head_dim, acc);
  }
  const int64_t width = row_width(head_dim);
  const auto add_row = [&](int r, Vec factor, Range keys) {
    block.quiet().template add<1>(scratch, r, keys, &factor, head_dim, acc + r * width);
  };
  const Range shared = {ceil_div(seen.all.begin, Block::kStep) * Block::kStep,
                        seen.all.end / Block::kStep * Block::kStep};
  if (shared.empty()) {
    for (int r = 0; r < kRows; ++r) add_row(r, correction[r], seen.of_row[r]);
    return;
  }
  const Vec one = broadcast(1.0f);
  Vec factors[kRows];
  for (int r = 0; r < kRows; ++r) {
    const bool sees_earlier = seen.of_row[r].begin < shared.begin;
    if (sees_earlier) add_row(r, correction[r], {seen.of_row[r].begin, shared.begin});
    factors[r] = sees_earlier ? one : correction[r];
  }
  block.template add<kRows>(scratch, 0, shared, factors, head_dim, acc);
  for (int r = 0; r < kRows; ++r) {
    if (shared.end < seen.of_row[r].end) add_row(r, one, {shared.end, seen.of_row[r].end});
  }
}

// Processes a block of keys for kRows rows of one kv head: rows `row`.. of the head, `at`.. of the
// scratch.
template <int kRows, typename Block>
void attend_rows(TileScratch& scratch, int64_t row, int64_t at, int64_t head_dim, Range keys,
                 const Block& block) {
  const SeenKeys<kRows> seen = seen_keys<kRows>(scratch, row, keys);
  if (seen.any.empty()) return;
  // Scores start at a whole vector.
  const int64_t begin = seen.any.begin / kWidth * kWidth;
  const int64_t end = ceil_div(seen.any.end, kWidth) * kWidth;
  block.template score<kRows>(scratch, at, {begin, seen.any.end}, head_dim);
  Vec correction[kRows];
  weigh_rows<kRows>(scratch, row, at, keys, seen, begin, end, scratch.scores, correction);
  block.template weigh<kRows>(scratch);
  add_values_seen<kRows>(scratch, block, correction, seen, head_dim,
                         scratch.acc + at * row_width(head_dim));
}

// Calls body<n>(row) for all rows of one kv head: kRows at a time while there are enough, then
// fewer.
template <int kRows, typename Body>
void in_groups(int64_t num_rows, const Body& body) {
  const auto rows = [&]<int kSome>(int64_t row, const auto& fewer) {
    for (; row + kSome <= num_rows; row += kSome) body.template operator()<kSome>(row);
    if constexpr (kSome > 1) fewer.template operator()<kSome - 1>(row, fewer);
  };
  rows.template operator()<kRows>(0, rows);
}

// Processes all rows of one kv head, kRows at a time; the first of them prefetch the next block.
template <int kRows, typename Block>
void attend_head(TileScratch& scratch, int64_t num_rows, int64_t at, int64_t head_dim, Range keys,
                 Block block) {
  in_groups<kRows>(num_rows, [&]<int kSome>(int64_t row) {
    attend_rows<kSome>(scratch, row, at + row, head_dim, keys, block);
    block = block.quiet();
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
