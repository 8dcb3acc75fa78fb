// out[b, r] = sum_k x[b, k] * w[r, k] in bfloat16 with matrix tiles: 16 rows of a weight as stored
// are a left factor; 16 rows of x, transposed when they are packed, a right one.
//
// Every number of rows goes through the same tiles, columns ascending: a result depends only on its
// row of x and its row of the weight. Rows of the weight are copied, a chunk of columns at a time,
// so that their tiles come from the first-level cache for all rows of x; sums wait in memory
// between chunks, exactly.
#pragma once

#include "skinny_gemm.h"
#include "tile_products.h"
#include "transpose.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Rows of x that are packed together.
template <typename W>
constexpr int64_t kGroupRows = 1;
template <typename W>
  requires requires { Format<W>::kGroup; }
constexpr int64_t kGroupRows<W> = Format<W>::kGroup;

// Rows of memory that num_rows rows take.
template <typename W>
inline int64_t rows_held(int64_t num_rows) {
  if constexpr (requires { Format<W>::held(num_rows); }) return Format<W>::held(num_rows);
  return ceil_div(num_rows, kGroupRows<W>) * kGroupRows<W>;
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

// Bytes of a row as a line of a tile, zeros where there are fewer than 64.
inline __m512i tile_line(const void* p, int64_t bytes) {
  if (bytes >= kTileRowBytes) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi8((uint64_t{1} << bytes) - 1, p);
}

// 16 rows of 64 bytes as a right factor.
inline void store_right(__m512i (&rows)[kTileSide], void* tile) {
  transpose(rows);
  auto* out = static_cast<__m512i*>(tile);
#pragma GCC unroll 16
  for (int i = 0; i < kTileSide; ++i) _mm512_store_si512(out + i, rows[i]);
}

// Packed rows are stored in groups of 16. A group is, for each 32 columns, a tile: 16 pairs of
// columns of each row, pair by pair.
template <typename U>
struct Format<Tiled<U>> {
  static constexpr int64_t kGroup = kTileSide;
  static constexpr int64_t kHeader = 0;
  static constexpr int kStep = kTileColumns;
  using PackedX = BFloat16;

  // Zeros fill the last tile.
  static void pack(const BFloat16* const* rows, int64_t count, int64_t n, BFloat16* group) {
    for (int64_t k = 0; k < n; k += kTileColumns) {
      __m512i v[kTileSide];
#pragma GCC unroll 16
      for (int i = 0; i < kTileSide; ++i) {
        v[i] = i < count ? tile_line(rows[i] + k, 2 * (n - k)) : _mm512_setzero_si512();
      }
      store_right(v, group + k * kTileSide);
    }
  }
  // Whole tiles of columns.
  static int64_t stride(int64_t n) { return ceil_div(n, kTileColumns) * kTileColumns; }
};

// Storage element of an int8 weight that is multiplied with tiles.
struct TiledInt8 {
  int8_t value;
};

template <>
struct Unit<TiledInt8> {
  static bool uses_tiles() { return true; }
  explicit Unit(int64_t) : tiles(tiles_in_use()) {
    if (tiles == Tiles::kHardware) TileHardware::begin();
    if (tiles == Tiles::kModel) TileModel::begin();
  }
  ~Unit() {
    if (tiles == Tiles::kHardware) TileHardware::end();
  }
  Unit(const Unit&) = delete;
  Unit& operator=(const Unit&) = delete;

  const Tiles tiles;
};

// A group of 16 rows of x is their scales, then for each 64 columns two tiles: the upper bytes of
// q, signed, and the lower ones, unsigned.
template <>
struct Format<TiledInt8> {
  static constexpr int64_t kGroup = kTileSide;
  static constexpr int64_t kHeaderBytes = kGroup * sizeof(float);
  using PackedX = uint8_t;

  template <typename T>
  static void pack(const T* const* rows, int64_t count, int64_t n, uint8_t* group) {
    float to_q[kGroup] = {};
    auto* scales = reinterpret_cast<float*>(group);
    for (int64_t i = 0; i < count; ++i) {
      const Quantisation q = quantisation(rows[i], n);
      to_q[i] = q.to_q, scales[i] = q.scale;
    }
    uint8_t* tile = group + kHeaderBytes;
    for (int64_t k = 0; k < n; k += kTileRowBytes, tile += 2 * kTileBytes) {
      alignas(64) uint8_t upper[kGroup][kTileRowBytes] = {}, lower[kGroup][kTileRowBytes] = {};
      for (int64_t i = 0; i < count; ++i) {
        // For a row that is not finite only the scale counts.
        if (!(to_q[i] > 0.0f)) continue;
        const Vec factor = broadcast(to_q[i]);
        const int64_t columns = min_of(n - k, kTileRowBytes);
        for (int64_t c = 0; c < columns; c += kWidth) {
          const Vec x = load_partial(rows[i] + k + c, min_of(columns - c, kWidth));
          const __m512i q = _mm512_cvtps_epi32((x * factor).v);
          const auto put = [c](__m512i bytes, uint8_t* line) {
            _mm_store_si128(reinterpret_cast<__m128i*>(line + c), _mm512_cvtepi32_epi8(bytes));
          };
          put(_mm512_srai_epi32(q, 8), upper[i]);
          put(q, lower[i]);
        }
      }
      store_bytes(upper, tile);
      store_bytes(lower, tile + kTileBytes);
    }
  }
  // Bytes of a row's share of a group.
  static int64_t stride(int64_t n) {
    return (kHeaderBytes + ceil_div(n, kTileRowBytes) * 2 * kTileBytes) / kGroup;
  }

 private:
  static void store_bytes(const uint8_t (&lines)[kGroup][kTileRowBytes], uint8_t* tile) {
    __m512i v[kTileSide];
#pragma GCC unroll 16
    for (int i = 0; i < kTileSide; ++i) v[i] = _mm512_load_si512(lines[i]);
    store_right(v, tile);
  }
};

// The elements of a packed row of a group.
template <typename W>
  requires(Format<W>::kGroup == kTileSide)
inline int64_t packed_stride(int64_t n) {
  return Format<W>::stride(n);
}

// Stores a tile's sums: [rows of w, rows of x] into out[b * out_stride + r], only the part that is
// used.
[[gnu::noinline]] inline void store_turned(const float* sums, int64_t num_rows, int64_t num_batch,
                                           float* out, int64_t out_stride) {
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

// Rows of a weight, as bytes: left factors, 64 bytes of each in a step.
struct LeftRows {
  const uint8_t* data;
  int64_t stride, num_rows, bytes;  // bytes of a row
};
// Packed rows of x: right factors, two tiles at a time.
struct RightTiles {
  const uint8_t* data;
  int64_t step, second, pair;  // bytes to the next step, and to the next tile and pair of a step
  int64_t count;               // of tiles
};

// Steps of 32 rows of a weight that are copied at once, in as many bytes as they are multiplied
// with of each pair of right tiles: both, and a pair's sums, are 44 KiB of a first-level cache
// of 48.
constexpr int64_t kChunkSteps = 10;

template <typename Sum, int64_t kPairs>
struct alignas(64) ProductRoom {
  uint8_t left[2][kChunkSteps * kTileBytes];
  SumTile<Sum> sums[kPairs][4];
};

// Copies 16 rows from `row` on, `steps` steps from byte `begin` on, into tiles one after another.
// Missing rows and bytes are zeros.
inline void copy_left(const LeftRows& w, int64_t row, int64_t begin, int64_t steps, uint8_t* out) {
  for (int64_t i = 0; i < kTileSide; ++i, out += kTileRowBytes) {
    const uint8_t* from = w.data + (row + i) * w.stride;
    for (int64_t step = 0; step < steps; ++step) {
      const int64_t at = begin + step * kTileRowBytes;
      const __m512i line =
          row + i < w.num_rows ? tile_line(from + at, w.bytes - at) : _mm512_setzero_si512();
      _mm512_store_si512(out + step * kTileBytes, line);
    }
  }
}

// Multiplies up to 32 rows of a weight with all tiles of x, steps ascending. A sum takes max_steps;
// then finish(pair, tile, sums, first step, last step) is called for each of a pair's four tiles of
// sums (see tile_products.h), of which some are undefined where there are fewer than 17 rows or an
// odd number of right tiles. It is called while the next pair is multiplied. `next`: the rows of
// the weight that are read after these; may be null.
template <typename U, TileProduct kFirst, TileProduct kSecond, typename Sum, int64_t kPairs,
          typename Finish>
inline void multiply_pairs(const LeftRows& w, const RightTiles& x, int64_t max_steps,
                           const uint8_t* next, const Finish& finish) {
  auto& room = kept_by_thread<ProductRoom<Sum, kPairs>>();
  const int64_t num_steps = ceil_div(w.bytes, kTileRowBytes), num_pairs = ceil_div(x.count, 2);
  const int64_t chunk = ceil_div(num_steps, ceil_div(num_steps, kChunkSteps));
  for (int64_t begin = 0, end; begin < num_steps; begin = end) {
    const int64_t part_begin = begin / max_steps * max_steps;
    const int64_t part_end = min_of(part_begin + max_steps, num_steps);
    const int64_t from = begin * kTileRowBytes;
    // Tiles that are multiplied with one pair only are loaded from their place.
    const bool in_place =
        num_pairs == 1 && w.num_rows == kTileRows && w.bytes - from >= kTileRowBytes;
    end = min_of(in_place ? w.bytes / kTileRowBytes : begin + chunk, part_end);
    TileStream left[2];
    for (int64_t i = 0; i < 2; ++i) {
      left[i] = {w.data + i * kTileSide * w.stride + from, w.stride, kTileRowBytes};
      if (in_place || i * kTileSide >= w.num_rows) continue;
      copy_left(w, i * kTileSide, from, end - begin, room.left[i]);
      left[i] = {room.left[i], kTileRowBytes, kTileBytes};
    }
    // The pair whose sums are complete, and not finished yet.
    int64_t waiting = -1;
    const auto finish_waiting = [&](int64_t tile) {
      if (waiting < 0 || tile >= 4) return;
      finish(waiting, tile, room.sums[waiting], part_begin, part_end);
    };
    for (int64_t pair = 0; pair < num_pairs; ++pair) {
      const uint8_t* data = x.data + pair * x.pair + begin * x.step;
      const TileStream right[] = {{data, kTileRowBytes, x.step},
                                  {data + x.second, kTileRowBytes, x.step}};
      const int64_t first_row = pair * w.num_rows / num_pairs;
      const int64_t last_row = (pair + 1) * w.num_rows / num_pairs;
      const auto run = [&]<bool kTwoLeft, bool kTwoRight>() {
        if (begin > part_begin) {
          load_sums<U, kTwoLeft, kTwoRight>(room.sums[pair]);
        } else {
          zero_sums<U, kTwoLeft, kTwoRight>();
        }
        multiply_streams<U, kFirst, kSecond, kTwoLeft, kTwoRight>(
            left, right, end - begin, [&](int64_t i) {
              for (int64_t row = next ? first_row : last_row; row < last_row; ++row) {
                prefetch(next + row * w.stride + from + i * kTileRowBytes);
              }
              finish_waiting(i);
            });
        store_sums<U, kTwoLeft, kTwoRight>(room.sums[pair]);
      };
      const bool two_right = 2 * pair + 1 < x.count;
      if (w.num_rows > kTileSide) {
        two_right ? run.template operator()<true, true>() : run.template operator()<true, false>();
      } else {
        two_right ? run.template operator()<false, true>()
                  : run.template operator()<false, false>();
      }
      for (int64_t tile = end - begin; tile < 4; ++tile) finish_waiting(tile);
      if (end == part_end) waiting = pair;
    }
    for (int64_t tile = 0; tile < 4; ++tile) finish_waiting(tile);
  }
}

// The product for weights in tiles; the same contract as for every other weight.
template <typename U>
inline void multiply(const Unit<Tiled<U>>&, const WeightRows<Tiled<U>>& w, int64_t num_rows,
                     const BFloat16* x, int64_t x_stride, int64_t num_batch, int64_t n,
                     const Tiled<U>* next, float* out, int64_t out_stride) {
  static_assert(kTileRows == 2 * kTileSide);
  constexpr int64_t kBytes = sizeof(BFloat16), kPairs = kMaxTileBatch / (2 * kTileSide);
  constexpr TileProduct kProduct = TileProduct::kBFloat16;
  const LeftRows left{reinterpret_cast<const uint8_t*>(w.data), w.stride * kBytes, num_rows,
                      n * kBytes};
  const int64_t group = kTileSide * x_stride * kBytes;
  const RightTiles right{reinterpret_cast<const uint8_t*>(x), kTileBytes, group, 2 * group,
                         ceil_div(num_batch, kTileSide)};
  multiply_pairs<U, kProduct, kProduct, float, kPairs>(
      left, right, ceil_div(left.bytes, kTileRowBytes), reinterpret_cast<const uint8_t*>(next),
      [&](int64_t pair, int64_t tile, const SumTile<float>* sums, int64_t, int64_t) {
        const int64_t r = tile / 2 * kTileSide, b = (2 * pair + tile % 2) * kTileSide;
        if (r >= num_rows || b >= num_batch) return;
        store_turned(sums[tile].v, min_of(num_rows - r, kTileSide),
                     min_of(num_batch - b, kTileSide), out + b * out_stride + r, out_stride);
      });
}

// The same with an int8 weight, see multiply_int8.cpp.
void multiply_int8_on_tiles(Tiles tiles, const WeightRows<TiledInt8>& w, int64_t num_rows,
                            const uint8_t* x, int64_t x_stride, int64_t num_batch, int64_t n,
                            const TiledInt8* next, float* out, int64_t out_stride);
inline void multiply(const Unit<TiledInt8>& unit, const WeightRows<TiledInt8>& w, int64_t num_rows,
                     const uint8_t* x, int64_t x_stride, int64_t num_batch, int64_t n,
                     const TiledInt8* next, float* out, int64_t out_stride) {
  multiply_int8_on_tiles(unit.tiles, w, num_rows, x, x_stride, num_batch, n, next, out, out_stride);
}

#endif

}  // namespace eecore::cpu::EECORE_CAPABILITY
