// Matrix tiles of a CPU (AMX), and a model of them in software, for tests on CPUs without tiles.
//
// A tile is up to 16 rows of up to 64 bytes, by default all of it; in the model the rest is zero.
// multiply<C, A, B>, for bfloat16: sums C[m, n] of A[m, 2k] * B[k, 2n] + A[m, 2k + 1] * B[k, 2n +
// 1], even and odd ones separately until the end, denormals as zeros (TDPBF16PS in Intel's
// instruction manual). multiply_bytes, for signed or unsigned bytes: whole numbers, four bytes of a
// row of A times four of a row of B each (TDPBSSD, TDPBSUD, TDPBUSD). A thread may use
// them between begin and end.
#pragma once

#include "scratch.h"
#include "vec.h"

#if defined(__AVX512BF16__)

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int64_t kTileSide = 16;     // rows of a tile, and numbers of 32 bits in a row
constexpr int64_t kTileColumns = 32;  // bfloat16 numbers in a row
constexpr int64_t kTileRowBytes = 64;

// The configuration of the tiles, in the format of ldtilecfg.
struct alignas(64) TileSizes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr void set(int tile, int64_t num_rows, int64_t bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(bytes);
  }
};

// All tiles at full size.
inline TileSizes whole_tiles() {
  TileSizes sizes;
  for (int tile = 0; tile < 8; ++tile) sizes.set(tile, kTileSide, kTileRowBytes);
  return sizes;
}

struct TileHardware {
  static void begin(const TileSizes& sizes = whole_tiles()) {
    asm volatile("ldtilecfg %0" ::"m"(sizes));
  }
  static void end() { asm volatile("tilerelease" ::: "memory"); }
  template <int kTile>
  static void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  static void load(const void* p, int64_t stride_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(kTile)
                 : "memory");
  }
  template <int kTile>
  static void store(void* p, int64_t stride_bytes = kTileRowBytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride_bytes), "i"(kTile)
                 : "memory");
  }
  template <int kSums, int kLeft, int kRight>
  static void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
  }
  template <int kSums, int kLeft, int kRight, bool kSignedLeft = true, bool kSignedRight = true>
  static void multiply_bytes() {
    if constexpr (kSignedLeft && kSignedRight) {
      asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
    } else if constexpr (kSignedLeft) {
      asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
    } else {
      static_assert(kSignedRight);
      asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft), "i"(kRight));
    }
  }
};

struct TileModel {
  struct Tiles {
    uint8_t bytes[8][kTileSide][kTileRowBytes];
    TileSizes sizes;
  };
  static void begin(const TileSizes& sizes = whole_tiles()) {
    __builtin_memset(tiles().bytes, 0, sizeof(tiles().bytes));
    tiles().sizes = sizes;
  }
  static void end() {}
  template <int kTile>
  static void zero() {
    __builtin_memset(tiles().bytes[kTile], 0, sizeof(tiles().bytes[kTile]));
  }
  template <int kTile>
  static void load(const void* p, int64_t stride_bytes) {
    zero<kTile>();
    for (int64_t row = 0; row < tiles().sizes.rows[kTile]; ++row) {
      __builtin_memcpy(tiles().bytes[kTile][row],
                       static_cast<const uint8_t*>(p) + row * stride_bytes,
                       tiles().sizes.row_bytes[kTile]);
    }
  }
  template <int kTile>
  static void store(void* p, int64_t stride_bytes = kTileRowBytes) {
    for (int64_t row = 0; row < tiles().sizes.rows[kTile]; ++row) {
      __builtin_memcpy(static_cast<uint8_t*>(p) + row * stride_bytes, tiles().bytes[kTile][row],
                       tiles().sizes.row_bytes[kTile]);
    }
  }
  template <int kSums, int kLeft, int kRight>
  static void multiply() {
    Tiles& all = tiles();
    for (int64_t m = 0; m < kTileSide; ++m) {
      Vec even = eecore::cpu::EECORE_CAPABILITY::zero(), odd = even;
      for (int64_t k = 0; k < kTileSide; ++k) {
        const Halves left = halves_of(_mm512_set1_epi32(word(all.bytes[kLeft][m] + 4 * k)));
        const Halves right = halves_of(_mm512_loadu_si512(all.bytes[kRight][k]));
        even = flushed(fma(left.even, right.even, even));
        odd = flushed(fma(left.odd, right.odd, odd));
      }
      float* sums = reinterpret_cast<float*>(all.bytes[kSums][m]);
      eecore::cpu::EECORE_CAPABILITY::store(
          sums, flushed(flushed(eecore::cpu::EECORE_CAPABILITY::load(sums)) + flushed(even + odd)));
    }
  }
  template <int kSums, int kLeft, int kRight, bool kSignedLeft = true, bool kSignedRight = true>
  static void multiply_bytes() {
    Tiles& all = tiles();
    for (int64_t m = 0; m < all.sizes.rows[kSums]; ++m) {
      __m512i sums = _mm512_loadu_si512(all.bytes[kSums][m]);
      for (int64_t k = 0; k < kTileSide; ++k) {
        const __m512i left = _mm512_set1_epi32(word(all.bytes[kLeft][m] + 4 * k));
        const __m512i right = _mm512_loadu_si512(all.bytes[kRight][k]);
        const __m512i odd =
            _mm512_madd_epi16(odd_bytes<kSignedLeft>(left), odd_bytes<kSignedRight>(right));
        const __m512i even =
            _mm512_madd_epi16(odd_bytes<kSignedLeft>(_mm512_slli_epi16(left, 8)),
                              odd_bytes<kSignedRight>(_mm512_slli_epi16(right, 8)));
        sums = _mm512_add_epi32(sums, _mm512_add_epi32(odd, even));
      }
      _mm512_storeu_si512(all.bytes[kSums][m], sums);
    }
  }

 private:
  struct Halves {
    Vec even, odd;
  };
  static Tiles& tiles() { return kept_by_thread<Tiles>(); }
  static int32_t word(const uint8_t* p) {
    int32_t value;
    __builtin_memcpy(&value, p, 4);
    return value;
  }
  // Every second byte, widened to 16 bits.
  template <bool kSigned>
  static __m512i odd_bytes(__m512i bytes) {
    return kSigned ? _mm512_srai_epi16(bytes, 8) : _mm512_srli_epi16(bytes, 8);
  }
  // Replaces denormal numbers by zeros of the same sign.
  static Vec flushed(Vec x) {
    const __m512i bits = _mm512_castps_si512(x.v), sign = _mm512_set1_epi32(INT32_MIN);
    const __mmask16 small = _mm512_testn_epi32_mask(bits, _mm512_set1_epi32(0x7f800000));
    return {_mm512_castsi512_ps(_mm512_mask_and_epi32(bits, small, bits, sign))};
  }
  static Halves halves_of(__m512i pairs) {
    const __m512i high = _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u));
    return {flushed({_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16))}),
            flushed({_mm512_castsi512_ps(_mm512_and_si512(pairs, high))})};
  }
};

}  // namespace eecore::cpu::EECORE_CAPABILITY

#endif
