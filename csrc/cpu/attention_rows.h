// A block of keys in float32: of any dtype and on every CPU. What a key shares with a query is
// summed over both in vectors of columns.
#pragma once

#include "attention_block.h"

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int kGroupKeys = 4;   // keys that share a query in registers
constexpr int kGroupPairs = 2;  // pairs of vectors of a value row

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

// scores[r][j] = q[r] . k[j] for j in [begin, end), both multiples of kGroupKeys.
template <int kRows, typename T, typename N>
void score_keys(const float* q, int64_t width, int64_t head_dim, HeadRows<T> rows, HeadRows<N> next,
                int64_t begin, int64_t end, float* scores) {
  const int64_t whole = head_dim / kPairWidth * kPairWidth;
  for (int64_t j = begin; j < end; j += kGroupKeys) {
    prefetch_rows(next, j, kGroupKeys, head_dim);
    const T* k[kGroupKeys];
    for (int i = 0; i < kGroupKeys; ++i) k[i] = rows[j + i];
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
template <int kRows, int kPairs, bool kPartial, typename T, typename N>
void add_value_columns(const float* scores, const Vec* correction, HeadRows<T> rows,
                       HeadRows<N> next, int64_t d, int64_t rest, int64_t begin, int64_t end,
                       int64_t width, float* acc) {
  Pair sums[kRows][kPairs];
  for (int r = 0; r < kRows; ++r) {
    for (int i = 0; i < kPairs; ++i) {
      sums[r][i] = load_kept(acc + r * width + d + i * kPairWidth) * correction[r];
    }
  }
  for (int64_t j = begin; j < end; ++j) {
    if (next.rows != nullptr) prefetch_row(next[j] + d, kPairs * kPairWidth);
    const T* v = rows[j] + d;
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

template <int kRows, typename T, typename N>
void add_values(const float* scores, const Vec* correction, HeadRows<T> rows, HeadRows<N> next,
                int64_t head_dim, int64_t begin, int64_t end, int64_t width, float* acc) {
  const auto columns = [&]<int kPairs, bool kPartial>(int64_t d, int64_t rest) {
    add_value_columns<kRows, kPairs, kPartial>(scores, correction, rows, next, d, rest, begin, end,
                                               width, acc);
  };
  int64_t d = 0;
  for (; d + kGroupPairs * kPairWidth <= head_dim; d += kGroupPairs * kPairWidth) {
    columns.template operator()<kGroupPairs, false>(d, 0);
  }
  for (; d + kPairWidth <= head_dim; d += kPairWidth) columns.template operator()<1, false>(d, 0);
  if (d < head_dim) columns.template operator()<1, true>(d, head_dim - d);
}

// Rows where they lie. `next` is read next, from where it lies.
template <typename T, typename N>
struct RowBlock {
  static constexpr int64_t kStep = 1;
  const HeadBlock<T>* rows;
  const HeadBlock<N>* next;  // may be null

  RowBlock quiet() const { return {rows, nullptr}; }

  template <int kRows>
  void score(TileScratch& scratch, int64_t at, Range seen, int64_t head_dim) const {
    const int64_t width = row_width(head_dim);
    score_keys<kRows>(scratch.q + at * width, width, head_dim, rows->k,
                      next ? next->k : HeadRows<N>{}, seen.begin,
                      ceil_div(seen.end, kGroupKeys) * kGroupKeys, scratch.scores);
  }
  template <int kRows>
  void weigh(TileScratch&) const {}
  template <int kRows>
  void add(TileScratch& scratch, int64_t r, Range keys, const Vec* correction, int64_t head_dim,
           float* acc) const {
    add_values<kRows>(scratch.scores + r * kMaxBlock, correction, rows->v,
                      next ? next->v : HeadRows<N>{}, head_dim, keys.begin, keys.end,
                      row_width(head_dim), acc);
  }
};

// Whether many rows share a block, so that it pays to lay it out as consecutive float32 rows first:
// bfloat16 is widened once, and slots a power of two apart no longer fall into the same cache sets.
inline bool gathers_block(int64_t num_rows) { return num_rows > 2 * kGroupRows; }

template <typename T>
void gather_block(const HeadBlock<T>& block, int64_t num_keys, int64_t head_dim,
                  TileScratch& scratch, BlockRows<float>& gathered) {
  const int64_t width = row_width(head_dim);
  const Vec one = broadcast(1.0f);
  for (int64_t j = 0; j < num_keys; ++j) {
    float* k = scratch.k_block + j * width;
    float* v = scratch.v_block + j * width;
    widen_row(block.k[j], head_dim, one, width, k);
    widen_row(block.v[j], head_dim, one, width, v);
    gathered.k[j] = k;
    gathered.v[j] = v;
  }
}

// In float32, of rows of T.
template <typename T>
struct InFloats {
  static constexpr bool kHasTiles = false;
  using Wide = T;
  struct Unit {
    void take(int64_t) {}
  };

  // A query times scale.
  static void take_query(const T* q, int64_t head_dim, float scale, int64_t at, int64_t,
                         TileScratch& scratch) {
    const int64_t width = row_width(head_dim);
    widen_row(q, head_dim, broadcast(scale), width, scratch.q + at * width);
  }

  template <typename C, typename Scale>
  static void attend(TileScratch& scratch, const AttentionTile& tile, int64_t head_dim,
                     const Scale&, Range keys, const CachedBlock<C>& block) {
    const int64_t num_keys = keys.end - keys.begin;
    for (int64_t head = 0; head < tile.num_heads; ++head) {
      const HeadBlock<C> own = block.of_head(head), after = block.after_head(head);
      if constexpr (kIsSame<C, T>) {
        attend_rows_of(scratch, tile, head, head_dim, keys, own, after, false);
      } else {
        BlockRows<T> wide;
        const HeadBlock<T> rows = {rows_as(own.k, num_keys, head_dim, scratch.k_widened, wide.k),
                                   rows_as(own.v, num_keys, head_dim, scratch.v_widened, wide.v)};
        attend_rows_of(scratch, tile, head, head_dim, keys, rows, after, true);
      }
    }
  }

 private:
  // is_laid_out: the block's rows lie side by side already.
  template <typename N>
  static void attend_rows_of(TileScratch& scratch, const AttentionTile& tile, int64_t head,
                             int64_t head_dim, Range keys, const HeadBlock<T>& block,
                             const HeadBlock<N>& next, bool is_laid_out) {
    const int64_t num_rows = tile.num_rows, at = tile.held(head, 0);
    if ((kIsSame<T, float> && is_laid_out) || !gathers_block(num_rows)) {
      return attend_head(scratch, num_rows, at, head_dim, keys, RowBlock<T, N>{&block, &next});
    }
    BlockRows<float> gathered;
    const int64_t num_keys = ceil_div(keys.end - keys.begin, kGroupKeys) * kGroupKeys;
    gather_block(block, num_keys, head_dim, scratch, gathered);
    const HeadBlock<float> rows{{gathered.k, 0}, {gathered.v, 0}};
    // A gathered row is made of whole pairs.
    attend_head(scratch, num_rows, at, ceil_div(head_dim, kPairWidth) * kPairWidth, keys,
                RowBlock<float, N>{&rows, &next});
  }
};

}  // namespace eecore::cpu::EECORE_CAPABILITY
