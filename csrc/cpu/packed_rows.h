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

// Norms rows [begin, end), if there is a norm weight, and packs them into packed rows of x with
// this stride. row(i): the start of row i, [n]; normed: [kGroupRows<W>, n], for the normed ones;
// begin: a multiple of kGroupRows<W>.
template <typename W, typename T, typename Row>
inline void pack_rows(const Row& row, int64_t begin, int64_t end, int64_t n, const T* norm_weight,
                      float eps, T* normed, int64_t stride, PackedX<W>* x) {
  for (int64_t i = begin; i < end; i += kGroupRows<W>) {
    const T* group[kGroupRows<W>];
    const int64_t count = min_of(end - i, kGroupRows<W>);
    for (int64_t j = 0; j < count; ++j) {
      group[j] = row(i + j);
      if (norm_weight == nullptr) continue;
      T* out = normed + j * n;
      scale_row(group[j], norm_weight, inverse_rms(group[j], n, eps), n, out);
      group[j] = out;
    }
    if constexpr (kGroupRows<W> > 1) {
      Format<W>::pack(group, count, n, x + i * stride);
    } else if constexpr (std::is_same_v<W, Panel>) {
      Format<W>::pack(group[0], n, stride, x + i * stride);
    } else {
      Format<W>::pack(group[0], n, x + i * stride);
    }
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
    constexpr int64_t kGroup = kGroupRows<W>;
    const int64_t grain = ceil_div(parallel.bytes_per_range, 4 * kGroup * n * sizeof(float));
    const auto row = [&](int64_t i) { return x + i * x_stride; };
    parallel_for(parallel, ceil_div(num_rows, kGroup), grain, [&](int64_t begin, int64_t end) {
      const Scratch<T> normed(norm_weight ? kGroup * n : 0);
      pack_rows<W>(row, begin * kGroup, min_of(end * kGroup, num_rows), n, norm_weight, eps,
                   normed.data(), stride_, rows_.data());
    });
  }

  int64_t stride() const { return stride_; }
  // Rows from i on, a multiple of kTileBatch.
  const PackedX<W>* row(int64_t i) const { return rows_.data() + i * stride_; }

 private:
  int64_t stride_;
  Scratch<PackedX<W>> rows_;  // [rows_held, stride]
};

}  // namespace eecore::cpu::EECORE_CAPABILITY
