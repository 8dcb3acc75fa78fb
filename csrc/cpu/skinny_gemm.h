// out[b, r] = sum_k x[b, k] * w[r, k] for few rows b: w is read once, from memory, in row order.
//
// A block of kRows weight rows meets up to kMaxBatch rows of x with one sum of vector lanes per
// pair, k ascending, whatever the block: a result never depends on which other rows were computed
// with it. x is packed first, see weight_format.h. The next block of w is prefetched while this one
// is multiplied. Where the rows of x would not stay in the first-level cache, a tile of w is
// crossed in chunks of columns, and the sums wait in memory between them.
#pragma once

#include "weight_format.h"

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int kRows = 4;
// Rows of a weight and of x that meet in one call of multiply.
constexpr int64_t kTileRows = 32;
constexpr int64_t kTileBatch = 32;
// Bytes of x that stay in the first-level cache beside the weights; those of a chunk where they
// would not, and the fewest columns of one, a multiple of every step.
constexpr int64_t kCachedBytes = 26 << 10;
constexpr int64_t kChunkBytes = 16 << 10;
constexpr int64_t kMinChunk = 512;

// Columns to cross at once with num_batch rows of x.
template <typename W>
inline int64_t chunk_of(int64_t num_batch, int64_t n) {
  const int64_t element_bytes = packed_columns<W>(1) * static_cast<int64_t>(sizeof(PackedX<W>));
  const bool is_cached = num_batch * n * element_bytes <= kCachedBytes;
  if (num_batch <= Format<W>::kMaxBatch || is_cached) return n;
  return max_of(kChunkBytes / (num_batch * element_bytes * kMinChunk), 1) * kMinChunk;
}

// A block of a product: rows of w and of x, columns [begin, end) of n.
template <typename W>
struct Block {
  WeightRows<W> w;
  const PackedX<W>* x;  // row stride x_stride
  int64_t x_stride;
  int64_t begin, end, n;
  const W* ahead;                     // rows with the stride of w to prefetch meanwhile
  typename Format<W>::Sums* waiting;  // [kBatch, kRows], between chunks
  float* out;                         // out[b * out_stride + r]
  int64_t out_stride;
};

// kWRows rows of w and kBatch rows of x; kAhead rows are prefetched.
template <int kWRows, int kBatch, int kAhead, typename W>
inline void multiply_block(const Block<W>& block) {
  using F = Format<W>;
  constexpr int kStep = F::kStep;
  const W* w = block.w.data;
  const W* ahead = block.ahead;
  const int64_t w_stride = block.w.stride, x_stride = block.x_stride;
  const PackedX<W>* x = block.x;
  typename F::Sums sums[kBatch][kWRows];
#pragma GCC unroll 4
  for (int b = 0; b < kBatch; ++b) {
#pragma GCC unroll 4
    for (int r = 0; r < kWRows; ++r) {
      sums[b][r] = block.begin == 0 ? F::start(x + b * x_stride) : block.waiting[b * kRows + r];
    }
  }
  int64_t k = block.begin;
  x += packed_offset<W>(k);
  for (; k + kStep <= block.end; k += kStep, x += packed_columns<W>(kStep)) {
#pragma GCC unroll 4
    for (int r = 0; r < kAhead; ++r) {
      for (int line = 0; line < kStep; line += static_cast<int>(64 / sizeof(W))) {
        __builtin_prefetch(ahead + r * w_stride + k + line);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kWRows; ++r) {
      const auto loaded = F::load(w + r * w_stride + k);
#pragma GCC unroll 4
      for (int b = 0; b < kBatch; ++b) {
        sums[b][r] = F::multiply_add(loaded, x + b * x_stride, sums[b][r]);
      }
    }
  }
  if (k < block.end) {
#pragma GCC unroll 4
    for (int r = 0; r < kWRows; ++r) {
      const auto loaded = F::load_partial(w + r * w_stride + k, block.end - k);
#pragma GCC unroll 4
      for (int b = 0; b < kBatch; ++b) {
        sums[b][r] = F::multiply_add(loaded, x + b * x_stride, sums[b][r]);
      }
    }
  }
  if (block.end < block.n) {
#pragma GCC unroll 4
    for (int b = 0; b < kBatch; ++b) {
#pragma GCC unroll 4
      for (int r = 0; r < kWRows; ++r) block.waiting[b * kRows + r] = sums[b][r];
    }
    return;
  }
#pragma GCC unroll 4
  for (int b = 0; b < kBatch; ++b) {
    Vec lanes[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) lanes[r] = r < kWRows ? F::lanes(sums[b][r]) : zero();
    float totals[kRows];
    sum_four(lanes, totals);
    const float scale = F::scale(block.x + b * x_stride);
#pragma GCC unroll 4
    for (int r = 0; r < kWRows; ++r) {
      float* out = block.out + b * block.out_stride + r;
      *out = block.w.scales ? totals[r] * (scale * block.w.scales[r]) : totals[r];
    }
  }
}

// The same with the number of rows to prefetch, up to kRows, and of rows of x chosen by the call.
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
        return multiply_block<kWRows, kBatch, 4>(block);
      case 3:
        return multiply_block<kWRows, kBatch, 3>(block);
      case 2:
        return multiply_block<kWRows, kBatch, 2>(block);
      case 1:
        return multiply_block<kWRows, kBatch, 1>(block);
    }
  }
  return multiply_block<kWRows, kBatch, 0>(block);
}

// out[b, r]: [num_batch, num_rows] with row stride out_stride, from rows of w and packed
// x: [num_batch, n packed], num_rows <= kTileRows, num_batch <= kTileBatch. `next`: the rows
// of w that will be read after these; may be null.
template <typename W>
inline void multiply(const WeightRows<W>& w, int64_t num_rows, const PackedX<W>* x,
                     int64_t x_stride, int64_t num_batch, int64_t n, const W* next, float* out,
                     int64_t out_stride) {
  using F = Format<W>;
  const int64_t chunk = chunk_of<W>(num_batch, n);
  alignas(64) char waiting[kTileRows * kTileBatch * sizeof(typename F::Sums)];
  for (int64_t begin = 0; begin < n; begin += chunk) {
    const int64_t end = min_of(begin + chunk, n);
    for (int64_t r = 0; r < num_rows; r += kRows) {
      const bool last = r + kRows >= num_rows;
      const WeightRows<W> rows = w.from(r);
      // What is read after this block: the next rows, the next chunk of the first ones, or `next`.
      const W* ahead = !last     ? rows.row(kRows)
                       : end < n ? w.data + (end - begin)
                       : next    ? next - begin
                                 : nullptr;
      // Every group of rows of x prefetches its share, so that memory never idles.
      for (int64_t b = 0; b < num_batch; b += F::kMaxBatch) {
        const int64_t batch = min_of(F::kMaxBatch, num_batch - b);
        const int64_t from = b * kRows / num_batch;
        const int64_t to = min_of(b + F::kMaxBatch, num_batch) * kRows / num_batch;
        Block<W> block{rows,
                       x + b * x_stride,
                       x_stride,
                       begin,
                       end,
                       n,
                       ahead ? ahead + from * w.stride : nullptr,
                       reinterpret_cast<typename F::Sums*>(waiting) + r * kTileBatch + b * kRows,
                       out + b * out_stride + r,
                       out_stride};
        if (r + kRows <= num_rows) {
          multiply_block<kRows, F::kMaxBatch>(block, batch, ahead ? to - from : 0);
          continue;
        }
        for (int64_t i = 0; i < num_rows - r; ++i) {
          multiply_block<1, F::kMaxBatch>(block, batch, 0);
          block.w = block.w.from(1);
          ++block.waiting;
          ++block.out;
        }
      }
    }
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
