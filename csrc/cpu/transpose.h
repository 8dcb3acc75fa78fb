// Transposes 16 rows of 16 numbers of 32 bits, in registers.
#pragma once

#include "vec.h"

#if defined(__AVX512F__)

namespace eecore::cpu::EECORE_CAPABILITY {

inline void transpose(__m512i (&v)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  // v[4 i + j]: columns j, 4 + j, 8 + j and 12 + j of rows 4 i to 4 i + 3.
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    t[j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0x88);
    t[4 + j] = _mm512_shuffle_i32x4(v[j], v[4 + j], 0xdd);
    t[8 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(v[8 + j], v[12 + j], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    v[j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0x88);
    v[8 + j] = _mm512_shuffle_i32x4(t[j], t[8 + j], 0xdd);
    v[4 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0x88);
    v[12 + j] = _mm512_shuffle_i32x4(t[4 + j], t[12 + j], 0xdd);
  }
}
inline void transpose(Vec (&v)[kWidth]) {
  __m512i bits[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) bits[i] = _mm512_castps_si512(v[i].v);
  transpose(bits);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) v[i].v = _mm512_castsi512_ps(bits[i]);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY

#endif
