// A block of keys in float32: of any dtype and on every CPU. What a key shares with a query is
// summed over both in vectors of columns.
#pragma once

#include "attention_block.h"
#include "turn.h"

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int kMaxGroupKeys = 8;  // keys that share queries in registers
// Lines of the next block to ask for at each 4 keys, of scores as of values: as many as 4 keys of
// 64 columns have.
constexpr int kLinesOfRows = 8;

// in[0..n) times factor, as pairs kept in the order of W's; the rest of the row is zero.
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

// scores[r][j] = q[r] . k[j] for j in [begin, end), both multiples of kMaxGroupKeys. `ahead` may be
// null.
template <int kRows, typename W>
void score_keys(const float* q, int64_t width, int64_t head_dim, HeadRows<W> rows, int64_t begin,
                int64_t end, ReadAhead* ahead, float* scores) {
  // As many sums as keep a core busy.
  constexpr int kKeys = kRows == 1 ? kMaxGroupKeys : 4;
  const int64_t whole = head_dim / kPairWidth * kPairWidth;
  for (int64_t j = begin; j < end; j += kKeys) {
    if (ahead != nullptr) ahead->ask(kLinesOfRows * kKeys / 4);
    const W* k[kKeys];
#pragma GCC unroll 8
    for (int i = 0; i < kKeys; ++i) k[i] = rows[j + i];
    Vec dots[kRows][kKeys];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) dots[r][i] = zero();
    }
    const auto multiply = [&]<int kVector>(int64_t d, const auto& key_at) {
      Vec queries[kRows];
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) queries[r] = load(q + r * width + d + kVector * kWidth);
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) {
        const Vec key = key_at(i);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) dots[r][i] = add_product(dots[r][i], queries[r], key);
      }
    };
    for (int64_t d = 0; d < whole; d += kPairWidth) {
      multiply.template operator()<0>(d, [&](int i) { return load_of_pair<0>(k[i] + d); });
      multiply.template operator()<1>(d, [&](int i) { return load_of_pair<1>(k[i] + d); });
    }
    if (whole < head_dim) {
      Pair keys[kKeys];
#pragma GCC unroll 8
      for (int i = 0; i < kKeys; ++i) keys[i] = load_pair_partial(k[i] + whole, head_dim - whole);
      multiply.template operator()<0>(whole, [&](int i) { return keys[i].a; });
      multiply.template operator()<1>(whole, [&](int i) { return keys[i].b; });
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kKeys; i += 4) sum_four(dots[r] + i, scores + r * kMaxBlock + j + i);
    }
  }
}

// acc[r][d..] = acc[r][d..] * correction[r] + sum over j in [begin, end) of scores[r][j] *
// v[j][d..], for kPairs pairs of vectors; of a partial one only `rest` elements exist in v. `ahead`
// may be null.
template <int kRows, int kPairs, bool kPartial, typename W>
void add_value_columns(const float* scores, const Vec* correction, HeadRows<W> rows, int64_t d,
                       int64_t rest, int64_t begin, int64_t end, ReadAhead* ahead, int64_t width,
                       float* acc) {
  Pair sums[kRows][kPairs];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) {
      sums[r][i] = load_kept(acc + r * width + d + i * kPairWidth) * correction[r];
    }
  }
  for (int64_t j = begin; j < end; ++j) {
    if (ahead != nullptr) ahead->ask(kLinesOfRows / 4 * kPairs / 2);
    const W* v = rows[j] + d;
    Vec weights[kRows];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) weights[r] = broadcast(scores[r * kMaxBlock + j]);
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) {
      const W* at = v + i * kPairWidth;
      const Pair partial = kPartial ? load_pair_partial(at, rest) : Pair{zero(), zero()};
      const Vec a = kPartial ? partial.a : load_of_pair<0>(at);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][i].a = add_product(sums[r][i].a, weights[r], a);
      const Vec b = kPartial ? partial.b : load_of_pair<1>(at);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][i].b = add_product(sums[r][i].b, weights[r], b);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) store_kept(acc + r * width + d + i * kPairWidth, sums[r][i]);
  }
}

template <int kRows, typename W>
void add_values(const float* scores, const Vec* correction, HeadRows<W> rows, int64_t head_dim,
                int64_t begin, int64_t end, ReadAhead* ahead, int64_t width, float* acc) {
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

// Rows where they lie.
template <typename W>
struct RowBlock {
  static constexpr int64_t kStep = 1;
  const HeadBlock<W>* rows;
  ReadAhead* ahead;  // null: nothing is asked for

  RowBlock quiet() const { return {rows, nullptr}; }

  template <int kRows>
  void score(TileScratch& scratch, int64_t at, Range seen, int64_t head_dim) const {
    const int64_t width = row_width(head_dim);
    score_keys<kRows>(scratch.q + at * width, width, head_dim, rows->k, seen.begin,
                      ceil_div(seen.end, kMaxGroupKeys) * kMaxGroupKeys, ahead, scratch.scores);
  }
  template <int kRows>
  void weigh(TileScratch&) const {}
  template <int kRows>
  void add(TileScratch& scratch, int64_t r, Range keys, const Vec* correction, int64_t head_dim,
           float* acc) const {
    add_values<kRows>(scratch.scores + r * kMaxBlock, correction, rows->v, head_dim, keys.begin,
                      keys.end, ahead, row_width(head_dim), acc);
  }
};

// Whether so many rows share a block that it pays to lay it out for them first.
inline bool takes_panel(int64_t num_rows) { return num_rows > 2 * kGroupRows; }

// Vectors of keys that a group of rows takes at a time.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int kPanelVectors = 4;
#else
constexpr int kPanelVectors = 2;
#endif
static_assert(kMaxBlock % (kPanelVectors * kWidth) == 0);

// Whole vectors of a row of so many columns, in pairs.
inline int64_t vectors_of(int64_t head_dim) { return ceil_div(head_dim, kPairWidth) * 2; }

// Lanes of a panel that are summed at a time, each in registers of its own.
#if defined(__AVX512F__)
constexpr int kPanelLanes = 2;
#else
constexpr int kPanelLanes = 1;
#endif

// Lays the keys of a block out as columns in float32: kPanelLanes lanes after each other in the
// order in which sum_four adds them, and of those vector by vector; and its values as rows in
// float32. `ahead` asks for the lines of a row at each.
template <typename W>
void lay_out_panel(const HeadBlock<W>& block, int64_t num_keys, int64_t head_dim, ReadAhead& ahead,
                   TileScratch& scratch, const float** values) {
  const int64_t width = row_width(head_dim), num_vectors = vectors_of(head_dim);
  const int lines = static_cast<int>(ceil_div(head_dim * int64_t{sizeof(W)}, 64)) * 2;
  for (int64_t j = 0; j < kMaxBlock; j += kWidth) {
    const auto put = [&](Vec(&lanes)[kWidth], int64_t vector) {
      turn(lanes);
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) {
        const int64_t place = (i / kPanelLanes * num_vectors + vector) * kPanelLanes;
        store(scratch.k_block + (place + i % kPanelLanes) * kMaxBlock + j, lanes[lane_of(i)]);
      }
    };
    for (int64_t vector = 0; vector < num_vectors; vector += 2) {
      const int64_t d = vector * kWidth, rest = head_dim - d;
      Vec a[kWidth], b[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) {
        const W* key = block.k[j + i] + d;
        const Pair pair = rest >= kPairWidth ? load_pair(key) : load_pair_partial(key, rest);
        a[i] = pair.a;
        b[i] = pair.b;
      }
      put(a, vector);
      put(b, vector + 1);
    }
  }
  for (int64_t j = 0; j < num_keys; ++j) {
    float* value = scratch.v_block + j * width;
    widen_row<W>(block.v[j], head_dim, broadcast(1.0f), width, value);
    values[j] = value;
    ahead.ask(lines);
  }
}

// scores[r][j] = q[r] . k[j] for j of so many vectors, from a panel: the same sums as score_keys',
// with keys in the place of lanes.
template <int kRows, int kVectors>
void score_panel(const float* q, int64_t width, int64_t num_vectors, const float* k,
                 float* scores) {
  struct Sums {
    Vec of[kRows][kVectors];

    void add(const Sums& others) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) of[r][i] = others.of[r][i] + of[r][i];
      }
    }
  };
  constexpr int kNumPlaces = kWidth / kPanelLanes;
  Sums earlier[3];  // at level i of 2^i places
  for (int place = 0; place < kNumPlaces; ++place) {
    Sums sums[kPanelLanes];
#pragma GCC unroll 2
    for (int l = 0; l < kPanelLanes; ++l) {
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) sums[l].of[r][i] = zero();
      }
    }
    const float* queries = q;
    for (int64_t vector = 0; vector < num_vectors; ++vector, queries += kWidth) {
#pragma GCC unroll 2
      for (int l = 0; l < kPanelLanes; ++l, k += kMaxBlock) {
        const float* query = queries + lane_of(place * kPanelLanes + l);
        Vec keys[kVectors];
#pragma GCC unroll 8
        for (int i = 0; i < kVectors; ++i) keys[i] = load(k + i * kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          const Vec x = broadcast(query[r * width]);
#pragma GCC unroll 8
          for (int i = 0; i < kVectors; ++i) {
            sums[l].of[r][i] = add_product(sums[l].of[r][i], x, keys[i]);
          }
        }
      }
    }
    if constexpr (kPanelLanes == 2) sums[1].add(sums[0]);
    Sums& sum = sums[kPanelLanes - 1];
    int level = 0;
    for (; place >> level & 1; ++level) sum.add(earlier[level]);
    if (place + 1 < kNumPlaces) {
      earlier[level] = sum;
      continue;
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
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
  void score(TileScratch& scratch, int64_t at, Range seen, int64_t head_dim) const {
    constexpr int kKeys = kPanelVectors * kWidth;
    const int64_t width = row_width(head_dim);
    for (int64_t j = seen.begin / kKeys * kKeys; j < seen.end; j += kKeys) {
      score_panel<kRows, kPanelVectors>(scratch.q + at * width, width, vectors_of(head_dim), k + j,
                                        scratch.scores + j);
    }
  }
  template <int kRows>
  void weigh(TileScratch&) const {}
  template <int kRows>
  void add(TileScratch& scratch, int64_t r, Range keys, const Vec* correction, int64_t head_dim,
           float* acc) const {
    add_values<kRows>(scratch.scores + r * kMaxBlock, correction, v,
                      ceil_div(head_dim, kPairWidth) * kPairWidth, keys.begin, keys.end, nullptr,
                      row_width(head_dim), acc);
  }
};

// In float32, of rows of W.
template <typename W>
struct InFloats {
  static constexpr bool kHasTiles = false;
  using Wide = W;
  struct Unit {
    void take(int64_t) {}
  };

  // A query times scale.
  template <typename T>
  static void take_query(const T* q, int64_t head_dim, float scale, int64_t at, int64_t,
                         TileScratch& scratch) {
    const int64_t width = row_width(head_dim);
    widen_row<W>(q, head_dim, broadcast(scale), width, scratch.q + at * width);
  }

  template <typename C, typename Scale>
  static void attend(TileScratch& scratch, const AttentionTile& tile, int64_t head_dim,
                     const Scale&, Range keys, const CachedBlock<C>& block) {
    const int64_t num_keys = keys.end - keys.begin;
    const W *wide_k[kMaxBlock], *wide_v[kMaxBlock];
    for (int64_t head = 0; head < tile.num_heads; ++head) {
      const HeadBlock<C> own = block.of_head(head);
      const HeadBlock<W> rows = {rows_as(own.k, num_keys, head_dim, scratch.k_widened, wide_k),
                                 rows_as(own.v, num_keys, head_dim, scratch.v_widened, wide_v)};
      ReadAhead ahead = block.ahead_of(head, block_size(head_dim), head_dim);
      const int64_t num_rows = tile.num_rows, at = tile.held(head, 0);
      if (takes_panel(num_rows)) {
        const float* values[kMaxBlock];
        lay_out_panel(rows, num_keys, head_dim, ahead, scratch, values);
        attend_head<kPanelRows>(scratch, num_rows, at, head_dim, keys,
                                PanelBlock{scratch.k_block, {values, 0}});
      } else {
        attend_head<kGroupRows>(scratch, num_rows, at, head_dim, keys,
                                RowBlock<W>{&rows, &ahead});
      }
      ahead.ask_rest();
    }
  }
};

}  // namespace eecore::cpu::EECORE_CAPABILITY
