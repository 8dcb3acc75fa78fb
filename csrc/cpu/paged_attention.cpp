// paged_attention on the CPU: a work item holds the rows (query, head of the group) of one sequence
// that share a kv head, and walks the keys in blocks with an online softmax in float32. Threads
// take items from one list; the splits of a sequence spread over threads are merged in a second
// pass.
//
// A row's arithmetic depends on its own keys and split_size alone: blocks start at multiples of the
// block size within a split, every score is summed in one order whatever the tile, and values that
// only a neighbour sees are not added. What is not a number comes out as of softmax(q k) v: in the
// whole row where it is in the query or in a key that the row sees, in its column where in a value.
#include "attention_plan.h"
#include "pair.h"
#include "scratch.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int64_t kMaxHeadDim = 256;
// Keys of a block: those of one, and of the next that is being prefetched, stay in cache.
constexpr int64_t kMaxBlock = 32;
#if defined(__AVX512F__)
constexpr int kGroupRows = 4;  // rows that share a key in registers
#else
constexpr int kGroupRows = 2;
#endif
constexpr int kGroupKeys = 4;   // keys that share a query in registers
constexpr int kGroupPairs = 2;  // pairs of vectors of a value row
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

// Before the first key, and negative, where a sequence has more queries than keys.
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
struct Tile {
  Sequence seq;
  int64_t group_size, first_head, num_heads, first_row, num_rows;
  Range used;  // the keys that any of the rows sees

  int64_t query(int64_t row) const { return (first_row + row) / group_size; }
};

// What a thread holds of a tile, the rows of one kv head after those of another.
struct TileScratch {
  alignas(64) float q[kTileFloats];                  // [rows, width], times scale
  alignas(64) float acc[kTileFloats];                // [rows, width]: weights times values
  alignas(64) float total[kTileFloats];              // the same, of the splits merged so far
  alignas(64) float k_block[kTileFloats];            // [block, width], when gathered
  alignas(64) float v_block[kTileFloats];            // [block, width], when gathered
  alignas(64) float scores[kGroupRows * kMaxBlock];  // [rows of a group, block]
  alignas(64) float weight_sum[kMaxTileRows * kWidth];
  float maximum[kMaxTileRows];
  float total_maximum[kMaxTileRows], total_weight[kMaxTileRows];
  Range visible[kMaxTileRows];          // [rows of one kv head]
  int64_t position[kMaxTileRows];       // [rows of one kv head]
  PositionBias bias;                    // of the call
  const float* bias_row[kMaxTileRows];  // where there is one
};

// Where the rows of a block's keys and values lie, for the first kv head of the tile.
template <typename T>
struct BlockRows {
  const T* k[kMaxBlock];
  const T* v[kMaxBlock];
};

// A block as one kv head sees it: `offset` elements into each row. Null rows: no block.
template <typename T>
struct HeadBlock {
  const BlockRows<T>* rows;
  int64_t offset;
};

// Floats between the rows of a tile: whole pairs of vectors.
inline int64_t row_width(int64_t head_dim) { return ceil_div(head_dim, 32) * 32; }

// Keys per block: a block of float32 keys fits the scratch.
inline int64_t block_size(int64_t head_dim) {
  return min_of(kMaxBlock, kTileFloats / row_width(head_dim) / 16 * 16);
}

// in[0..n) times factor, as kept pairs; the rest of the row is zero.
template <typename T>
inline void widen_row(const T* in, int64_t n, Vec factor, int64_t width, float* out) {
  int64_t d = 0;
  for (; d + kPairWidth <= n; d += kPairWidth) store_kept(out + d, load_pair(in + d) * factor);
  if (d < n) {
    store_kept(out + d, load_pair_partial(in + d, n - d) * factor);
    d += kPairWidth;
  }
  for (; d < width; d += kPairWidth) store_kept(out + d, {zero(), zero()});
}

// Asks for n elements of a row that is read next. Pages lie anywhere, and a head's slots a row of
// all heads apart, so the hardware does not guess them.
template <typename T>
inline void prefetch_row(const T* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) {
    __builtin_prefetch(row + i);
  }
}

// scores[r][j] = q[r] . k[j] for j in [begin, end), both multiples of kGroupKeys.
template <int kRows, typename T>
void score_keys(const float* q, int64_t width, int64_t head_dim, HeadBlock<T> block,
                HeadBlock<T> next, int64_t begin, int64_t end, float* scores) {
  const int64_t whole = head_dim / kPairWidth * kPairWidth;
  for (int64_t j = begin; j < end; j += kGroupKeys) {
    if (next.rows != nullptr) {
      for (int i = 0; i < kGroupKeys; ++i) {
        prefetch_row(next.rows->k[j + i] + next.offset, head_dim);
      }
    }
    const T* k[kGroupKeys];
    for (int i = 0; i < kGroupKeys; ++i) k[i] = block.rows->k[j + i] + block.offset;
    Vec dots[kRows][kGroupKeys];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kGroupKeys; ++i) dots[r][i] = zero();
    }
    const auto multiply = [&](const Pair* keys, int64_t d) {
      for (int r = 0; r < kRows; ++r) {
        const Vec query = load(q + r * width + d);
        for (int i = 0; i < kGroupKeys; ++i) dots[r][i] = fma(query, keys[i].a, dots[r][i]);
      }
      for (int r = 0; r < kRows; ++r) {
        const Vec query = load(q + r * width + d + kWidth);
        for (int i = 0; i < kGroupKeys; ++i) dots[r][i] = fma(query, keys[i].b, dots[r][i]);
      }
    };
    Pair keys[kGroupKeys];
    for (int64_t d = 0; d < whole; d += kPairWidth) {
      for (int i = 0; i < kGroupKeys; ++i) keys[i] = load_pair(k[i] + d);
      multiply(keys, d);
    }
    if (whole < head_dim) {
      for (int i = 0; i < kGroupKeys; ++i) {
        keys[i] = load_pair_partial(k[i] + whole, head_dim - whole);
      }
      multiply(keys, whole);
    }
    for (int r = 0; r < kRows; ++r) sum_four(dots[r], scores + r * kMaxBlock + j);
  }
}

// acc[r][d..] = acc[r][d..] * correction[r] + sum over j in [begin, end) of scores[r][j] *
// v[j][d..], for kPairs pairs of vectors; of a partial one only `rest` elements exist in v.
template <int kRows, int kPairs, bool kPartial, typename T>
void add_value_columns(const float* scores, const Vec* correction, HeadBlock<T> block,
                       HeadBlock<T> next, int64_t d, int64_t rest, int64_t begin, int64_t end,
                       int64_t width, float* acc) {
  Pair sums[kRows][kPairs];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kPairs; ++i) {
      sums[r][i] = load_kept(acc + r * width + d + i * kPairWidth) * correction[r];
    }
  }
  for (int64_t j = begin; j < end; ++j) {
    if (next.rows != nullptr) {
      prefetch_row(next.rows->v[j] + next.offset + d, kPairs * kPairWidth);
    }
    const T* v = block.rows->v[j] + block.offset + d;
    Pair values[kPairs];
    for (int i = 0; i < kPairs; ++i) {
      values[i] =
          kPartial ? load_pair_partial(v + i * kPairWidth, rest) : load_pair(v + i * kPairWidth);
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = broadcast(scores[r * kMaxBlock + j]);
      for (int i = 0; i < kPairs; ++i) {
        sums[r][i] = {fma(weight, values[i].a, sums[r][i].a),
                      fma(weight, values[i].b, sums[r][i].b)};
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kPairs; ++i) store_kept(acc + r * width + d + i * kPairWidth, sums[r][i]);
  }
}

template <int kRows, typename T>
void add_values(const float* scores, const Vec* correction, HeadBlock<T> block, HeadBlock<T> next,
                int64_t head_dim, int64_t begin, int64_t end, int64_t width, float* acc) {
  const auto columns = [&]<int kPairs, bool kPartial>(int64_t d, int64_t rest) {
    add_value_columns<kRows, kPairs, kPartial>(scores, correction, block, next, d, rest, begin, end,
                                               width, acc);
  };
  int64_t d = 0;
  for (; d + kGroupPairs * kPairWidth <= head_dim; d += kGroupPairs * kPairWidth) {
    columns.template operator()<kGroupPairs, false>(d, 0);
  }
  for (; d + kPairWidth <= head_dim; d += kPairWidth) columns.template operator()<1, false>(d, 0);
  if (d < head_dim) columns.template operator()<1, true>(d, head_dim - d);
}

// What scores are taken relative to: the largest so far, of rows without one 0 and not -inf.
inline float base_of(float maximum) { return maximum == -kInfinity ? 0.0f : maximum; }

// Turns a row's scores into weights relative to its new maximum; returns what its earlier weights
// are to be multiplied by. A score of NaN is never the maximum, and its weight is NaN.
inline Vec softmax_row(float* scores, int64_t begin, int64_t end, float* maximum,
                       float* weight_sum) {
  Vec largest = broadcast(-kInfinity);
  for (int64_t j = begin; j < end; j += kWidth) largest = max(largest, load(scores + j));
  const float block_maximum = max_element(largest);
  const float new_maximum = block_maximum > *maximum ? block_maximum : *maximum;
  const float base = base_of(new_maximum);
  const Vec correction = exp(broadcast(*maximum - base));
  Vec weights = load(weight_sum) * correction;
  for (int64_t j = begin; j < end; j += kWidth) {
    const Vec weight = exp(load(scores + j) - broadcast(base));
    store(scores + j, weight);
    weights = weights + weight;
  }
  store(weight_sum, weights);
  *maximum = new_maximum;
  return correction;
}

// add_values for rows of which row r sees the keys visible[r] of the block, and all see `shared`.
// What not all of them see is added row by row: a weight of 0 does not undo a value of NaN.
template <int kRows, typename T>
void add_values_seen(const float* scores, const Vec* correction, HeadBlock<T> block,
                     HeadBlock<T> next, int64_t head_dim, const Range* visible, Range shared,
                     int64_t width, float* acc) {
  const auto add_row = [&](int r, Vec factor, int64_t begin, int64_t end) {
    add_values<1>(scores + r * kMaxBlock, &factor, block, HeadBlock<T>{nullptr, 0}, head_dim, begin,
                  end, width, acc + r * width);
  };
  if (shared.empty()) {
    for (int r = 0; r < kRows; ++r) add_row(r, correction[r], visible[r].begin, visible[r].end);
    return;
  }
  const Vec one = broadcast(1.0f);
  Vec factors[kRows];
  for (int r = 0; r < kRows; ++r) {
    const bool sees_earlier = visible[r].begin < shared.begin;
    if (sees_earlier) add_row(r, correction[r], visible[r].begin, shared.begin);
    factors[r] = sees_earlier ? one : correction[r];
  }
  add_values<kRows>(scores, factors, block, next, head_dim, shared.begin, shared.end, width, acc);
  for (int r = 0; r < kRows; ++r) {
    if (shared.end < visible[r].end) add_row(r, one, shared.end, visible[r].end);
  }
}

// One block of keys for kRows rows of one kv head: rows `row`.. of the head, `at`.. of the scratch.
template <int kRows, typename T>
void attend_rows(TileScratch& scratch, int64_t row, int64_t at, int64_t head_dim, Range keys,
                 HeadBlock<T> block, HeadBlock<T> next) {
  // The keys of this block, counted from its first, that each row sees, any row sees, all rows see.
  const int64_t num_keys = keys.end - keys.begin;
  Range visible[kRows], seen{num_keys, 0}, shared{0, num_keys};
  for (int r = 0; r < kRows; ++r) {
    const Range of_row = intersect(scratch.visible[row + r], keys);
    visible[r] =
        of_row.empty() ? Range{0, 0} : Range{of_row.begin - keys.begin, of_row.end - keys.begin};
    shared = intersect(shared, visible[r]);
    if (of_row.empty()) continue;
    seen = {min_of(seen.begin, visible[r].begin), max_of(seen.end, visible[r].end)};
  }
  if (seen.empty()) return;
  const int64_t width = row_width(head_dim);
  // Scores start at a whole vector.
  const int64_t vector_begin = seen.begin / kWidth * kWidth;
  const int64_t vector_end = ceil_div(seen.end, kWidth) * kWidth;

  score_keys<kRows>(scratch.q + at * width, width, head_dim, block, next, vector_begin,
                    ceil_div(seen.end, kGroupKeys) * kGroupKeys, scratch.scores);
  Vec correction[kRows];
  for (int r = 0; r < kRows; ++r) {
    float* scores = scratch.scores + r * kMaxBlock;
    if (scratch.bias.data != nullptr) {
      scratch.bias.add(scratch.bias_row[at + r], keys.begin - scratch.position[row + r],
                       vector_begin, vector_end, scores);
    }
    for (int64_t i = vector_begin; i < min_of(visible[r].begin, vector_end); ++i) {
      scores[i] = -kInfinity;
    }
    for (int64_t i = max_of(visible[r].end, vector_begin); i < vector_end; ++i) {
      scores[i] = -kInfinity;
    }
    correction[r] = softmax_row(scores, vector_begin, vector_end, &scratch.maximum[at + r],
                                scratch.weight_sum + (at + r) * kWidth);
  }
  float* acc = scratch.acc + at * width;
  if (shared.begin == seen.begin && shared.end == seen.end) [[likely]] {
    add_values<kRows>(scratch.scores, correction, block, next, head_dim, seen.begin, seen.end,
                      width, acc);
  } else {
    add_values_seen<kRows>(scratch.scores, correction, block, next, head_dim, visible, shared,
                           width, acc);
  }
}

// All rows of one kv head; the first of them ask for the next block.
template <typename T>
void attend_head(TileScratch& scratch, int64_t num_rows, int64_t at, int64_t head_dim, Range keys,
                 HeadBlock<T> block, HeadBlock<T> next) {
  const auto rows = [&]<int kRows>(int64_t row) {
    attend_rows<kRows>(scratch, row, at + row, head_dim, keys, block, next);
    next.rows = nullptr;
  };
  int64_t row = 0;
  for (; row + kGroupRows <= num_rows; row += kGroupRows) rows.template operator()<kGroupRows>(row);
  const int64_t rest = num_rows - row;
  if (kGroupRows > 3 && rest == 3) rows.template operator()<3>(row);
  if (kGroupRows > 2 && rest == 2) rows.template operator()<2>(row);
  if (rest == 1) rows.template operator()<1>(row);
}

// Where the keys and values of a block lie. Of its slots those outside `used` may belong to no one:
// the nearest used key stands in for them.
template <typename T>
void locate_block(const AttentionPlan& params, const Tile& tile, Range keys, Range used,
                  BlockRows<T>& rows) {
  const int32_t* page_table = params.page_table + tile.seq.index * params.page_table_stride;
  const T* k_cache = static_cast<const T*>(params.k_cache) + tile.first_head * params.head_dim;
  const T* v_cache = static_cast<const T*>(params.v_cache) + tile.first_head * params.head_dim;
  used = intersect(used, keys);
  const int64_t first = used.begin - keys.begin, end = used.end - keys.begin;
  int64_t page_index = used.begin / params.page_size;
  int64_t offset = used.begin - page_index * params.page_size;
  for (int64_t j = first; j < end; ++page_index, offset = 0) {
    const int64_t page = page_table[page_index];
    const T* k_slot = k_cache + page * params.k_page_stride + offset * params.k_slot_stride;
    const T* v_slot = v_cache + page * params.v_page_stride + offset * params.v_slot_stride;
    const int64_t page_end = min_of(end, j + params.page_size - offset);
    for (; j < page_end; ++j, k_slot += params.k_slot_stride, v_slot += params.v_slot_stride) {
      rows.k[j] = k_slot;
      rows.v[j] = v_slot;
    }
  }
  for (int64_t j = 0; j < first; ++j) {
    rows.k[j] = rows.k[first];
    rows.v[j] = rows.v[first];
  }
  for (int64_t j = end; j < kMaxBlock; ++j) {
    rows.k[j] = rows.k[end - 1];
    rows.v[j] = rows.v[end - 1];
  }
}

// Whether many rows share a block, so that it pays to lay it out as consecutive float32 rows first:
// bfloat16 is widened once, and slots a power of two apart no longer fall into the same cache sets.
inline bool gathers_block(int64_t num_rows) { return num_rows > 2 * kGroupRows; }

template <typename T>
void gather_block(HeadBlock<T> block, int64_t num_keys, int64_t head_dim, TileScratch& scratch,
                  BlockRows<float>& gathered) {
  const int64_t width = row_width(head_dim);
  const Vec one = broadcast(1.0f);
  for (int64_t j = 0; j < num_keys; ++j) {
    float* k = scratch.k_block + j * width;
    float* v = scratch.v_block + j * width;
    widen_row(block.rows->k[j] + block.offset, head_dim, one, width, k);
    widen_row(block.rows->v[j] + block.offset, head_dim, one, width, v);
    gathered.k[j] = k;
    gathered.v[j] = v;
  }
}

// Adds the keys of one split to the rows' maximum, weight_sum and acc, which it sets up.
template <typename T>
void attend_split(const AttentionPlan& params, const Tile& tile, Range split,
                  TileScratch& scratch) {
  const int64_t head_dim = params.head_dim, width = row_width(head_dim);
  const int64_t block_keys = block_size(head_dim);
  const int64_t num_rows = tile.num_heads * tile.num_rows;
  for (int64_t row = 0; row < num_rows; ++row) {
    scratch.maximum[row] = -kInfinity;
    store(scratch.weight_sum + row * kWidth, zero());
  }
  for (int64_t i = 0; i < num_rows * width; i += kWidth) store(scratch.acc + i, zero());

  // Whole blocks counted from the split's first key, from the one with the first key in use.
  const Range used = intersect(tile.used, split);
  const auto block_at = [&](int64_t key) { return Range{key, min_of(key + block_keys, used.end)}; };
  int64_t key = split.begin + (used.begin - split.begin) / block_keys * block_keys;
  BlockRows<T> rows[2];
  locate_block(params, tile, block_at(key), used, rows[0]);
  for (int current = 0; key < used.end; key += block_keys, current ^= 1) {
    const Range keys = block_at(key);
    const bool last = keys.end == used.end;
    if (!last) locate_block(params, tile, block_at(keys.end), used, rows[current ^ 1]);

    // Head by head within a block, so that memory is read in its own order.
    for (int64_t head = 0; head < tile.num_heads; ++head) {
      const HeadBlock<T> block = {&rows[current], head * head_dim};
      HeadBlock<T> next = {&rows[current], (head + 1) * head_dim};
      if (head + 1 == tile.num_heads) next = {last ? nullptr : &rows[current ^ 1], 0};
      const int64_t at = head * tile.num_rows;
      if (gathers_block(tile.num_rows)) {
        BlockRows<float> gathered;
        const int64_t num_keys = ceil_div(keys.end - keys.begin, kGroupKeys) * kGroupKeys;
        gather_block(block, num_keys, head_dim, scratch, gathered);
        // A gathered row is made of whole pairs.
        attend_head<float>(scratch, tile.num_rows, at, ceil_div(head_dim, kPairWidth) * kPairWidth,
                           keys, {&gathered, 0}, {nullptr, 0});
      } else {
        attend_head(scratch, tile.num_rows, at, head_dim, keys, block, next);
      }
    }
  }
}

// Adds one split's (acc, maximum, weight) to the total of the splits before it. Splits are always
// merged in ascending order, so the result does not depend on who computed them.
inline void merge_split(const float* acc, float maximum, float weight, int64_t width, float* total,
                        float* total_maximum, float* total_weight) {
  const float new_maximum = maximum > *total_maximum ? maximum : *total_maximum;
  const float base = base_of(new_maximum);
  const Vec before = exp(broadcast(*total_maximum - base));
  const Vec now = exp(broadcast(maximum - base));
  for (int64_t d = 0; d < width; d += kWidth) {
    store(total + d, fma(load(acc + d), now, load(total + d) * before));
  }
  float factors[2][kWidth];
  store(factors[0], before);
  store(factors[1], now);
  *total_weight = *total_weight * factors[0][0] + weight * factors[1][0];
  *total_maximum = new_maximum;
}

// out = total / weight; zeros for a row that saw no key, or nothing but scores of -inf.
template <typename T>
void write_row(const float* total, float weight, int64_t head_dim, T* out) {
  const Vec inverse = broadcast(weight == 0.0f ? 0.0f : 1.0f / weight);
  int64_t d = 0;
  for (; d + kPairWidth <= head_dim; d += kPairWidth) {
    store_pair(out + d, load_kept(total + d) * inverse);
  }
  if (d < head_dim) store_pair_partial(out + d, load_kept(total + d) * inverse, head_dim - d);
}

inline float* partial_of(const AttentionPlan& params, int64_t token, int64_t head, int64_t split) {
  return params.partials +
         ((token * params.num_q_heads + head) * params.max_splits + split) * params.partial_size;
}

template <typename T>
T* out_row(const AttentionPlan& params, int64_t token, int64_t head) {
  return static_cast<T*>(params.out) + token * params.out_token_stride +
         head * params.out_head_stride;
}

// The splits that hold any of `keys`, as a range.
inline Range splits_of(const AttentionPlan& params, Range keys) {
  if (keys.empty()) return {0, 0};
  return {keys.begin / params.split_size, ceil_div(keys.end, params.split_size)};
}

inline Range keys_of_split(const AttentionPlan& params, int64_t split) {
  return {split * params.split_size, (split + 1) * params.split_size};
}

// One work item: a tile with one split, written to `partials`, or with all of them, written to out.
template <typename T>
void attend_tile(const AttentionPlan& params, const Tile& tile, int64_t only_split,
                 TileScratch& scratch) {
  const int64_t head_dim = params.head_dim, width = row_width(head_dim);
  const int64_t num_rows = tile.num_heads * tile.num_rows;
  const auto token_of = [&](int64_t at) {
    return tile.seq.first_token + tile.query(at % tile.num_rows);
  };
  const auto head_of = [&](int64_t at) {
    return (tile.first_head + at / tile.num_rows) * tile.group_size +
           (tile.first_row + at % tile.num_rows) % tile.group_size;
  };

  // Queries times scale, and what each of them sees.
  for (int64_t at = 0; at < num_rows; ++at) {
    const T* q = static_cast<const T*>(params.q) + token_of(at) * params.q_token_stride +
                 head_of(at) * params.q_head_stride;
    widen_row(q, head_dim, broadcast(params.scale), width, scratch.q + at * width);
  }
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    scratch.visible[row] = visible_keys(params, tile.seq, tile.query(row));
    scratch.position[row] = position_of(tile.seq, tile.query(row));
  }
  scratch.bias = params.bias;
  for (int64_t at = 0; params.bias.data != nullptr && at < num_rows; ++at) {
    scratch.bias_row[at] = params.bias.row(head_of(at));
  }

  const Range splits = splits_of(params, tile.used);
  if (params.partials != nullptr) {
    if (only_split < splits.begin || only_split >= splits.end) return;
    attend_split<T>(params, tile, keys_of_split(params, only_split), scratch);
    for (int64_t at = 0; at < num_rows; ++at) {
      float* partial = partial_of(params, token_of(at), head_of(at), only_split);
      __builtin_memcpy(partial, scratch.acc + at * width, width * sizeof(float));
      partial[width] = scratch.maximum[at];
      partial[width + 1] = sum(load(scratch.weight_sum + at * kWidth));
    }
    return;
  }
  for (int64_t at = 0; at < num_rows; ++at) {
    scratch.total_maximum[at] = -kInfinity;
    scratch.total_weight[at] = 0.0f;
  }
  for (int64_t i = 0; i < num_rows * width; i += kWidth) store(scratch.total + i, zero());
  for (int64_t split = splits.begin; split < splits.end; ++split) {
    attend_split<T>(params, tile, keys_of_split(params, split), scratch);
    for (int64_t at = 0; at < num_rows; ++at) {
      merge_split(scratch.acc + at * width, scratch.maximum[at],
                  sum(load(scratch.weight_sum + at * kWidth)), width, scratch.total + at * width,
                  &scratch.total_maximum[at], &scratch.total_weight[at]);
    }
  }
  for (int64_t at = 0; at < num_rows; ++at) {
    write_row(scratch.total + at * width, scratch.total_weight[at], head_dim,
              out_row<T>(params, token_of(at), head_of(at)));
  }
}

// The keys that any of the queries [first, last] of a sequence sees.
inline Range keys_of_queries(const AttentionPlan& params, const Sequence& seq, int64_t first,
                             int64_t last) {
  return {visible_keys(params, seq, first).begin, visible_keys(params, seq, last).end};
}

// The work items of one sequence: splits, then kv heads, then tiles, so that the tiles of a head
// find its keys in cache. When all queries fit a tile it takes several kv heads.
struct SequenceItems {
  Sequence seq;
  int64_t group_size, num_tiles, tile_heads, num_head_groups, num_splits, first_split;

  SequenceItems(const AttentionPlan& params, int64_t index)
      : seq(sequence_at(params, index)), group_size(params.num_q_heads / params.num_kv_heads) {
    const int64_t rows = seq.num_queries * group_size;
    num_tiles = ceil_div(rows, params.tile_rows);
    tile_heads = rows == 0 ? 1 : max_of(min_of(params.tile_rows / rows, params.tile_heads), 1);
    num_head_groups = ceil_div(params.num_kv_heads, tile_heads);
    Range splits = {0, 1};
    if (params.partials != nullptr && seq.num_queries > 0) {
      splits = splits_of(params, keys_of_queries(params, seq, 0, seq.num_queries - 1));
    }
    first_split = splits.begin;
    num_splits = splits.end - splits.begin;
  }
  int64_t count() const { return num_splits * num_head_groups * num_tiles; }
};

template <typename T>
void run_item(const AttentionPlan& params, const SequenceItems& items, int64_t item,
              TileScratch& scratch) {
  const int64_t head_group = item / items.num_tiles % items.num_head_groups;
  const int64_t split = items.first_split + item / items.num_tiles / items.num_head_groups;
  Tile tile;
  tile.seq = items.seq;
  tile.group_size = items.group_size;
  tile.first_head = head_group * items.tile_heads;
  tile.num_heads = min_of(items.tile_heads, params.num_kv_heads - tile.first_head);
  tile.first_row = item % items.num_tiles * params.tile_rows;
  tile.num_rows = min_of(params.tile_rows, tile.seq.num_queries * tile.group_size - tile.first_row);
  tile.used = keys_of_queries(params, tile.seq, tile.query(0), tile.query(tile.num_rows - 1));
  attend_tile<T>(params, tile, split, scratch);
}

// Takes items off the list until it is empty. Counters only grow, so one walk over the sequences
// finds all of a thread's items.
template <typename T>
void run_items(const AttentionPlan& params, int64_t num_items, int64_t* next_item) {
  TileScratch& scratch = kept_by_thread<TileScratch>();
  int64_t index = 0, items_before = 0;
  SequenceItems items(params, 0);
  while (true) {
    const int64_t item = __atomic_fetch_add(next_item, 1, __ATOMIC_RELAXED);
    if (item >= num_items) return;
    while (item - items_before >= items.count()) {
      items_before += items.count();
      items = SequenceItems(params, ++index);
    }
    run_item<T>(params, items, item - items_before, scratch);
  }
}

// The second pass: every row merges the splits that it sees.
template <typename T>
void merge_rows(const AttentionPlan& params, int64_t begin, int64_t end) {
  const int64_t width = row_width(params.head_dim);
  int64_t index = 0;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row / params.num_q_heads, head = row % params.num_q_heads;
    while (params.query_start_loc[index + 1] <= token) ++index;
    const Sequence seq = sequence_at(params, index);
    const Range splits = splits_of(params, visible_keys(params, seq, token - seq.first_token));
    alignas(64) float total[kMaxHeadDim] = {};
    float maximum = -kInfinity, weight = 0.0f;
    for (int64_t split = splits.begin; split < splits.end; ++split) {
      const float* partial = partial_of(params, token, head, split);
      merge_split(partial, partial[width], partial[width + 1], width, total, &maximum, &weight);
    }
    write_row(total, weight, params.head_dim, out_row<T>(params, token, head));
  }
}

template <typename T>
void run(AttentionPlan params, const Parallel& parallel) {
  const Scratch<float> partials(params.num_tokens * params.num_q_heads * params.max_splits *
                                params.partial_size);
  if (params.max_splits > 0) params.partials = partials.data();
  const Scratch<float> biases(params.num_q_heads * params.bias.stride);
  if (params.position_bias != nullptr) {
    fill_position_bias(params, params.bias, biases.data());
    params.bias.data = biases.data();
  }
  int64_t num_items = 0;
  for (int64_t index = 0; index < params.num_seqs; ++index) {
    num_items += SequenceItems(params, index).count();
  }
  if (num_items > 0) {
    int64_t next_item = 0;
    const int64_t num_threads = min_of(params.num_threads, num_items);
    parallel_for(parallel, num_threads, 1,
                 [&](int64_t, int64_t) { run_items<T>(params, num_items, &next_item); });
  }
  if (params.partials != nullptr) {
    parallel_for(parallel, params.num_tokens * params.num_q_heads, 16,
                 [&](int64_t begin, int64_t end) { merge_rows<T>(params, begin, end); });
  }
}

}  // namespace

void run_paged_attention(const PagedAttentionParams& params, const Parallel& parallel) {
  if (params.num_tokens == 0 || params.num_q_heads == 0) return;
  const AttentionPlan plan = plan_attention(params, parallel.num_threads);
  if (params.dtype == DType::kFloat32) {
    run<float>(plan, parallel);
  } else {
    run<BFloat16>(plan, parallel);
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
