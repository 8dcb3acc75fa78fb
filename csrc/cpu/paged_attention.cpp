// paged_attention on the CPU: a work item holds the rows (query, head of the group) of one sequence
// that share a kv head, and walks the keys in blocks with an online softmax in float32. Threads
// take items from one list; the splits of a sequence spread over threads are merged in a second
// pass.
//
// A row's arithmetic depends on its own keys and split_size alone: blocks start at multiples of the
// block size within a split, every score is summed in one order whatever the tile, and keys that
// only a neighbour sees weigh exactly 0.
#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kMaxTileRows = 64;
constexpr int64_t kMaxBlock = 64;          // keys
constexpr int64_t kTileFloats = 64 * 128;  // of a tile of queries, or a block of keys
#if defined(__AVX512F__)
constexpr int kGroupRows = 4;  // rows that share a key in registers
#else
constexpr int kGroupRows = 2;
#endif
constexpr int kGroupKeys = 4;     // keys that share a query in registers
constexpr int kGroupVectors = 4;  // vectors of a value row
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

inline Sequence sequence_at(const PagedAttentionParams& params, int64_t index) {
  const int64_t first_token = params.query_start_loc[index];
  return {index, first_token, params.query_start_loc[index + 1] - first_token,
          params.seq_lens[index]};
}

// The keys that a query of a sequence sees.
inline Range visible_keys(const PagedAttentionParams& params, const Sequence& seq, int64_t query) {
  const int64_t position = seq.length - seq.num_queries + query;
  const int64_t end = params.causal ? position + 1 : seq.length;
  const int64_t begin = params.sliding_window > 0 ? position + 1 - params.sliding_window : 0;
  return {max_of(begin, 0), max_of(end, 0)};
}

// Rows of one sequence and kv head: row r is query r / group_size, head r % group_size of the
// group.
struct Tile {
  Sequence seq;
  int64_t kv_head, group_size, first_row, num_rows;
  Range used;  // the keys that any of the rows sees
};

// What a thread holds of a tile.
struct Scratch {
  alignas(64) float q[kTileFloats];                  // [tile_rows, width], times scale
  alignas(64) float acc[kTileFloats];                // [tile_rows, width]: weights times values
  alignas(64) float total[kTileFloats];              // the same, of the splits merged so far
  alignas(64) float k_block[kTileFloats];            // [block, width], when converted
  alignas(64) float v_block[kTileFloats];            // [block, width], when converted
  alignas(64) float scores[kGroupRows * kMaxBlock];  // [rows of a group, block]
  alignas(64) float weight_sum[kMaxTileRows * kWidth];
  float maximum[kMaxTileRows];
  float total_maximum[kMaxTileRows], total_weight[kMaxTileRows];
  Range visible[kMaxTileRows];
};

// Floats between the rows of a tile: whole vectors.
inline int64_t row_width(int64_t head_dim) { return ceil_div(head_dim, 16) * 16; }

// Keys per block: two blocks of float32 keys and values fit beside the tile.
inline int64_t block_size(int64_t head_dim) {
  return min_of(kMaxBlock, kTileFloats / row_width(head_dim) / 16 * 16);
}

// in[0..n) to a float32 row of whole vectors, the rest zero.
template <typename T>
inline void widen_row(const T* in, int64_t n, Vec factor, float* out) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(in + i) * factor);
  if (i < n) store(out + i, load_partial(in + i, n - i) * factor);
}

// out[i] = sum(x[i]), each sum in the same order.
inline void sum_four(const Vec* x, float* out) {
#if defined(__AVX512F__)
  const auto add_pairs = [](__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  };
  const __m512d low = _mm512_castps_pd(add_pairs(x[0].v, x[1].v));
  const __m512d high = _mm512_castps_pd(add_pairs(x[2].v, x[3].v));
  const __m512 quads = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                                     _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
  const __m256 halves =
      _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
#elif defined(__AVX2__)
  const __m256 low = _mm256_hadd_ps(x[0].v, x[1].v);
  const __m256 high = _mm256_hadd_ps(x[2].v, x[3].v);
  const __m256 quads = _mm256_hadd_ps(low, high);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(x[i]);
#endif
}

// scores[r][j] = q[r] . k[j] for j in [begin, end), both multiples of kGroupKeys.
template <int kRows, typename T>
void score_keys(const float* q, int64_t width, int64_t head_dim, const T* const* k, int64_t begin,
                int64_t end, float* scores) {
  const int64_t whole = head_dim / kWidth * kWidth;
  for (int64_t j = begin; j < end; j += kGroupKeys) {
    Vec dots[kRows][kGroupKeys];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kGroupKeys; ++i) dots[r][i] = zero();
    }
    for (int64_t d = 0; d < whole; d += kWidth) {
      Vec keys[kGroupKeys];
      for (int i = 0; i < kGroupKeys; ++i) keys[i] = load(k[j + i] + d);
      for (int r = 0; r < kRows; ++r) {
        const Vec query = load(q + r * width + d);
        for (int i = 0; i < kGroupKeys; ++i) dots[r][i] = fma(query, keys[i], dots[r][i]);
      }
    }
    if (whole < head_dim) {
      for (int i = 0; i < kGroupKeys; ++i) {
        const Vec key = load_partial(k[j + i] + whole, head_dim - whole);
        for (int r = 0; r < kRows; ++r) {
          dots[r][i] = fma(load(q + r * width + whole), key, dots[r][i]);
        }
      }
    }
    for (int r = 0; r < kRows; ++r) sum_four(dots[r], scores + r * kMaxBlock + j);
  }
}

// acc[r][d..] = acc[r][d..] * correction[r] + sum over j in [begin, end) of scores[r][j] *
// v[j][d..], for kVectors vectors; of the last only `last` elements exist in v when kPartial.
template <int kRows, int kVectors, bool kPartial, typename T>
void add_value_columns(const float* scores, const Vec* correction, const T* const* v, int64_t d,
                       int64_t last, int64_t begin, int64_t end, int64_t width, float* acc) {
  Vec sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) {
      sums[r][i] = load(acc + r * width + d + i * kWidth) * correction[r];
    }
  }
  for (int64_t j = begin; j < end; ++j) {
    Vec values[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      const T* value = v[j] + d + i * kWidth;
      values[i] = kPartial && i + 1 == kVectors ? load_partial(value, last) : load(value);
    }
    for (int r = 0; r < kRows; ++r) {
      const Vec weight = broadcast(scores[r * kMaxBlock + j]);
      for (int i = 0; i < kVectors; ++i) sums[r][i] = fma(weight, values[i], sums[r][i]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kVectors; ++i) store(acc + r * width + d + i * kWidth, sums[r][i]);
  }
}

template <int kRows, typename T>
void add_values(const float* scores, const Vec* correction, const T* const* v, int64_t head_dim,
                int64_t begin, int64_t end, int64_t width, float* acc) {
  const auto columns = [&]<int kVectors, bool kPartial>(int64_t d, int64_t last) {
    add_value_columns<kRows, kVectors, kPartial>(scores, correction, v, d, last, begin, end, width,
                                                 acc);
  };
  int64_t d = 0;
  for (; d + kGroupVectors * kWidth <= head_dim; d += kGroupVectors * kWidth) {
    columns.template operator()<kGroupVectors, false>(d, 0);
  }
  for (; d + kWidth <= head_dim; d += kWidth) columns.template operator()<1, false>(d, 0);
  if (d < head_dim) columns.template operator()<1, true>(d, head_dim - d);
}

// Turns a row's scores into weights relative to its new maximum; returns what its earlier weights
// are to be multiplied by.
inline Vec softmax_row(float* scores, int64_t begin, int64_t end, float* maximum,
                       float* weight_sum) {
  Vec largest = broadcast(-kInfinity);
  for (int64_t j = begin; j < end; j += kWidth) largest = max(largest, load(scores + j));
  const float block_maximum = max_element(largest);
  const float new_maximum = block_maximum > *maximum ? block_maximum : *maximum;
  // A row that has seen no key yet keeps weights of 0 rather than exp(-inf + inf).
  const float base = new_maximum == -kInfinity ? 0.0f : new_maximum;
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

// One block of keys, from block_begin on, for kRows rows of the tile from `row` on.
template <int kRows, typename T>
void attend_rows(Scratch& scratch, int64_t row, int64_t width, int64_t head_dim, Range block,
                 const T* const* k, const T* const* v) {
  // The keys of this block that any row sees; scores start at a whole vector.
  Range seen{block.end, block.begin};
  for (int r = 0; r < kRows; ++r) {
    const Range visible = intersect(scratch.visible[row + r], block);
    if (visible.empty()) continue;
    seen = {min_of(seen.begin, visible.begin), max_of(seen.end, visible.end)};
  }
  if (seen.empty()) return;
  const int64_t begin = seen.begin - block.begin, end = seen.end - block.begin;
  const int64_t vector_begin = begin / kWidth * kWidth;
  const int64_t vector_end = ceil_div(end, kWidth) * kWidth;

  score_keys<kRows>(scratch.q + row * width, width, head_dim, k, vector_begin,
                    ceil_div(end, kGroupKeys) * kGroupKeys, scratch.scores);
  Vec correction[kRows];
  for (int r = 0; r < kRows; ++r) {
    float* scores = scratch.scores + r * kMaxBlock;
    const Range visible = intersect(scratch.visible[row + r], block);
    const int64_t first = min_of(visible.begin - block.begin, vector_end);
    for (int64_t i = vector_begin; i < first; ++i) scores[i] = -kInfinity;
    const int64_t past = max_of(visible.end - block.begin, vector_begin);
    for (int64_t i = past; i < vector_end; ++i) scores[i] = -kInfinity;
    correction[r] = softmax_row(scores, vector_begin, vector_end, &scratch.maximum[row + r],
                                scratch.weight_sum + (row + r) * kWidth);
  }
  add_values<kRows>(scratch.scores, correction, v, head_dim, begin, end, width,
                    scratch.acc + row * width);
}

template <typename T>
void attend_block(Scratch& scratch, int64_t num_rows, int64_t width, int64_t head_dim, Range block,
                  const T* const* k, const T* const* v) {
  int64_t row = 0;
  for (; row + kGroupRows <= num_rows; row += kGroupRows) {
    attend_rows<kGroupRows>(scratch, row, width, head_dim, block, k, v);
  }
  const int64_t rest = num_rows - row;
  if (rest == 3) attend_rows<3>(scratch, row, width, head_dim, block, k, v);
  if (rest == 2) attend_rows<2>(scratch, row, width, head_dim, block, k, v);
  if (rest == 1) attend_rows<1>(scratch, row, width, head_dim, block, k, v);
}

// Where the keys and values of a block lie. Of its slots those outside `used` may belong to no one:
// the nearest used key stands in for them, up to a whole group at the end.
template <typename T>
void locate_block(const PagedAttentionParams& params, const Tile& tile, Range block, Range used,
                  const T** k, const T** v) {
  const int32_t* page_table = params.page_table + tile.seq.index * params.page_table_stride;
  const T* k_cache = static_cast<const T*>(params.k_cache) + tile.kv_head * params.head_dim;
  const T* v_cache = static_cast<const T*>(params.v_cache) + tile.kv_head * params.head_dim;
  used = intersect(used, block);
  const int64_t first = used.begin - block.begin, end = used.end - block.begin;
  int64_t page_index = used.begin / params.page_size;
  int64_t offset = used.begin - page_index * params.page_size;
  for (int64_t j = first; j < end; ++page_index, offset = 0) {
    const int64_t page = page_table[page_index];
    const T* k_slot = k_cache + page * params.k_page_stride + offset * params.k_slot_stride;
    const T* v_slot = v_cache + page * params.v_page_stride + offset * params.v_slot_stride;
    const int64_t page_end = min_of(end, j + params.page_size - offset);
    for (; j < page_end; ++j, k_slot += params.k_slot_stride, v_slot += params.v_slot_stride) {
      k[j] = k_slot;
      v[j] = v_slot;
    }
  }
  for (int64_t j = 0; j < first; ++j) {
    k[j] = k[first];
    v[j] = v[first];
  }
  for (int64_t j = end; j % kGroupKeys != 0; ++j) {
    k[j] = k[end - 1];
    v[j] = v[end - 1];
  }
}

// A bfloat16 block that many rows share is widened once; a few rows widen it as they read it.
inline bool widens_block(const float*, int64_t) { return false; }
inline bool widens_block(const BFloat16*, int64_t num_rows) { return num_rows > 2 * kGroupRows; }

template <typename T>
void widen_block(const T* const* rows, int64_t num_rows, int64_t head_dim, int64_t width,
                 float* out, const float** out_rows) {
  for (int64_t j = 0; j < num_rows; ++j) {
    widen_row(rows[j], head_dim, broadcast(1.0f), out + j * width);
    out_rows[j] = out + j * width;
  }
}

// Adds the keys of one split to the rows' maximum, weight_sum and acc, which it sets up.
template <typename T>
void attend_split(const PagedAttentionParams& params, const Tile& tile, Range split,
                  Scratch& scratch) {
  const int64_t head_dim = params.head_dim, width = row_width(head_dim);
  const int64_t block_keys = block_size(head_dim);
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    scratch.maximum[row] = -kInfinity;
    store(scratch.weight_sum + row * kWidth, zero());
  }
  for (int64_t i = 0; i < tile.num_rows * width; i += kWidth) store(scratch.acc + i, zero());

  // Whole blocks counted from the split's first key, from the one with the first key in use.
  const Range used = intersect(tile.used, split);
  const int64_t skipped = (used.begin - split.begin) / block_keys * block_keys;
  for (int64_t key = split.begin + skipped; key < used.end; key += block_keys) {
    const Range block = {key, min_of(key + block_keys, used.end)};
    const T* k[kMaxBlock];
    const T* v[kMaxBlock];
    locate_block(params, tile, block, used, k, v);
    if (widens_block(k[0], tile.num_rows)) {
      const float* wide_k[kMaxBlock];
      const float* wide_v[kMaxBlock];
      const int64_t num_keys = ceil_div(block.end - block.begin, kGroupKeys) * kGroupKeys;
      widen_block(k, num_keys, head_dim, width, scratch.k_block, wide_k);
      widen_block(v, num_keys, head_dim, width, scratch.v_block, wide_v);
      attend_block(scratch, tile.num_rows, width, head_dim, block, wide_k, wide_v);
    } else {
      attend_block(scratch, tile.num_rows, width, head_dim, block, k, v);
    }
  }
}

// Adds one split's (acc, maximum, weight) to the total of the splits before it. Splits are always
// merged in ascending order, so the result does not depend on who computed them.
inline void merge_split(const float* acc, float maximum, float weight, int64_t head_dim,
                        float* total, float* total_maximum, float* total_weight) {
  const float new_maximum = maximum > *total_maximum ? maximum : *total_maximum;
  if (new_maximum == -kInfinity) return;
  const Vec before = exp(broadcast(*total_maximum - new_maximum));
  const Vec now = exp(broadcast(maximum - new_maximum));
  int64_t d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) {
    store(total + d, fma(load(acc + d), now, load(total + d) * before));
  }
  if (d < head_dim) {
    const int64_t n = head_dim - d;
    store_partial(total + d,
                  fma(load_partial(acc + d, n), now, load_partial(total + d, n) * before), n);
  }
  float factors[2][kWidth];
  store(factors[0], before);
  store(factors[1], now);
  *total_weight = *total_weight * factors[0][0] + weight * factors[1][0];
  *total_maximum = new_maximum;
}

// out = total / weight; zeros for a row that saw no key.
template <typename T>
void write_row(const float* total, float weight, int64_t head_dim, T* out) {
  const Vec inverse = broadcast(weight > 0.0f ? 1.0f / weight : 0.0f);
  int64_t d = 0;
  for (; d + kWidth <= head_dim; d += kWidth) store(out + d, load(total + d) * inverse);
  if (d < head_dim) {
    const int64_t n = head_dim - d;
    store_partial(out + d, load_partial(total + d, n) * inverse, n);
  }
}

inline float* partial_of(const PagedAttentionParams& params, int64_t token, int64_t head,
                         int64_t split) {
  return params.partials +
         ((token * params.num_q_heads + head) * params.max_splits + split) * (params.head_dim + 2);
}

template <typename T>
T* out_row(const PagedAttentionParams& params, int64_t token, int64_t head) {
  return static_cast<T*>(params.out) + token * params.out_token_stride +
         head * params.out_head_stride;
}

// The splits that hold any of `keys`, as a range.
inline Range splits_of(const PagedAttentionParams& params, Range keys) {
  if (keys.empty()) return {0, 0};
  return {keys.begin / params.split_size, ceil_div(keys.end, params.split_size)};
}

inline Range keys_of_split(const PagedAttentionParams& params, int64_t split) {
  return {split * params.split_size, (split + 1) * params.split_size};
}

// One work item: a tile with one split, written to `partials`, or with all of them, written to out.
template <typename T>
void attend_tile(const PagedAttentionParams& params, const Tile& tile, int64_t only_split,
                 Scratch& scratch) {
  const int64_t head_dim = params.head_dim, width = row_width(head_dim);
  const auto token_of = [&](int64_t row) {
    return tile.seq.first_token + (tile.first_row + row) / tile.group_size;
  };
  const auto head_of = [&](int64_t row) {
    return tile.kv_head * tile.group_size + (tile.first_row + row) % tile.group_size;
  };

  // Queries times scale, and what each of them sees.
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    const T* q = static_cast<const T*>(params.q) + token_of(row) * params.q_token_stride +
                 head_of(row) * params.q_head_stride;
    widen_row(q, head_dim, broadcast(params.scale), scratch.q + row * width);
    scratch.visible[row] = visible_keys(params, tile.seq, (tile.first_row + row) / tile.group_size);
  }

  const Range splits = splits_of(params, tile.used);
  if (params.partials != nullptr) {
    if (only_split < splits.begin || only_split >= splits.end) return;
    attend_split<T>(params, tile, keys_of_split(params, only_split), scratch);
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      float* partial = partial_of(params, token_of(row), head_of(row), only_split);
      __builtin_memcpy(partial, scratch.acc + row * width, head_dim * sizeof(float));
      partial[head_dim] = scratch.maximum[row];
      partial[head_dim + 1] = sum(load(scratch.weight_sum + row * kWidth));
    }
    return;
  }
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    scratch.total_maximum[row] = -kInfinity;
    scratch.total_weight[row] = 0.0f;
    for (int64_t d = 0; d < width; d += kWidth) store(scratch.total + row * width + d, zero());
  }
  for (int64_t split = splits.begin; split < splits.end; ++split) {
    attend_split<T>(params, tile, keys_of_split(params, split), scratch);
    for (int64_t row = 0; row < tile.num_rows; ++row) {
      merge_split(scratch.acc + row * width, scratch.maximum[row],
                  sum(load(scratch.weight_sum + row * kWidth)), head_dim,
                  scratch.total + row * width, &scratch.total_maximum[row],
                  &scratch.total_weight[row]);
    }
  }
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    write_row(scratch.total + row * width, scratch.total_weight[row], head_dim,
              out_row<T>(params, token_of(row), head_of(row)));
  }
}

// The keys that any of the queries [first, last] of a sequence sees.
inline Range keys_of_queries(const PagedAttentionParams& params, const Sequence& seq, int64_t first,
                             int64_t last) {
  return {visible_keys(params, seq, first).begin, visible_keys(params, seq, last).end};
}

// The work items of one sequence: splits, then kv heads, then tiles, so that the tiles of a head
// find its keys in cache.
struct SequenceItems {
  Sequence seq;
  int64_t group_size, num_tiles, num_splits, first_split;

  SequenceItems(const PagedAttentionParams& params, int64_t index)
      : seq(sequence_at(params, index)), group_size(params.num_q_heads / params.num_kv_heads) {
    num_tiles = ceil_div(seq.num_queries * group_size, params.tile_rows);
    Range splits = {0, 1};
    if (params.partials != nullptr && seq.num_queries > 0) {
      splits = splits_of(params, keys_of_queries(params, seq, 0, seq.num_queries - 1));
    }
    first_split = splits.begin;
    num_splits = splits.end - splits.begin;
  }
  int64_t count(const PagedAttentionParams& params) const {
    return num_splits * params.num_kv_heads * num_tiles;
  }
};

template <typename T>
void run_item(const PagedAttentionParams& params, const SequenceItems& items, int64_t item,
              Scratch& scratch) {
  Tile tile;
  tile.seq = items.seq;
  tile.group_size = items.group_size;
  tile.first_row = item % items.num_tiles * params.tile_rows;
  tile.num_rows = min_of(params.tile_rows, tile.seq.num_queries * tile.group_size - tile.first_row);
  tile.kv_head = item / items.num_tiles % params.num_kv_heads;
  tile.used = keys_of_queries(params, tile.seq, tile.first_row / tile.group_size,
                              (tile.first_row + tile.num_rows - 1) / tile.group_size);
  const int64_t split = items.first_split + item / items.num_tiles / params.num_kv_heads;
  attend_tile<T>(params, tile, split, scratch);
}

// Takes items off the list until it is empty. Counters only grow, so one walk over the sequences
// finds all of a thread's items.
template <typename T>
void run_items(const PagedAttentionParams& params, int64_t num_items, int64_t* next_item) {
  Scratch scratch;
  int64_t index = 0, items_before = 0;
  SequenceItems items(params, 0);
  while (true) {
    const int64_t item = __atomic_fetch_add(next_item, 1, __ATOMIC_RELAXED);
    if (item >= num_items) return;
    while (item - items_before >= items.count(params)) {
      items_before += items.count(params);
      items = SequenceItems(params, ++index);
    }
    run_item<T>(params, items, item - items_before, scratch);
  }
}

// The second pass: every row merges the splits that it sees.
template <typename T>
void merge_rows(const PagedAttentionParams& params, int64_t begin, int64_t end) {
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
      merge_split(partial, partial[params.head_dim], partial[params.head_dim + 1], params.head_dim,
                  total, &maximum, &weight);
    }
    write_row(total, weight, params.head_dim, out_row<T>(params, token, head));
  }
}

template <typename T>
void run(const PagedAttentionParams& params, const Parallel& parallel) {
  int64_t num_items = 0;
  for (int64_t index = 0; index < params.num_seqs; ++index) {
    num_items += SequenceItems(params, index).count(params);
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
  if (params.dtype == DType::kFloat32) {
    run<float>(params, parallel);
  } else {
    run<BFloat16>(params, parallel);
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
