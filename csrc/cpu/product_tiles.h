// How the linear layers divide a product: the tiles of a range of a weight's rows and the rows of
// x, and the last steps on a tile's products.
#pragma once

#include "packed_rows.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// The minimum of rows of a weight, of row_bytes each, that are worth a range of their own when
// num_batch rows of x are multiplied with them.
inline int64_t rows_per_range(const Parallel& parallel, int64_t row_bytes, int64_t num_batch) {
  // With more rows of x than this, multiplying takes longer than reading the weight.
  constexpr int64_t kReadBound = 8;
  const int64_t work = row_bytes * ceil_div(num_batch, kReadBound);
  return ceil_div(ceil_div(parallel.bytes_per_range, work), kPanelRows) * kPanelRows;
}

// Rows [row, row + num_rows) of a weight and [batch, batch + num_batch) of x.
struct Tile {
  int64_t row, num_rows;
  int64_t batch, num_batch;
  bool is_first;  // of the consecutive tiles that use these rows of the weight
  bool is_last;   // of these tiles; other rows of the weight are read next
};

// Visits the tiles of the rows [begin, end) of a weight that has `total` of them, and of num_batch
// rows of x: as many rows of x as stay in cache are multiplied with all rows of the weight, then
// the next ones. The same thread mostly has the next range as well.
template <typename W, typename Visit>
inline void for_each_tile(int64_t begin, int64_t end, int64_t total, int64_t num_batch,
                          int64_t x_stride, const Visit& visit) {
  const int64_t block = rows_in_cache<W>(x_stride), most = rows_at_once<W>(x_stride);
  for (int64_t first = 0; first < num_batch; first += block) {
    const int64_t stop = min_of(first + block, num_batch);
    const int64_t last = stop == num_batch ? total : end;
    for (int64_t row = begin; row < end; row += kTileRows) {
      const int64_t num_rows = min_of(kTileRows, end - row);
      for (int64_t batch = first; batch < stop; batch += most) {
        const int64_t count = min_of(most, stop - batch);
        const bool is_last = batch + count == stop && row + num_rows < last;
        visit(Tile{row, num_rows, batch, count, batch == first, is_last});
      }
    }
  }
}

// The first `lanes` elements of p, mostly all.
template <typename T>
inline Vec load_lanes(const T* p, int64_t lanes) {
  return lanes == kWidth ? load(p) : load_partial(p, lanes);
}
template <typename T>
inline void store_lanes(T* p, Vec x, int64_t lanes) {
  if (lanes == kWidth) return store(p, x);
  store_partial(p, x, lanes);
}

// values + bias, rounded to O as the result of a model's linear layer; the first `lanes` elements.
template <typename O, typename T>
inline Vec finish(const float* values, const T* bias, int64_t lanes) {
  Vec result = load_lanes(values, lanes);
  if (bias) result = result + load_lanes(bias, lanes);
  return round_to<O>(result);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
