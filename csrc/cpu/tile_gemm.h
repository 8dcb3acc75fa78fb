// out[b, r] = sum_k x[b, k] * w[r, k] in bfloat16 with matrix tiles: 16 rows of a weight as stored
// are a left factor; 16 rows of x, transposed when they are packed, a right one.
//
// Every number of rows goes through the same tiles, columns ascending: a result depends only on its
// row of x and its row of the weight. Tiles 0 to 3 are sums, 4 and 5 the left, 6 and 7 the right
// factors.
#pragma once

#include "skinny_gemm.h"
#include "tile_unit.h"
#include "transpose.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Packs row i of x: [n], into packed rows of x with this stride.
template <typename W, typename T>
inline void pack_row(const T* row, int64_t n, int64_t i, int64_t stride, PackedX<W>* x) {
  if constexpr (requires { Format<W>::kGroup; }) {
    constexpr int64_t kGroup = Format<W>::kGroup;
    Format<W>::pack(row, n, i % kGroup, x + i / kGroup * kGroup * stride);
  } else if constexpr (requires { Format<W>::pack(row, n, stride, x); }) {
    Format<W>::pack(row, n, stride, x + i * stride);
  } else {
    Format<W>::pack(row, n, x + i * stride);
  }
}
// Rows of memory that num_rows rows take.
template <typename W>
inline int64_t rows_held(int64_t num_rows) {
  if constexpr (requires { Format<W>::kGroup; }) {
    return ceil_div(num_rows, Format<W>::kGroup) * Format<W>::kGroup;
  } else if constexpr (requires { Format<W>::held(num_rows); }) {
    return Format<W>::held(num_rows);
  }
  return num_rows;
}
// Rows [begin, end) of packed x: tiles may read and multiply them, but nothing of them is kept.
template <typename W>
inline void clear_rows(int64_t begin, int64_t end, int64_t stride, PackedX<W>* x) {
  if constexpr (requires { Format<W>::held(end); }) {
    const auto bytes = static_cast<uint64_t>((end - begin) * stride) * sizeof(PackedX<W>);
    __builtin_memset(static_cast<void*>(x + begin * stride), 0, bytes);
  }
}

#if defined(__AVX512BF16__)

// Storage element of a bfloat16 weight that is multiplied with the tiles of U.
template <typename U>
struct Tiled {
  uint16_t bits;
};

template <typename U>
struct Unit<Tiled<U>> {
  static bool uses_tiles() { return true; }
  explicit Unit(int64_t) { U::begin(); }
  ~Unit() { U::end(); }
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;
};

// Columns of a row as a line of a tile, zeros where there are fewer than 32.
inline __m512i tile_line(const BFloat16* p, int64_t columns) {
  return columns >= kTileColumns ? _mm512_loadu_si512(p)
                                 : _mm512_maskz_loadu_epi16(first_of_pair(columns), p);
}

// Packed rows are stored in groups of 16. A group is, for each 32 columns, a tile: 16 pairs of
// columns of each row, pair by pair.
template <typename U>
struct Format<Tiled<U>> {
  static constexpr int64_t kGroup = kTileSide;
  static constexpr int64_t kHeader = 0;
  static constexpr int kStep = kTileColumns;
  using PackedX = BFloat16;

  // Row i of a group; zeros fill the last tile.
  static void pack(const BFloat16* row, int64_t n, int64_t i, BFloat16* group) {
    const __m512i places = _mm512_slli_epi32(
        _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), 4);
    int32_t* out = reinterpret_cast<int32_t*>(group) + i;
    for (int64_t k = 0; k < n; k += kTileColumns, out += kTileSide * kTileSide) {
      _mm512_i32scatter_epi32(out, places, tile_line(row + k, n - k), 4);
    }
  }
};

// The elements of a packed row, whole tiles of columns.
template <typename W>
  requires(Format<W>::kGroup == kTileSide)
inline int64_t packed_stride(int64_t n) {
  return ceil_div(n, kTileColumns) * kTileColumns;
}

// Stores a tile's sums: [rows of w, rows of x] into out[b * out_stride + r], only the part that is
// used.
inline void store_turned(const float* sums, int64_t num_rows, int64_t num_batch, float* out,
                         int64_t out_stride) {
  __m512i v[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) v[i] = _mm512_load_si512(sums + 16 * i);
  transpose(v);
  const __mmask16 mask = first(num_rows);
#pragma GCC unroll 16
  for (int b = 0; b < 16; ++b) {
    if (b < num_batch) _mm512_mask_storeu_epi32(out + b * out_stride, mask, v[b]);
  }
}

// Rows of a weight from `row` on as a left factor, columns [k, k + 32). Missing elements are zero.
template <typename U, int kTile>
inline void load_rows(const WeightRows<Tiled<U>>& w, int64_t row, int64_t num_rows, int64_t k,
                      int64_t n, BFloat16* room) {
  const auto* first_row = reinterpret_cast<const BFloat16*>(w.row(row)) + k;
  if (num_rows >= kTileSide && k + kTileColumns <= n) {
    U::template load<kTile>(first_row, w.stride * static_cast<int64_t>(sizeof(BFloat16)));
    return;
  }
  for (int64_t i = 0; i < kTileSide; ++i) {
    const __m512i line =
        i < num_rows ? tile_line(first_row + i * w.stride, n - k) : _mm512_setzero_si512();
    _mm512_store_si512(room + i * kTileColumns, line);
  }
  U::template load<kTile>(room, kTileRowBytes);
}

// One or two tiles of rows of w and of x.
template <typename U, bool kTwoRows, bool kTwoGroups>
inline void multiply_tiles(const WeightRows<Tiled<U>>& w, int64_t num_rows, const BFloat16* x,
                           int64_t x_stride, int64_t num_batch, int64_t n, const Tiled<U>* next,
                           float* out, int64_t out_stride) {
  alignas(64) BFloat16 room[kTileSide * kTileColumns];
  alignas(64) float sums[kTileSide * kTileSide];
  const int64_t more = num_rows - kTileSide;
  U::template zero<0>();
  if constexpr (kTwoGroups) U::template zero<1>();
  if constexpr (kTwoRows) U::template zero<2>();
  if constexpr (kTwoRows && kTwoGroups) U::template zero<3>();
  for (int64_t k = 0; k < n; k += kTileColumns) {
    if (next) {
      for (int64_t r = 0; r < min_of(num_rows, 2 * kTileSide); ++r) {
        prefetch(next + r * w.stride + k);
      }
    }
    U::template load<6>(x + k * kTileSide, kTileRowBytes);
    if constexpr (kTwoGroups) {
      U::template load<7>(x + kTileSide * x_stride + k * kTileSide, kTileRowBytes);
    }
    load_rows<U, 4>(w, 0, num_rows, k, n, room);
    U::template multiply<0, 4, 6>();
    if constexpr (kTwoGroups) U::template multiply<1, 4, 7>();
    if constexpr (kTwoRows) {
      load_rows<U, 5>(w, kTileSide, more, k, n, room);
      U::template multiply<2, 5, 6>();
      if constexpr (kTwoGroups) U::template multiply<3, 5, 7>();
    }
  }
  const int64_t rows = min_of(num_rows, kTileSide), batch = min_of(num_batch, kTileSide);
  U::template store<0>(sums);
  store_turned(sums, rows, batch, out, out_stride);
  if constexpr (kTwoGroups) {
    U::template store<1>(sums);
    store_turned(sums, rows, num_batch - batch, out + batch * out_stride, out_stride);
  }
  if constexpr (kTwoRows) {
    U::template store<2>(sums);
    store_turned(sums, more, batch, out + kTileSide, out_stride);
  }
  if constexpr (kTwoRows && kTwoGroups) {
    U::template store<3>(sums);
    store_turned(sums, more, num_batch - batch, out + batch * out_stride + kTileSide, out_stride);
  }
}

// The product for weights in tiles; the same contract as for every other weight.
template <typename U>
inline void multiply(const Unit<Tiled<U>>&, const WeightRows<Tiled<U>>& w, int64_t num_rows,
                     const BFloat16* x, int64_t x_stride, int64_t num_batch, int64_t n,
                     const Tiled<U>* next, float* out, int64_t out_stride) {
  static_assert(kTileRows == 2 * kTileSide);
  for (int64_t b = 0; b < num_batch; b += 2 * kTileSide) {
    const int64_t count = min_of(num_batch - b, 2 * kTileSide);
    const auto run = [&]<bool kTwoRows, bool kTwoGroups>() {
      multiply_tiles<U, kTwoRows, kTwoGroups>(w, num_rows, x + b * x_stride, x_stride, count, n,
                                              b + count == num_batch ? next : nullptr,
                                              out + b * out_stride, out_stride);
    };
    const bool two_groups = count > kTileSide;
    if (num_rows > kTileSide) {
      two_groups ? run.template operator()<true, true>() : run.template operator()<true, false>();
    } else {
      two_groups ? run.template operator()<false, true>() : run.template operator()<false, false>();
    }
  }
}

#endif

}  // namespace eecore::cpu::EECORE_CAPABILITY
