// The rows of x that a skinny product works on: normed where there is a weight for it, and packed.
// Made once per call, before its threads part; from then on x itself is not read.
#pragma once

#include "rms_norm.h"
#include "scratch.h"
#include "skinny_gemm.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Rows of T, packed for a weight of W.
template <typename T, typename W>
class PackedRows {
 public:
  // x: [num_rows, n], row stride x_stride; norm_weight: [n], may be null.
  PackedRows(const T* x, int64_t x_stride, int64_t num_rows, int64_t n, const T* norm_weight,
             float eps)
      : stride_(packed_stride<W>(n)), rows_(num_rows * stride_) {
    Scratch<T> normed(norm_weight ? n : 0);
    for (int64_t row = 0; row < num_rows; ++row) {
      const T* values = x + row * x_stride;
      if (norm_weight) {
        scale_row(values, norm_weight, inverse_rms(values, n, eps), n, normed.data());
        values = normed.data();
      }
      Format<W>::pack(values, n, rows_.data() + row * stride_);
    }
  }

  int64_t stride() const { return stride_; }
  const PackedX<W>* row(int64_t i) const { return rows_.data() + i * stride_; }

 private:
  int64_t stride_;
  Scratch<PackedX<W>> rows_;  // [num_rows, stride]
};

// The fewest rows of a weight, of row_bytes each, that are worth a range of their own.
inline int64_t rows_per_range(const Parallel& parallel, int64_t row_bytes) {
  return ceil_div(ceil_div(parallel.bytes_per_range, row_bytes), kRows) * kRows;
}

// values + bias, rounded to T as the result of a model's linear layer; lanes of values: [n].
template <typename T>
inline Vec finish(const float* values, const T* bias, int64_t n) {
  Vec result = load_partial(values, n);
  if (bias) result = result + load_partial(bias, n);
  T rounded[kWidth];
  store(rounded, result);
  return load(rounded);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
