// out[b, r] = sum_k x[b, k] * w[r, k] for any number of rows b: w is read in row order, once for
// every block of x that stays in cache, so only once if there are few rows.
//
// A block of kRows weight rows is multiplied with up to kMaxBatch rows of x, with one sum of vector
// lanes per pair, k ascending, whatever the block; the lanes are added in one order. So a result
// never depends on which other rows were computed with it, nor on how many. x is packed first, see
// weight_format.h. The next block of w is prefetched while this one is multiplied. Rows that are
// too long for the first-level cache are processed in chunks of columns, and sums of floats are
// kept in memory between the chunks.
#pragma once

#include "scratch.h"
#include "weight_format.h"

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int kRows = 4;
// Rows of a weight in one call of multiply; rows of x, with vectors and at most: matrix tiles take
// many, so that a part of the weight that lies in the first-level cache is used often.
constexpr int64_t kTileRows = 32;
constexpr int64_t kTileBatch = 32;
constexpr int64_t kMaxTileBatch = 256;
// Bytes of x that stay in the first-level cache together with the weights; bytes of one row in a
// chunk where x does not; bytes of x that stay in the second level while a weight passes by.
constexpr int64_t kFirstLevelBytes = 26 << 10;
constexpr int64_t kChunkBytes = 3 << 10;
constexpr int64_t kSecondLevelBytes = 320 << 10;
// The same on a CPU with matrix tiles: each has a second-level cache of 2 MiB.
constexpr int64_t kSecondLevelBytesWithTiles = 1 << 20;

// Columns of a chunk with num_batch rows of x.
template <typename W>
inline int64_t chunk_of(int64_t num_batch, int64_t n) {
  const int64_t row_bytes = n * static_cast<int64_t>(sizeof(PackedX<W>));
  if (num_batch <= Format<W>::kMaxBatch || num_batch * row_bytes <= kFirstLevelBytes) return n;
  const int64_t num_chunks = ceil_div(row_bytes, kChunkBytes);
  return ceil_div(ceil_div(n, num_chunks), Format<W>::kStep) * Format<W>::kStep;
}

// Rows of x to multiply with all rows of a weight before the next ones, a multiple of kTileBatch.
template <typename W>
inline int64_t rows_in_cache(int64_t x_stride) {
  const int64_t row_bytes = x_stride * static_cast<int64_t>(sizeof(PackedX<W>));
  const int64_t bytes = Unit<W>::uses_tiles() ? kSecondLevelBytesWithTiles : kSecondLevelBytes;
  return max_of(bytes / row_bytes / kTileBatch, 1) * kTileBatch;
}

// Rows of x in one call of multiply, a multiple of kTileBatch, at most kMaxTileBatch.
template <typename W>
inline int64_t rows_at_once(int64_t x_stride) {
  return Unit<W>::uses_tiles() ? min_of(rows_in_cache<W>(x_stride), kMaxTileBatch) : kTileBatch;
}
// The products of such a call. Kept by a thread: see scratch.h.
struct Products {
  float row[kMaxTileBatch][kTileRows];
};

// A block of a product: rows of w and of x, and columns of them.
template <typename W>
struct Block {
  const W* w;           // first column, row stride w_stride
  const PackedX<W>* x;  // first column, row stride x_stride
  const W* ahead;       // rows with the stride of w to prefetch meanwhile
  int64_t w_stride, x_stride;
  int64_t num_columns;
  // Sums between chunks, [kBatch, kRows]; may be null: these columns are the first or the last
  // ones.
  const typename Format<W>::Sums* before;
  typename Format<W>::Sums* after;
  float* out;  // out[b * out_stride + r], written after the last columns
  int64_t out_stride;
  bool adds;  // to the contents of out
};

// kWRows rows of w and kBatch rows of x; kAhead rows are prefetched, with kNear into the
// first-level cache. A separate function, so that the compiler keeps the sums in registers.
template <int kWRows, int kBatch, int kAhead, bool kNear, typename W>
[[gnu::noinline]] void multiply_block(const Block<W>& block) {
  using F = Format<W>;
  constexpr int kStep = F::kStep;
  const W* w = block.w;
  const W* ahead = block.ahead;
  const PackedX<W>* x = block.x;
  const int64_t w_stride = block.w_stride, x_stride = block.x_stride;
  typename F::Sums sums[kBatch][kWRows];
#pragma GCC unroll 6
  for (int b = 0; b < kBatch; ++b) {
#pragma GCC unroll 4
    for (int r = 0; r < kWRows; ++r) {
      sums[b][r] = block.before ? block.before[b * kRows + r] : F::start();
    }
  }
  int64_t k = 0;
  for (; k + kStep <= block.num_columns; k += kStep) {
#pragma GCC unroll 4
    for (int r = 0; r < kAhead; ++r) {
      for (int line = 0; line < kStep; line += static_cast<int>(64 / sizeof(W))) {
        prefetch_weight<kNear>(ahead + r * w_stride + k + line);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kWRows; ++r) {
      const auto loaded = F::load(w + r * w_stride + k);
#pragma GCC unroll 6
      for (int b = 0; b < kBatch; ++b) {
        sums[b][r] = F::multiply_add(loaded, x + b * x_stride + k, sums[b][r]);
      }
    }
  }
  if (k < block.num_columns) {
#pragma GCC unroll 4
    for (int r = 0; r < kWRows; ++r) {
      const auto loaded = F::load_partial(w + r * w_stride + k, block.num_columns - k);
#pragma GCC unroll 6
      for (int b = 0; b < kBatch; ++b) {
        sums[b][r] = F::multiply_add(loaded, x + b * x_stride + k, sums[b][r]);
      }
    }
  }
  if (block.after) {
#pragma GCC unroll 6
    for (int b = 0; b < kBatch; ++b) {
#pragma GCC unroll 4
      for (int r = 0; r < kWRows; ++r) block.after[b * kRows + r] = sums[b][r];
    }
    return;
  }
#pragma GCC unroll 6
  for (int b = 0; b < kBatch; ++b) {
    typename F::Sums four[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) four[r] = r < kWRows ? sums[b][r] : F::start();
    float* out = block.out + b * block.out_stride;
    if constexpr (kWRows == kRows && F::kMaxColumns == kAnyColumns) {
      sum_four(four, out);
    } else {
      float totals[kRows];
      sum_four(four, totals);
      for (int r = 0; r < kWRows; ++r) out[r] = block.adds ? out[r] + totals[r] : totals[r];
    }
  }
}

// The same with prefetches into the level that suits this machine.
template <int kWRows, int kBatch, int kAhead, typename W>
inline void multiply_ahead(const Block<W>& block) {
#if defined(__AVX512BF16__)
  if (kAsksFirstLevel) return multiply_block<kWRows, kBatch, kAhead, true>(block);
#endif
  multiply_block<kWRows, kBatch, kAhead, false>(block);
}

// The same with the number of rows to prefetch (0, 1, 2 or kRows) and of rows of x as arguments.
template <int kWRows, int kBatch, typename W>
inline void multiply_block(const Block<W>& block, int64_t batch, int64_t num_ahead) {
  if constexpr (kBatch > 1) {
    if (batch < kBatch) {
      return multiply_block<kWRows, kBatch - 1>(block, batch, num_ahead);
    }
  }
  if constexpr (kWRows == kRows) {
    switch (num_ahead) {
      case 4:
        return multiply_ahead<kWRows, kBatch, 4>(block);
      case 2:
        return multiply_ahead<kWRows, kBatch, 2>(block);
      case 1:
        return multiply_ahead<kWRows, kBatch, 1>(block);
    }
  }
  return multiply_block<kWRows, kBatch, 0, false>(block);
}

// Stores out[b, r] * scale of row b of x * scale of row r of w, for a tile.
template <typename W>
inline void scale_tile(const WeightRows<W>& w, int64_t num_rows, const PackedX<W>* x,
                       int64_t x_stride, int64_t num_batch, float* out, int64_t out_stride) {
  for (int64_t b = 0; b < num_batch; ++b, out += out_stride) {
    const Vec scale = broadcast(Format<W>::scale(x + b * x_stride));
    for (int64_t r = 0; r < num_rows; r += kWidth) {
      const int64_t lanes = min_of(num_rows - r, kWidth);
      const Vec factors = scale * load_partial(w.scales + r, lanes);
      store_partial(out + r, load_partial(out + r, lanes) * factors, lanes);
    }
  }
}

// The sums of a block of rows of w and all rows of x, between chunks of columns.
template <typename W>
struct alignas(64) WaitingSums {
  typename Format<W>::Sums sums[kTileBatch * kRows];
};

// out[b, r]: [num_batch, num_rows] with row stride out_stride, from rows of w and packed x:
// [num_batch, n packed], num_rows <= kTileRows, num_batch <= rows_at_once. `next`: the rows of w
// that are read after these; may be null.
template <typename W>
inline void multiply(const Unit<W>&, const WeightRows<W>& w, int64_t num_rows, const PackedX<W>* x,
                     int64_t x_stride, int64_t num_batch, int64_t n, const W* next, float* out,
                     int64_t out_stride) {
  using F = Format<W>;
  using Sums = typename F::Sums;
  if constexpr (requires { F::kMaxInOrder; }) {
    // With few rows of x memory is the limit, and it is read fastest from one end to the other.
    if (num_batch <= F::kMaxInOrder) {
      Block<W> block{w.row(0), x + F::kHeader, nullptr, w.stride,   x_stride, n,
                     nullptr,  nullptr,        out,     out_stride, false};
      for (int64_t r = 0; r < num_rows; ++r, block.w += w.stride, ++block.out) {
        multiply_block<1, F::kMaxInOrder>(block, num_batch, 0);
      }
      return;
    }
  }
  // Sums wait for the next chunk, or are complete after as many columns as they may hold.
  constexpr bool kWaits = F::kMaxColumns == kAnyColumns;
  const int64_t chunk = kWaits ? chunk_of<W>(num_batch, n) : F::kMaxColumns;
  // Groups of rows of x, as equal as possible. Each prefetches its share, so that memory never
  // idles.
  const int64_t num_groups = ceil_div(num_batch, F::kMaxBatch);
  Sums* const waiting = kWaits && chunk < n ? kept_by_thread<WaitingSums<W>>().sums : nullptr;
  for (int64_t r = 0; r < num_rows; r += kRows) {
    for (int64_t begin = 0, end; begin < n; begin = end) {
      end = min_of(begin + chunk, n);
      const W* rows = w.row(r);
      // What is read after this block: the next chunk, or the next rows.
      const W* ahead = end < n ? rows + end : r + kRows < num_rows ? w.row(r + kRows) : next;
      for (int64_t group = 0, b = 0; group < num_groups; ++group) {
        const int64_t batch = (num_batch + group) / num_groups;
        const int64_t from = group * kRows / num_groups, to = (group + 1) * kRows / num_groups;
        Block<W> block{rows + begin,
                       x + b * x_stride + F::kHeader + begin,
                       ahead ? ahead + from * w.stride : nullptr,
                       w.stride,
                       x_stride,
                       end - begin,
                       waiting && begin > 0 ? waiting + b * kRows : nullptr,
                       waiting && end < n ? waiting + b * kRows : nullptr,
                       out + b * out_stride + r,
                       out_stride,
                       !kWaits && begin > 0};
        b += batch;
        if (r + kRows <= num_rows) {
          multiply_block<kRows, F::kMaxBatch>(block, batch, ahead ? to - from : 0);
          continue;
        }
        for (int64_t i = 0; i < num_rows - r; ++i) {
          multiply_block<1, F::kMaxBatch>(block, batch, 0);
          block.w += w.stride;
          if (block.before) ++block.before;
          if (block.after) ++block.after;
          ++block.out;
        }
      }
    }
  }
  if constexpr (!kWaits) {
    scale_tile<W>(w, num_rows, x, x_stride, num_batch, out, out_stride);
  }
}

// The same with an int8 weight, see multiply_int8.cpp.
void multiply_int8(const Int8Product& product);
inline void multiply(const Unit<Int8>&, const WeightRows<Int8>& w, int64_t num_rows,
                     const int16_t* x, int64_t x_stride, int64_t num_batch, int64_t n,
                     const Int8* next, float* out, int64_t out_stride) {
  multiply_int8(
      {w.data, w.stride, w.scales, num_rows, x, x_stride, num_batch, n, next, out, out_stride});
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
