// The rows of x of a product: normed if there is a norm weight, and packed. Made once per call,
// before the weight is read; x itself is not read afterwards.
#pragma once

#include <type_traits>

#include "panel_gemm.h"
#include "rms_norm.h"
#include "scratch.h"
#include "tile_gemm.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Elements from one packed row of n columns to the next; tables: of a packed weight.
template <typename W>
inline int64_t packed_stride(int64_t n, const Tables& tables) {
  if constexpr (std::is_same_v<W, Panel>) {
    return x_stride_of(tables, n);
  } else {
    return packed_stride<W>(n);
  }
}

// Rows of T, packed for a weight of W.
template <typename T, typename W>
class PackedRows {
 public:
  // x: [num_rows, n], row stride x_stride; norm_weight: [n], may be null.
  PackedRows(const T* x, int64_t x_stride, int64_t num_rows, int64_t n, const T* norm_weight,
             float eps, const Tables& tables, const Parallel& parallel)
      : stride_(packed_stride<W>(n, tables)), rows_(rows_held<W>(num_rows) * stride_) {
    clear_rows<W>(num_rows, rows_held<W>(num_rows), stride_, rows_.data());
    // A row is read and written a few times over.
    const int64_t grain = ceil_div(parallel.bytes_per_range, 4 * n * sizeof(float));
    parallel_for(parallel, num_rows, grain, [&](int64_t begin, int64_t end) {
      Scratch<T> normed(norm_weight ? n : 0);
      for (int64_t row = begin; row < end; ++row) {
        const T* values = x + row * x_stride;
        if (norm_weight) {
          scale_row(values, norm_weight, inverse_rms(values, n, eps), n, normed.data());
          values = normed.data();
        }
        pack_row<W>(values, n, row, stride_, rows_.data());
      }
    });
  }

  int64_t stride() const { return stride_; }
  // Rows from i on, a multiple of kTileBatch.
  const PackedX<W>* row(int64_t i) const { return rows_.data() + i * stride_; }

 private:
  int64_t stride_;
  Scratch<PackedX<W>> rows_;  // [num_rows, stride]
};

}  // namespace eecore::cpu::EECORE_CAPABILITY
