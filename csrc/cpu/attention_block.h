// A block of keys and values in a cache of C, by kv head of a tile, and its rows in the type that
// is multiplied, which holds every number of C exactly.
#pragma once

#include "attention_tile.h"
#include "float8_pairs.h"

namespace eecore::cpu::EECORE_CAPABILITY {

template <typename A, typename B>
constexpr bool kIsSame = false;
template <typename A>
constexpr bool kIsSame<A, A> = true;

// The factor that turns a stored number of W into its value.
template <typename W>
constexpr float unit_of() {
#if defined(__AVX2__)
  if constexpr (kIsSame<W, ScaledHalf>) return kScaledHalf;
#endif
  return 1.0f;
}

// Prefetches the keys and then the values that are read next, a few lines at a time: a core can
// have few of them in flight, so many requests at once would wait for each other, and memory would
// idle afterwards.
class ReadAhead {
 public:
  // `width` elements of each of the rows [begin, end) of a block.
  template <typename T>
  ReadAhead(const HeadBlock<T>& block, int64_t begin, int64_t end, int64_t width)
      : parts_{part_of(block.k), part_of(block.v)},
        row_bytes_(width * static_cast<int64_t>(sizeof(T))),
        begin_(begin),
        end_(end),
        part_(block.exists() && begin < end ? 0 : kNumParts) {
    begin_row();
  }

  // Prefetches the next lines, as far as there are any.
  void ask(int lines) {
    for (int i = 0; i < lines && line_ != nullptr; ++i) {
      prefetch(line_);
      line_ += kLine;
      if (line_ < row_end_) continue;
      if (++row_ == end_) ++part_;
      begin_row();
    }
  }
  void ask_rest() {
    while (line_ != nullptr) ask(8);
  }

 private:
  static constexpr int64_t kLine = 64;
  static constexpr int kNumParts = 2;
  // The keys of the block, or its values.
  struct Part {
    const char* const* rows;
    int64_t offset;  // bytes
  };
  template <typename T>
  static Part part_of(const HeadRows<T>& rows) {
    return {reinterpret_cast<const char* const*>(rows.rows),
            rows.offset * static_cast<int64_t>(sizeof(T))};
  }
  void begin_row() {
    if (row_ == end_) row_ = begin_;
    line_ = nullptr;
    if (part_ == kNumParts) return;
    line_ = parts_[part_].rows[row_] + parts_[part_].offset;
    row_end_ = line_ + row_bytes_;
  }

  Part parts_[kNumParts];
  int64_t row_bytes_, begin_, end_;
  int part_;
  int64_t row_ = begin_;
  const char *line_, *row_end_ = nullptr;
};

// Prefetches the rows of one kv head that are read next, while the same rows of the current block
// are processed.
template <typename C>
class RowsAhead {
 public:
  RowsAhead() = default;
  explicit RowsAhead(const HeadRows<C>& rows) : rows_(rows) {}

  // Prefetches kColumns columns of a row, from d on, which is a multiple of kColumns.
  template <int kColumns>
  [[gnu::always_inline]] void ask(int64_t row, int64_t d) const {
    constexpr int kLine = 64 / sizeof(C);
    if (rows_.rows == nullptr || (kColumns < kLine && d % kLine != 0)) return;
    EECORE_UNROLL
    for (int i = 0; i < kColumns; i += kLine) prefetch(rows_[row] + d + i);
  }

 private:
  HeadRows<C> rows_{nullptr, 0};  // null: nothing is read
};

template <typename C>
struct CachedBlock {
  const BlockRows<C>* rows;  // of the tile's first kv head
  const BlockRows<C>* next;  // of the next block; null: there is none
  int64_t num_heads, k_stride, v_stride;

  HeadBlock<C> of_head(int64_t head) const { return of(rows, head); }
  // The same for the next block.
  HeadBlock<C> next_of_head(int64_t head) const { return of(next, head); }
  // What is read after a head, where heads are processed one after the other.
  HeadBlock<C> after_head(int64_t head) const {
    return head + 1 < num_heads ? of_head(head + 1) : next_of_head(0);
  }
  // What to prefetch during a head: what is read after it, or, where the heads of a key are short
  // and adjacent, a part of the next block's keys with all of their heads. A few lines here and
  // there are read more slowly than lines in memory's own order.
  ReadAhead ahead_of(int64_t head, int64_t num_keys, int64_t head_dim) const {
    constexpr int64_t kShort = 128 / static_cast<int64_t>(sizeof(C));
    if (head_dim > kShort || k_stride != head_dim || v_stride != head_dim) {
      return {after_head(head), 0, num_keys, head_dim};
    }
    return {next_of_head(0), num_keys * head / num_heads, num_keys * (head + 1) / num_heads,
            num_heads * head_dim};
  }

 private:
  HeadBlock<C> of(const BlockRows<C>* from, int64_t head) const {
    if (from == nullptr) return {};
    return {{from->k, head * k_stride}, {from->v, head * v_stride}};
  }
};

// Prefetches n elements of a row that is read next. Pages are at arbitrary addresses, and the slots
// of a head are mostly a row of all heads apart, so the hardware prefetcher does not predict them.
template <typename T>
inline void prefetch_row(const T* row, int64_t n) {
  for (int64_t i = 0; i < n; i += 64 / static_cast<int64_t>(sizeof(T))) {
    prefetch(row + i);
  }
}
// The same for `count` rows from `first` on, if there are any.
template <typename T>
inline void prefetch_rows(const HeadRows<T>& rows, int64_t first, int64_t count, int64_t n) {
  if (rows.rows == nullptr) return;
  for (int64_t i = first; i < first + count; ++i) prefetch_row(rows[i], n);
}

// Converts rows of C to rows of W. Where that turns NaN into a finite number, it reports that there
// was a NaN, and widen_nan converts the rows again.
template <typename C, typename W>
struct RowWidener {
  static constexpr bool has_nan() { return false; }
  static void widen_nan(const C*, int64_t, W*) {}

  void widen(const C* in, int64_t n, W* out) const {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(out + i, load(in + i));
    if (i < n) store(out + i, load_partial(in + i, n - i));
  }
};
#if defined(__AVX2__)
template <>
struct RowWidener<Float8, ScaledHalf> : ScaledHalves {};
#endif
#if defined(__AVX512BF16__)
template <>
struct RowWidener<Float8, BFloat16> {
  Float8Widener widener;

  static constexpr bool has_nan() { return false; }
  static void widen_nan(const Float8*, int64_t, BFloat16*) {}

  void widen(const Float8* in, int64_t n, BFloat16* out) const {
    for (int64_t i = 0; i < n; i += 64) {
      const Float8Words words = widener.load(in + i, n - i);
      _mm512_storeu_si512(out + i, words.low);
      if (n - i > 32) _mm512_storeu_si512(out + i + 32, words.high);
    }
  }
};
#endif

// Rows as W: in place, or in `room` with pointers to them in `widened`. After the last key, the
// last one is repeated.
template <typename C, typename W>
HeadRows<W> rows_as(const HeadRows<C>& rows, int64_t num_keys, int64_t head_dim, uint8_t* room,
                    const W** widened) {
  if constexpr (kIsSame<C, W>) {
    return rows;
  } else {
    W* wide = reinterpret_cast<W*>(room);
    const int64_t width = row_width(head_dim);
    RowWidener<C, W> widener;
    for (int64_t j = 0; j < num_keys; ++j) widener.widen(rows[j], head_dim, wide + j * width);
    if (widener.has_nan()) [[unlikely]] {
      for (int64_t j = 0; j < num_keys; ++j) widener.widen_nan(rows[j], head_dim, wide + j * width);
    }
    for (int64_t j = 0; j < kMaxBlock; ++j) widened[j] = wide + min_of(j, num_keys - 1) * width;
    return {widened, 0};
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
