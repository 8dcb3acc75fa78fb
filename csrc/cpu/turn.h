// Turns as many rows of numbers of 32 bits as a vector holds into their columns, in registers.
#pragma once

#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

#if defined(__AVX512F__)

inline void turn(__m512i (&v)[16]) {
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
inline void turn(Vec (&v)[kWidth]) {
  __m512i bits[kWidth];
  for (int i = 0; i < kWidth; ++i) bits[i] = _mm512_castps_si512(v[i].v);
  turn(bits);
  for (int i = 0; i < kWidth; ++i) v[i].v = _mm512_castsi512_ps(bits[i]);
}

#elif defined(__AVX2__)

inline void turn(Vec (&v)[kWidth]) {
  __m256 t[kWidth];
  for (int i = 0; i < kWidth; i += 4) {
    const __m256 a = _mm256_unpacklo_ps(v[i].v, v[i + 1].v);
    const __m256 b = _mm256_unpackhi_ps(v[i].v, v[i + 1].v);
    const __m256 c = _mm256_unpacklo_ps(v[i + 2].v, v[i + 3].v);
    const __m256 d = _mm256_unpackhi_ps(v[i + 2].v, v[i + 3].v);
    t[i] = _mm256_shuffle_ps(a, c, 0x44);
    t[i + 1] = _mm256_shuffle_ps(a, c, 0xee);
    t[i + 2] = _mm256_shuffle_ps(b, d, 0x44);
    t[i + 3] = _mm256_shuffle_ps(b, d, 0xee);
  }
  // t[4 i + j]: columns j and 4 + j of rows 4 i to 4 i + 3.
  for (int j = 0; j < 4; ++j) {
    v[j].v = _mm256_permute2f128_ps(t[j], t[4 + j], 0x20);
    v[4 + j].v = _mm256_permute2f128_ps(t[j], t[4 + j], 0x31);
  }
}

#else

inline void turn(Vec (&v)[kWidth]) {
  for (int i = 0; i < kWidth; ++i) {
    for (int j = 0; j < i; ++j) {
      const float x = v[i].v[j];
      v[i].v[j] = v[j].v[i];
      v[j].v[i] = x;
    }
  }
}

#endif

}  // namespace eecore::cpu::EECORE_CAPABILITY
