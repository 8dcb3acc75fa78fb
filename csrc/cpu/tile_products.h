// Products of two streams of matrix tiles: one or two tiles on either side at each step, so that
// two on both sides are loaded for four products.
//
// Tiles 0 to 3 are sums, of left and right tiles 0 and 0, 0 and 1, 1 and 0, 1 and 1; 4 and 5 are
// the left, 6 and 7 the right factors. The caller zeroes or loads the sums and stores them.
#pragma once

#include "tile_unit.h"

#if defined(__AVX512BF16__)

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int64_t kTileBytes = kTileSide * kTileRowBytes;

// A tile of sums in memory.
template <typename Sum>
struct alignas(64) SumTile {
  Sum v[kTileSide * kTileSide];
};

// What a product multiplies: bfloat16 numbers, or bytes, signed (S) or unsigned (U) on the left and
// on the right.
enum class TileProduct { kBFloat16, kBytesSS, kBytesSU, kBytesUS };

template <typename U, TileProduct kProduct, int kSums, int kLeft, int kRight>
[[gnu::always_inline]] inline void multiply_tile() {
  if constexpr (kProduct == TileProduct::kBFloat16) {
    U::template multiply<kSums, kLeft, kRight>();
  } else {
    U::template multiply_bytes<kSums, kLeft, kRight, kProduct != TileProduct::kBytesUS,
                               kProduct != TileProduct::kBytesSU>();
  }
}

// A tile for each step.
struct TileStream {
  const uint8_t* data;  // the first step's
  int64_t stride;       // bytes from one row of a tile to the next
  int64_t step;         // bytes from a tile to the next step's

  TileStream from(int64_t i) const { return {data + i * step, stride, step}; }
};

template <typename U, bool kTwoLeft, bool kTwoRight>
[[gnu::always_inline]] inline void zero_sums() {
  U::template zero<0>();
  if constexpr (kTwoRight) U::template zero<1>();
  if constexpr (kTwoLeft) U::template zero<2>();
  if constexpr (kTwoLeft && kTwoRight) U::template zero<3>();
}
// sums: the four tiles, one after another.
template <typename U, bool kTwoLeft, bool kTwoRight, typename Sum>
[[gnu::always_inline]] inline void load_sums(const SumTile<Sum>* sums) {
  U::template load<0>(sums[0].v, kTileRowBytes);
  if constexpr (kTwoRight) U::template load<1>(sums[1].v, kTileRowBytes);
  if constexpr (kTwoLeft) U::template load<2>(sums[2].v, kTileRowBytes);
  if constexpr (kTwoLeft && kTwoRight) U::template load<3>(sums[3].v, kTileRowBytes);
}
template <typename U, bool kTwoLeft, bool kTwoRight, typename Sum>
[[gnu::always_inline]] inline void store_sums(SumTile<Sum>* sums) {
  U::template store<0>(sums[0].v);
  if constexpr (kTwoRight) U::template store<1>(sums[1].v);
  if constexpr (kTwoLeft) U::template store<2>(sums[2].v);
  if constexpr (kTwoLeft && kTwoRight) U::template store<3>(sums[3].v);
}

// Adds the products of all steps to the sums, in kFirst with right tile 0 and in kSecond with right
// tile 1. left, right: one or two streams. between(i) runs after step i, while the unit multiplies.
template <typename U, TileProduct kFirst, TileProduct kSecond, bool kTwoLeft, bool kTwoRight,
          typename Between>
[[gnu::always_inline]] inline void multiply_streams(const TileStream* left, const TileStream* right,
                                                    int64_t steps, const Between& between) {
  TileStream a = left[0], b = left[kTwoLeft], x = right[0], y = right[kTwoRight];
  for (int64_t i = 0; i < steps; ++i) {
    U::template load<4>(a.data, a.stride);
    U::template load<6>(x.data, x.stride);
    multiply_tile<U, kFirst, 0, 4, 6>();
    if constexpr (kTwoRight) {
      U::template load<7>(y.data, y.stride);
      multiply_tile<U, kSecond, 1, 4, 7>();
    }
    if constexpr (kTwoLeft) {
      U::template load<5>(b.data, b.stride);
      multiply_tile<U, kFirst, 2, 5, 6>();
      if constexpr (kTwoRight) multiply_tile<U, kSecond, 3, 5, 7>();
    }
    between(i);
    a = a.from(1), b = b.from(1), x = x.from(1), y = y.from(1);
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY

#endif
