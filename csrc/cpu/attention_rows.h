// A block of keys in float32, for any dtype and on every CPU. The product of a key and a query is
// summed over both in vectors of columns.
#pragma once

#include "attention_block.h"
#include "transpose.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// in[0..n) times factor, as pairs in the order of W's pairs; the rest of the row is zero.
template <typename W, typename T>
inline void widen_row(const T* in, int64_t n, Vec factor, int64_t width, float* out) {
  int64_t d = 0;
  for (; d + kPairWidth <= n; d += kPairWidth) {
    store_kept(out + d, kept_as<W, T>(load_pair(in + d)) * factor);
  }
  if (d < n) {
    store_kept(out + d, kept_as<W, T>(load_pair_partial(in + d, n - d)) * factor);
    d += kPairWidth;
  }
  for (; d < width; d += kPairWidth) store_kept(out + d, {zero(), zero()});
}

// scores[r][j] = q[r] . k[j] for j in [begin, end), both multiples of kWidth.
template <int kRows, typename W, typename C>
void score_keys(const float* q, int64_t width, int64_t head_dim, HeadRows<W> rows, int64_t begin,
                int64_t end, const RowsAhead<C>& ahead, float* scores) {
  // As many sums as keep a core busy.
  constexpr int kKeys = kRows == 1 ? 8 : 4;
  const int64_t whole = head_dim / kPairWidth * kPairWidth;
  Vec folded[kRows][kWidth / 4];
  for (int64_t j = begin; j < end; j += kKeys) {
    const W* k[kKeys];
    EECORE_UNROLL
    for (int i = 0; i < kKeys; ++i) k[i] = rows[j + i];
    Vec dots[kRows][kKeys];
    EECORE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      EECORE_UNROLL
      for (int i = 0; i < kKeys; ++i) dots[r][i] = zero();
    }
    const auto multiply = [&]<int kVector>(int64_t d, const auto& key_at) {
      Vec queries[kRows];
      EECORE_UNROLL
      for (int r = 0; r < kRows; ++r) queries[r] = load(q + r * width + d + kVector * kWidth);
      EECORE_UNROLL
      for (int i = 0; i < kKeys; ++i) {
        if (kVector == 0) ahead.template ask<kPairWidth>(j + i, d);
        const Vec key = key_at(i);
        EECORE_UNROLL
        for (int r = 0; r < kRows; ++r) dots[r][i] = add_product(dots[r][i], queries[r], key);
      }
    };
    for (int64_t d = 0; d < whole; d += kPairWidth) {
      multiply.template operator()<0>(d, [&](int i) { return load_of_pair<0>(k[i] + d); });
      multiply.template operator()<1>(d, [&](int i) { return load_of_pair<1>(k[i] + d); });
    }
    if (whole < head_dim) {
      Pair keys[kKeys];
      EECORE_UNROLL
      for (int i = 0; i < kKeys; ++i) keys[i] = load_pair_partial(k[i] + whole, head_dim - whole);
      multiply.template operator()<0>(whole, [&](int i) { return keys[i].a; });
      multiply.template operator()<1>(whole, [&](int i) { return keys[i].b; });
    }
    EECORE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kKeys; i += 4) {
        folded[r][(j + i) % kWidth / 4] = fold_four(dots[r] + i);
      }
    }
    if ((j + kKeys) % kWidth != 0) continue;
    EECORE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      store(scores + r * kMaxBlock + j + kKeys - kWidth, merge_fours(folded[r]));
    }
  }
}

// acc[r][d..] = acc[r][d..] * correction[r] + sum over j in [begin, end) of scores[r][j] *
// v[j][d..], for kPairs pairs of vectors; of a partial one only `rest` elements exist in v.
template <int kRows, int kPairs, bool kPartial, typename W, typename C>
void add_value_columns(const float* scores, const Vec* correction, HeadRows<W> rows, int64_t d,
                       int64_t rest, int64_t begin, int64_t end, const RowsAhead<C>& ahead,
                       int64_t width, float* acc) {
  Pair sums[kRows][kPairs];
  EECORE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    EECORE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      sums[r][i] = load_kept(acc + r * width + d + i * kPairWidth) * correction[r];
    }
  }
  for (int64_t j = begin; j < end; ++j) {
    ahead.template ask<kPairs * kPairWidth>(j, d);
    const W* v = rows[j] + d;
    Vec weights[kRows];
    EECORE_UNROLL
    for (int r = 0; r < kRows; ++r) weights[r] = broadcast(scores[r * kMaxBlock + j]);
    EECORE_UNROLL
    for (int i = 0; i < kPairs; ++i) {
      const W* at = v + i * kPairWidth;
      const Pair partial = kPartial ? load_pair_partial(at, rest) : Pair{zero(), zero()};
      const Vec a = kPartial ? partial.a : load_of_pair<0>(at);
      EECORE_UNROLL
      for (int r = 0; r < kRows; ++r) sums[r][i].a = add_product(sums[r][i].a, weights[r], a);
      const Vec b = kPartial ? partial.b : load_of_pair<1>(at);
      EECORE_UNROLL
      for (int r = 0; r < kRows; ++r) sums[r][i].b = add_product(sums[r][i].b, weights[r], b);
    }
  }
  EECORE_UNROLL
  for (int r = 0; r < kRows; ++r) {
    EECORE_UNROLL
    for (int i = 0; i < kPairs; ++i) store_kept(acc + r * width + d + i * kPairWidth, sums[r][i]);
  }
}

template <int kRows, typename W, typename C>
void add_values(const float* scores, const Vec* correction, HeadRows<W> rows, int64_t head_dim,
                int64_t begin, int64_t end, const RowsAhead<C>& ahead, int64_t width, float* acc) {
  const auto columns = [&]<int kPairs, bool kPartial>(int64_t d, int64_t rest) {
    add_value_columns<kRows, kPairs, kPartial>(scores, correction, rows, d, rest, begin, end, ahead,
                                               width, acc);
  };
  // As many sums as keep a core busy.
  constexpr int kPairs = kRows == 1 ? 4 : 2;
  int64_t d = 0;
  for (; d + kPairs * kPairWidth <= head_dim; d += kPairs * kPairWidth) {
    columns.template operator()<kPairs, false>(d, 0);
  }
  for (; d + kPairWidth <= head_dim; d += kPairWidth) columns.template operator()<1, false>(d, 0);
  if (d < head_dim) columns.template operator()<1, true>(d, head_dim - d);
}

// Rows in place, and the scores of the rows of queries.
template <typename W, typename C = W>
struct RowBlock {
  static constexpr int64_t kStep = 1;
  HeadRows<W> k, v;
  float* scores;
  RowsAhead<C> ahead;

  RowBlock quiet() const { return {k, v, scores, {}}; }

  template <int kRows>
  void score(TileScratch& scratch, int64_t at, Range seen, int64_t head_dim) const {
    const int64_t width = row_width(head_dim);
    score_keys<kRows>(scratch.q + at * width, width, head_dim, k, seen.begin,
                      ceil_div(seen.end, kWidth) * kWidth, ahead, scores);
  }
  template <int kRows>
  void weigh(TileScratch&) const {}
  template <int kRows>
  void add(TileScratch&, int64_t r, Range keys, const Vec* correction, int64_t head_dim,
           float* acc) const {
    add_values<kRows>(scores + r * kMaxBlock, correction, v, head_dim, keys.begin, keys.end, ahead,
                      row_width(head_dim), acc);
  }
};

// Whether enough rows share a block for it to pay to copy the block into a contiguous layout:
// bfloat16 is widened once, and slots a power of two apart no longer fall into the same cache sets.
inline bool lays_out_block(int64_t num_rows) { return num_rows > 3 * kGroupRows; }

// At each row, prefetches as many lines of the next block as two of its rows have.
template <typename W>
void gather_rows(const HeadRows<W>& rows, int64_t num_keys, int64_t head_dim, ReadAhead& ahead,
                 float* room, const float** gathered) {
  const int64_t width = row_width(head_dim);
  const int64_t lines = ceil_div(2 * head_dim * int64_t{sizeof(W)}, 64);
  for (int64_t j = 0; j < num_keys; ++j) {
    ahead.ask(static_cast<int>(lines));
    gathered[j] = room + j * width;
    widen_row<W>(rows[j], head_dim, broadcast(1.0f), width, room + j * width);
  }
}

#if defined(__AVX512F__)

// Lanes of a panel that are summed at a time.
constexpr int kPanelLanes = 2;

// The lane whose products sum_four adds at a given place: it first adds places 0 and 1, 2 and 3,
// and so on, then pairs of these sums.
constexpr int lane_of(int place) {
  return (place & 4) << 1 | (place & 8) >> 1 | (place & 1) << 1 | (place & 2) >> 1;
}

// Vectors of a row of head_dim columns: whole pairs.
inline int64_t vectors_of(int64_t head_dim) { return ceil_div(head_dim, kPairWidth) * 2; }

// The keys of a block as a panel: [places / kPanelLanes, vectors, kPanelLanes, block].
template <typename W>
void lay_out_keys(const HeadRows<W>& keys, int64_t head_dim, float* panel) {
  const int64_t num_vectors = vectors_of(head_dim);
  for (int64_t j = 0; j < kMaxBlock; j += kWidth) {
    const auto put = [&](Vec(&lanes)[kWidth], int64_t vector) {
      transpose(lanes);
      EECORE_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        const int64_t place = (i / kPanelLanes * num_vectors + vector) * kPanelLanes;
        store(panel + (place + i % kPanelLanes) * kMaxBlock + j, lanes[lane_of(i)]);
      }
    };
    for (int64_t vector = 0; vector < num_vectors; vector += 2) {
      const int64_t d = vector * kWidth, rest = head_dim - d;
      Vec a[kWidth], b[kWidth];
      EECORE_UNROLL
      for (int i = 0; i < kWidth; ++i) {
        const W* key = keys[j + i] + d;
        const Pair pair = rest >= kPairWidth ? load_pair(key) : load_pair_partial(key, rest);
        a[i] = pair.a;
        b[i] = pair.b;
      }
      put(a, vector);
      put(b, vector + 1);
    }
  }
}

// scores[r][j] = q[r] . k[j] for all j of a block, from a panel: the same sums as in score_keys, in
// the same order.
template <int kRows>
void score_panel(const float* q, int64_t width, int64_t num_vectors, const float* k,
                 float* scores) {
  constexpr int kVectors = kMaxBlock / kWidth;
  struct Sums {
    Vec of[kRows][kVectors];

    void add(const Sums& others) {
      EECORE_UNROLL
      for (int r = 0; r < kRows; ++r) {
        EECORE_UNROLL
        for (int i = 0; i < kVectors; ++i) of[r][i] = others.of[r][i] + of[r][i];
      }
    }
  };
  constexpr int kNumPlaces = kWidth / kPanelLanes;
  Sums earlier[3];  // earlier[i]: the sum of 2^i places
  EECORE_UNROLL
  for (int place = 0; place < kNumPlaces; ++place) {
    Sums sums[kPanelLanes];
    const auto multiply = [&](const float* queries, const auto& put) {
      EECORE_UNROLL
      for (int l = 0; l < kPanelLanes; ++l, k += kMaxBlock) {
        const float* query = queries + lane_of(place * kPanelLanes + l);
        Vec keys[kVectors];
        EECORE_UNROLL
        for (int i = 0; i < kVectors; ++i) keys[i] = load(k + i * kWidth);
        EECORE_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const Vec x = broadcast(query[r * width]);
          EECORE_UNROLL
          for (int i = 0; i < kVectors; ++i) put(sums[l].of[r][i], x, keys[i]);
        }
      }
    };
    multiply(q, [](Vec& sum, Vec x, Vec y) { sum = x * y; });
    for (int64_t vector = 1; vector < num_vectors; ++vector) {
      multiply(q + vector * kWidth, [](Vec& sum, Vec x, Vec y) { sum = add_product(sum, x, y); });
    }
    Sums& sum = sums[1];
    sum.add(sums[0]);
    int level = 0;
    for (; place >> level & 1; ++level) sum.add(earlier[level]);
    if (place + 1 < kNumPlaces) {
      earlier[level] = sum;
      continue;
    }
    EECORE_UNROLL
    for (int r = 0; r < kRows; ++r) {
      EECORE_UNROLL
      for (int i = 0; i < kVectors; ++i) store(scores + r * kMaxBlock + i * kWidth, sum.of[r][i]);
    }
  }
}

// A panel of keys, and values in float32.
struct PanelBlock {
  static constexpr int64_t kStep = 1;
  const float* k;
  HeadRows<float> v;

  PanelBlock quiet() const { return *this; }

  template <int kRows>
  void score(TileScratch& scratch, int64_t at, Range, int64_t head_dim) const {
    const int64_t width = row_width(head_dim);
    score_panel<kRows>(scratch.q + at * width, width, vectors_of(head_dim), k, scratch.scores);
  }
  template <int kRows>
  void weigh(TileScratch&) const {}
  template <int kRows>
  void add(TileScratch& scratch, int64_t r, Range keys, const Vec* correction, int64_t head_dim,
           float* acc) const {
    add_values<kRows>(scratch.scores + r * kMaxBlock, correction, v, head_dim, keys.begin, keys.end,
                      RowsAhead<float>(), row_width(head_dim), acc);
  }
};

#endif

// A block in float32, from rows of W.
template <typename W>
struct InFloats {
  static constexpr bool kHasTiles = false;
  static constexpr float kUnit = unit_of<W>();  // the unit of the multiplied numbers
  using Wide = W;
  struct Unit {
    void take(int64_t) {}
  };

  // A query times scale.
  template <typename T>
  static void take_query(const T* q, int64_t head_dim, float scale, int64_t at, int64_t,
                         TileScratch& scratch) {
    const int64_t width = row_width(head_dim);
    widen_row<W>(q, head_dim, broadcast(scale * kUnit), width, scratch.q + at * width);
  }

  template <typename C, typename Scale>
  static void attend(TileScratch& scratch, const AttentionTile& tile, int64_t head_dim,
                     const Scale&, Range keys, const CachedBlock<C>& block) {
    if (!lays_out_block(tile.num_rows)) return attend_few(scratch, tile, head_dim, keys, block);
    const int64_t num_keys = keys.end - keys.begin;
    const W *wide_k[kMaxBlock], *wide_v[kMaxBlock];
    for (int64_t head = 0; head < tile.num_heads; ++head) {
      const HeadBlock<C> own = block.of_head(head);
      const HeadBlock<W> rows = {rows_as(own.k, num_keys, head_dim, scratch.k_widened, wide_k),
                                 rows_as(own.v, num_keys, head_dim, scratch.v_widened, wide_v)};
      ReadAhead ahead = block.ahead_of(head, block_size(head_dim), head_dim);
      attend_laid_out(scratch, tile.num_rows, tile.held(head, 0), head_dim, keys, rows, ahead);
      ahead.ask_rest();
    }
  }

 private:
  // For few rows of each kv head: first the scores of all heads, then their weights, then their
  // values. So the softmax of a head does not wait, and the block's values are prefetched during
  // its scores, and the next block's keys during its values.
  template <typename C>
  static void attend_few(TileScratch& scratch, const AttentionTile& tile, int64_t head_dim,
                         Range keys, const CachedBlock<C>& block) {
    const int64_t num_keys = keys.end - keys.begin, width = row_width(head_dim);
    const Range used = intersect(tile.used, keys);
    if (used.empty()) return;
    const int64_t begin = (used.begin - keys.begin) / kWidth * kWidth;
    const int64_t end = ceil_div(used.end - keys.begin, kWidth) * kWidth;
    const W* wide[kMaxBlock];
    // Calls body<n>(row of the head, place in the scratch), n rows at a time.
    const auto for_rows = [&](int64_t head, const auto& body) {
      in_groups<kGroupRows>(tile.num_rows, [&]<int kRows>(int64_t row) {
        body.template operator()<kRows>(row, tile.held(head, row));
      });
    };
    for (int64_t head = 0; head < tile.num_heads; ++head) {
      const HeadBlock<C> own = block.of_head(head);
      const HeadRows<W> k = rows_as(own.k, num_keys, head_dim, scratch.k_widened, wide);
      RowsAhead<C> ahead(own.v);
      for_rows(head, [&]<int kRows>(int64_t, int64_t at) {
        score_keys<kRows>(scratch.q + at * width, width, head_dim, k, begin, end, ahead,
                          scratch.scores + at * kMaxBlock);
        ahead = {};
      });
    }
    for (int64_t head = 0; head < tile.num_heads; ++head) {
      for_rows(head, [&]<int kRows>(int64_t row, int64_t at) {
        Vec correction[kRows];
        weigh_rows<kRows>(scratch, row, at, keys, seen_keys<kRows>(scratch, row, keys), begin, end,
                          scratch.scores + at * kMaxBlock, correction);
        for (int r = 0; r < kRows; ++r) {
          store(scratch.corrections + (at + r) * kWidth, correction[r]);
        }
      });
    }
    for (int64_t head = 0; head < tile.num_heads; ++head) {
      const HeadRows<W> v =
          rows_as(block.of_head(head).v, num_keys, head_dim, scratch.v_widened, wide);
      RowsAhead<C> ahead(block.next_of_head(head).k);
      for_rows(head, [&]<int kRows>(int64_t row, int64_t at) {
        Vec correction[kRows];
        for (int r = 0; r < kRows; ++r) {
          correction[r] = load(scratch.corrections + (at + r) * kWidth);
        }
        const RowBlock<W, C> rows{{}, v, scratch.scores + at * kMaxBlock, ahead};
        add_values_seen<kRows>(scratch, rows, correction, seen_keys<kRows>(scratch, row, keys),
                               head_dim, scratch.acc + at * width);
        ahead = {};
      });
    }
  }

  static void attend_laid_out(TileScratch& scratch, int64_t num_rows, int64_t at, int64_t head_dim,
                              Range keys, const HeadBlock<W>& rows, ReadAhead& ahead) {
    const int64_t num_keys = ceil_div(keys.end - keys.begin, kWidth) * kWidth;
    // A copied row consists of whole pairs.
    const int64_t columns = ceil_div(head_dim, kPairWidth) * kPairWidth;
    BlockRows<float> gathered;
    gather_rows(rows.v, num_keys, head_dim, ahead, scratch.v_block, gathered.v);
#if defined(__AVX512F__)
    lay_out_keys(rows.k, head_dim, scratch.k_block);
    const PanelBlock block{scratch.k_block, {gathered.v, 0}};
#else
    gather_rows(rows.k, num_keys, head_dim, ahead, scratch.k_block, gathered.k);
    const RowBlock<float> block{{gathered.k, 0}, {gathered.v, 0}, scratch.scores, {}};
#endif
    attend_head<kPanelRows>(scratch, num_rows, at, columns, keys, block);
  }
};

}  // namespace eecore::cpu::EECORE_CAPABILITY
