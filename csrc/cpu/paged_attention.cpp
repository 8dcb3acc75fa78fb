// paged_attention on the CPU: a work item holds the rows (query, head of the group) of one sequence
// that share a kv head, and walks the keys in blocks with an online softmax in float32. Threads
// take items from one list; the splits of a sequence spread over threads are merged in a second
// pass.
//
// A row's arithmetic depends only on its own keys and split_size: blocks start at multiples of the
// block size within a split, every score is summed in one order whatever the tile, and values that
// only a neighbouring row sees are not added. NaN and infinity come out as in softmax(q k) v: they
// fill the whole row where the query or a key that the row sees has them, and a column where a
// value has them.
#include "attention_rows.h"
#include "attention_tiles.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// The addresses of the keys and values of a block. Its slots outside `used` may be unassigned: the
// nearest used key takes their place.
template <typename T>
void locate_block(const AttentionPlan& params, const AttentionTile& tile, Range keys, Range used,
                  BlockRows<T>& rows) {
  const int32_t* page_table = params.page_table + tile.seq.index * params.page_table_stride;
  const CacheStrides k = params.k_cache_strides, v = params.v_cache_strides;
  const T* k_cache = static_cast<const T*>(params.k_cache) + tile.first_head * k.head;
  const T* v_cache = static_cast<const T*>(params.v_cache) + tile.first_head * v.head;
  used = intersect(used, keys);
  const int64_t first = used.begin - keys.begin, end = used.end - keys.begin;
  int64_t page_index = used.begin / params.page_size;
  int64_t offset = used.begin - page_index * params.page_size;
  for (int64_t j = first; j < end; ++page_index, offset = 0) {
    const int64_t page = page_table[page_index];
    const T* k_slot = k_cache + page * k.page + offset * k.slot;
    const T* v_slot = v_cache + page * v.page + offset * v.slot;
    const int64_t page_end = min_of(end, j + params.page_size - offset);
    for (; j < page_end; ++j, k_slot += k.slot, v_slot += v.slot) {
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

// The factor of the scores of a kv head's rows.
inline float score_scale(const AttentionPlan& params, int64_t kv_head) {
  const float* scale = scale_of(params.cache_format.key_scales, kv_head);
  return scale != nullptr ? params.scale * *scale : params.scale;
}

// Adds the keys of one split to the rows' maximum, weight_sum and acc, which it initialises. C: the
// element type of the caches; M: how it is multiplied.
template <typename M, typename C>
void attend_split(const AttentionPlan& params, const AttentionTile& tile, Range split,
                  TileScratch& scratch) {
  const int64_t head_dim = params.head_dim, width = row_width(head_dim);
  const int64_t block_keys = block_size(head_dim);
  const int64_t num_rows = tile.num_held();
  for (int64_t row = 0; row < num_rows; ++row) {
    scratch.maximum[row] = -kInfinity;
    store(scratch.weight_sum + row * kWidth, zero());
  }
  for (int64_t i = 0; i < num_rows * width; i += kWidth) store(scratch.acc + i, zero());

  // Whole blocks counted from the split's first key, from the one with the first key in use.
  const Range used = intersect(tile.used, split);
  const auto block_at = [&](int64_t key) { return Range{key, min_of(key + block_keys, used.end)}; };
  int64_t key = split.begin + (used.begin - split.begin) / block_keys * block_keys;
  const auto scale_of_head = [&](int64_t head) {
    return score_scale(params, tile.first_head + head);
  };
  BlockRows<C> rows[2];
  locate_block(params, tile, block_at(key), used, rows[0]);
  for (int current = 0; key < used.end; key += block_keys, current ^= 1) {
    const Range keys = block_at(key);
    const bool is_last = keys.end == used.end;
    if (!is_last) locate_block(params, tile, block_at(keys.end), used, rows[current ^ 1]);
    const CachedBlock<C> block{&rows[current], is_last ? nullptr : &rows[current ^ 1],
                               tile.num_heads, params.k_cache_strides.head,
                               params.v_cache_strides.head};
    M::attend(scratch, tile, head_dim, scale_of_head, keys, block);
  }
}

// Adds one split's (acc, maximum, weight) to the total of the splits before it. Splits are always
// merged in ascending order, so the result does not depend on which threads computed them.
inline void merge_split(const float* acc, float maximum, float weight, int64_t width, float* total,
                        float* total_maximum, float* total_weight) {
  const float new_maximum = maximum > *total_maximum ? maximum : *total_maximum;
  const float base = base_of(new_maximum);
  const Vec before = exp_at_most_one(broadcast(*total_maximum - base));
  const Vec now = exp_at_most_one(broadcast(maximum - base));
  for (int64_t d = 0; d < width; d += kWidth) {
    store(total + d, fma(load(acc + d), now, load(total + d) * before));
  }
  float factors[2][kWidth];
  store(factors[0], before);
  store(factors[1], now);
  *total_weight = *total_weight * factors[0][0] + weight * factors[1][0];
  *total_maximum = new_maximum;
}

// A row's result = total / weight; zeros where it saw no key, or only scores of -inf.
template <typename T, typename M>
void write_row(const AttentionPlan& params, int64_t token, int64_t head, const float* total,
               float weight) {
  const int64_t head_dim = params.head_dim;
  T* out =
      static_cast<T*>(params.out) + token * params.out_token_stride + head * params.out_head_stride;
  const float* scale =
      scale_of(params.cache_format.value_scales, head / (params.num_q_heads / params.num_kv_heads));
  const float unit = scale != nullptr ? *scale * M::kUnit : M::kUnit;
  const Vec inverse = broadcast(weight == 0.0f ? 0.0f : unit / weight);
  int64_t d = 0;
  const auto result = [&] { return kept_as<T, typename M::Wide>(load_kept(total + d) * inverse); };
  for (; d + kPairWidth <= head_dim; d += kPairWidth) store_pair(out + d, result());
  if (d < head_dim) store_pair_partial(out + d, result(), head_dim - d);
}

inline float* partial_of(const AttentionPlan& params, int64_t token, int64_t head, int64_t split) {
  return params.partials +
         ((token * params.num_q_heads + head) * params.max_splits + split) * params.partial_size;
}

// The splits that hold any of `keys`, as a range.
inline Range splits_of(const AttentionPlan& params, Range keys) {
  if (keys.empty()) return {0, 0};
  return {keys.begin / params.split_size, ceil_div(keys.end, params.split_size)};
}

inline Range keys_of_split(const AttentionPlan& params, int64_t split) {
  return {split * params.split_size, (split + 1) * params.split_size};
}

// Runs one work item: a tile with one split, written to `partials`, or with all splits, written to
// out.
template <typename T, typename M, typename C>
void attend_tile(const AttentionPlan& params, const AttentionTile& tile, int64_t only_split,
                 TileScratch& scratch) {
  const int64_t head_dim = params.head_dim, width = row_width(head_dim);
  // Calls visit(place in the scratch, token, query head) for each row.
  const auto for_each_row = [&](const auto& visit) {
    for (int64_t head = 0; head < tile.num_heads; ++head) {
      for (int64_t row = 0; row < tile.num_rows; ++row) {
        visit(
            tile.held(head, row), tile.seq.first_token + tile.query(row),
            (tile.first_head + head) * tile.group_size + (tile.first_row + row) % tile.group_size);
      }
    }
  };

  // Loads the queries, and the keys that each of them sees.
  for_each_row([&](int64_t at, int64_t token, int64_t head) {
    M::take_query(static_cast<const T*>(params.q) + token * params.q_token_stride +
                      head * params.q_head_stride,
                  head_dim, score_scale(params, head / tile.group_size), at, tile.groups.size,
                  scratch);
    if (params.bias.data != nullptr) scratch.bias_row[at] = params.bias.row(head);
  });
  for (int64_t row = 0; row < tile.num_rows; ++row) {
    scratch.visible[row] = visible_keys(params, tile.seq, tile.query(row));
    scratch.position[row] = position_of(tile.seq, tile.query(row));
  }
  scratch.bias = params.bias;
  scratch.soft_cap = params.soft_cap;

  const Range splits = splits_of(params, tile.used);
  if (params.partials != nullptr) {
    if (only_split < splits.begin || only_split >= splits.end) return;
    attend_split<M, C>(params, tile, keys_of_split(params, only_split), scratch);
    for_each_row([&](int64_t at, int64_t token, int64_t head) {
      float* partial = partial_of(params, token, head, only_split);
      __builtin_memcpy(partial, scratch.acc + at * width, width * sizeof(float));
      partial[width] = scratch.maximum[at];
      partial[width + 1] = sum(load(scratch.weight_sum + at * kWidth));
    });
    return;
  }
  const int64_t num_rows = tile.num_held();
  for (int64_t at = 0; at < num_rows; ++at) {
    scratch.total_maximum[at] = -kInfinity;
    scratch.total_weight[at] = 0.0f;
  }
  for (int64_t i = 0; i < num_rows * width; i += kWidth) store(scratch.total + i, zero());
  for (int64_t split = splits.begin; split < splits.end; ++split) {
    attend_split<M, C>(params, tile, keys_of_split(params, split), scratch);
    for_each_row([&](int64_t at, int64_t, int64_t) {
      merge_split(scratch.acc + at * width, scratch.maximum[at],
                  sum(load(scratch.weight_sum + at * kWidth)), width, scratch.total + at * width,
                  &scratch.total_maximum[at], &scratch.total_weight[at]);
    });
  }
  for_each_row([&](int64_t at, int64_t token, int64_t head) {
    write_row<T, M>(params, token, head, scratch.total + at * width, scratch.total_weight[at]);
  });
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
    tile_heads = min_of(most_heads(params, rows), params.tile_heads);
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

template <typename T, typename M, typename C>
void run_item(const AttentionPlan& params, const SequenceItems& items, int64_t item,
              typename M::Unit& unit, TileScratch& scratch) {
  const int64_t head_group = item / items.num_tiles % items.num_head_groups;
  const int64_t split = items.first_split + item / items.num_tiles / items.num_head_groups;
  AttentionTile tile;
  tile.seq = items.seq;
  tile.group_size = items.group_size;
  tile.first_head = head_group * items.tile_heads;
  tile.num_heads = min_of(items.tile_heads, params.num_kv_heads - tile.first_head);
  tile.first_row = item % items.num_tiles * params.tile_rows;
  tile.num_rows = min_of(params.tile_rows, tile.seq.num_queries * tile.group_size - tile.first_row);
  tile.groups = groups_of(params, tile.num_rows);
  tile.used = keys_of_queries(params, tile.seq, tile.query(0), tile.query(tile.num_rows - 1));
  unit.take(tile.groups.size);
  attend_tile<T, M, C>(params, tile, split, scratch);
}

// Takes items from the list until it is empty. Counters only grow, so one walk over the sequences
// finds all of a thread's items.
template <typename T, typename M, typename C>
void run_items(const AttentionPlan& params, int64_t num_items, int64_t* next_item) {
  TileScratch& scratch = kept_by_thread<TileScratch>();
  typename M::Unit unit;
  int64_t index = 0, items_before = 0;
  SequenceItems items(params, 0);
  while (true) {
    const int64_t item = __atomic_fetch_add(next_item, 1, __ATOMIC_RELAXED);
    if (item >= num_items) return;
    while (item - items_before >= items.count()) {
      items_before += items.count();
      items = SequenceItems(params, ++index);
    }
    run_item<T, M, C>(params, items, item - items_before, unit, scratch);
  }
}

// The second pass: every row merges the splits that it sees.
template <typename T, typename M>
void merge_rows(const AttentionPlan& params, int64_t begin, int64_t end) {
  const int64_t width = row_width(params.head_dim);
  int64_t index = 0;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t token = row / params.num_q_heads, head = row % params.num_q_heads;
    while (params.query_start_loc[index + 1] <= token) ++index;
    const Sequence seq = sequence_at(params, index);
    const Range splits = splits_of(params, visible_keys(params, seq, token - seq.first_token));
    alignas(64) float total[kMaxAttentionHeadDim] = {};
    float maximum = -kInfinity, weight = 0.0f;
    for (int64_t split = splits.begin; split < splits.end; ++split) {
      const float* partial = partial_of(params, token, head, split);
      merge_split(partial, partial[width], partial[width + 1], width, total, &maximum, &weight);
    }
    write_row<T, M>(params, token, head, total, weight);
  }
}

template <typename T, typename M, typename C>
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
                 [&](int64_t, int64_t) { run_items<T, M, C>(params, num_items, &next_item); });
  }
  if (params.partials != nullptr) {
    parallel_for(parallel, params.num_tokens * params.num_q_heads, 16,
                 [&](int64_t begin, int64_t end) { merge_rows<T, M>(params, begin, end); });
  }
}

// Calls body<M>() for a model of T whose caches hold C: bfloat16 in pairs or tiles where the CPU
// has them.
template <typename T, typename C, typename Body>
void dispatch_multiplication(const Body& body) {
#if defined(__AVX512BF16__)
  if constexpr (kIsSame<T, BFloat16> || kIsSame<C, BFloat16>) {
    const Tiles tiles = tiles_in_use();
    if (tiles == Tiles::kHardware) return body.template operator()<InTiles<TileHardware>>();
    if (tiles == Tiles::kModel) return body.template operator()<InTiles<TileModel>>();
    return body.template operator()<InPairs>();
  }
#endif
#if defined(__AVX2__)
  if constexpr (kIsSame<C, Float8>) return body.template operator()<InFloats<ScaledHalf>>();
#endif
  if constexpr (kIsSame<C, BFloat16>) {
    body.template operator()<InFloats<BFloat16>>();
  } else {
    body.template operator()<InFloats<T>>();
  }
}

}  // namespace

void run_paged_attention(const PagedAttentionParams& params, const Parallel& parallel) {
  if (params.num_tokens == 0 || params.num_q_heads == 0) return;
  dispatch_cache(params.dtype, params.cache_format, [&]<typename T, typename C>() {
    dispatch_multiplication<T, C>([&]<typename M>() {
      run<T, M, C>(plan_attention(params, parallel, M::kHasTiles), parallel);
    });
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
