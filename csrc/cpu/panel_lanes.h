// Bytes of a panel and the sums of their products: kWidth rows of a panel at once, 4 columns each.
//
// Weights are unsigned bytes, x signed ones of -127 to 127; sums are exact. Weights of up to 255
// count as 128 less where kTakes128 says so.
#pragma once

#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Bytes of kWidth rows.
constexpr int64_t kLaneBytes = 4 * kWidth;

// A float16 at any address.
inline float half_to_float(const uint8_t* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, 2);
  const uint32_t magnitude = static_cast<uint32_t>(half & 0x7fff) << 13;
  float value;
  __builtin_memcpy(&value, &magnitude, 4);
  value *= 0x1p112f;  // the exponent's bias; float16's small numbers become normal ones
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if (magnitude >= 0x0f800000u) bits = 0x7f800000u | (magnitude & 0x007fffffu);
  bits |= static_cast<uint32_t>(half & 0x8000) << 16;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

#if defined(__AVX512VNNI__)

constexpr int kMaxPanelBatch = 8;
constexpr bool kTakes128 = false;
struct Bytes {
  __m512i v;
};
struct Ints {
  __m512i v;
};
inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes low_nibbles(Bytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
// q with the bits of `mask`, which lie kBy places lower in x, or higher where kBy is negative.
template <int kBy>
inline Bytes with_bits(Bytes q, Bytes x, char mask) {
  __m512i moved = x.v;
  if constexpr (kBy > 0) moved = _mm512_slli_epi16(x.v, kBy);
  if constexpr (kBy < 0) moved = _mm512_srli_epi16(x.v, -kBy);
  return {_mm512_ternarylogic_epi32(q.v, moved, _mm512_set1_epi8(mask), 0xf8)};  // q | (moved & m)
}
inline Bytes high_nibbles(Bytes x) {
  return {_mm512_and_si512(_mm512_srli_epi16(x.v, 4), _mm512_set1_epi8(15))};
}
template <int kShift>
inline Ints broadcast_shifted(int32_t x) {
  return {_mm512_slli_epi32(_mm512_set1_epi32(x), kShift)};
}
inline Vec to_vec(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
inline Vec load_unsigned(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec load_signed(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(
      _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec load_half(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// sums[b] + the products of kGroups groups of columns with row b of x, kRowsAbreast of them; w of
// at most kLargest. Each sum waits for its last product, and a core looks ahead to few of them:
// rows take turns. `ahead` asks for some of what comes next behind each group.
constexpr int kRowsAbreast = 8;
template <int kGroups, int kLargest, int kRows, typename Ahead>
inline void dot(const Bytes* w, const int8_t* x, int64_t x_stride, Ahead ahead, Ints* sums) {
#pragma GCC unroll 8
  for (int g = 0; g < kGroups; ++g) {
#pragma GCC unroll 8
    for (int b = 0; b < kRows; ++b) {
      int32_t columns;
      __builtin_memcpy(&columns, x + b * x_stride + 4 * g, 4);
      sums[b].v = _mm512_dpbusd_epi32(sums[b].v, w[g].v, _mm512_set1_epi32(columns));
    }
    ahead.ask(g);
  }
}

#elif defined(__AVX2__)

constexpr int kMaxPanelBatch = 4;
constexpr bool kTakes128 = true;
struct Bytes {
  __m256i v;
};
struct Ints {
  __m256i v;
};
inline Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline Bytes low_nibbles(Bytes x) { return {_mm256_and_si256(x.v, _mm256_set1_epi8(15))}; }
template <int kBy>
inline Bytes with_bits(Bytes q, Bytes x, char mask) {
  __m256i moved = x.v;
  if constexpr (kBy > 0) moved = _mm256_slli_epi16(x.v, kBy);
  if constexpr (kBy < 0) moved = _mm256_srli_epi16(x.v, -kBy);
  return {_mm256_or_si256(q.v, _mm256_and_si256(moved, _mm256_set1_epi8(mask)))};
}
inline Bytes high_nibbles(Bytes x) {
  return {_mm256_and_si256(_mm256_srli_epi16(x.v, 4), _mm256_set1_epi8(15))};
}
template <int kShift>
inline Ints broadcast_shifted(int32_t x) {
  return {_mm256_slli_epi32(_mm256_set1_epi32(x), kShift)};
}
inline Vec to_vec(Ints x) { return {_mm256_cvtepi32_ps(x.v)}; }
inline Vec load_unsigned(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec load_signed(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(
      _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))))};
}
inline Vec load_half(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Pairs of products are summed in 16 bits for as many groups as surely fit. Where not even one
// does, 128 is taken from the weights, and their signs are moved to x.
constexpr int kRowsAbreast = 1;
template <int kGroups, int kLargest, int kRows, typename Ahead>
inline void dot(const Bytes* w, const int8_t* x, int64_t, Ahead ahead, Ints* sums) {
  static_assert(kRows == 1);
  constexpr int kFit = 32767 / (2 * 127 * kLargest);
  constexpr int kRun = kFit < 1 ? 1 : kFit < kGroups ? kFit : kGroups;
  static_assert(kGroups % kRun == 0);
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int first = 0; first < kGroups; first += kRun) {
    __m256i pairs = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int g = first; g < first + kRun; ++g) {
      int32_t columns;
      __builtin_memcpy(&columns, x + 4 * g, 4);
      __m256i factors = w[g].v, signed_x = _mm256_set1_epi32(columns);
      if constexpr (kFit < 1) {
        const __m256i whole = _mm256_xor_si256(w[g].v, _mm256_set1_epi8(-128));
        factors = _mm256_abs_epi8(whole);
        signed_x = _mm256_sign_epi8(signed_x, whole);
      }
      pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(factors, signed_x));
      ahead.ask(g);
    }
    sums->v = _mm256_add_epi32(sums->v, _mm256_madd_epi16(pairs, ones));
  }
}

#else

constexpr int kMaxPanelBatch = 2;
constexpr bool kTakes128 = false;
struct Bytes {
  uint8_t v[kLaneBytes];
};
struct Ints {
  int32_t v[kWidth];
};
inline Bytes load_bytes(const uint8_t* p) {
  Bytes r;
  __builtin_memcpy(r.v, p, sizeof(r.v));
  return r;
}
inline Bytes low_nibbles(Bytes x) {
  for (uint8_t& byte : x.v) byte &= 15;
  return x;
}
template <int kBy>
inline Bytes with_bits(Bytes q, Bytes x, uint8_t mask) {
  for (int i = 0; i < kLaneBytes; ++i) {
    const int moved = kBy >= 0 ? x.v[i] << (kBy & 7) : x.v[i] >> (-kBy & 7);
    q.v[i] = static_cast<uint8_t>(q.v[i] | (moved & mask));
  }
  return q;
}
inline Bytes high_nibbles(Bytes x) {
  for (uint8_t& byte : x.v) byte = static_cast<uint8_t>(byte >> 4);
  return x;
}
template <int kShift>
inline Ints broadcast_shifted(int32_t x) {
  Ints r;
  for (int32_t& lane : r.v) lane = x * (1 << kShift);
  return r;
}
inline Vec to_vec(const Ints& x) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = static_cast<float>(x.v[i]);
  return r;
}
inline Vec load_unsigned(const uint8_t* p) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = static_cast<float>(p[i]);
  return r;
}
inline Vec load_signed(const uint8_t* p) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = static_cast<float>(static_cast<int8_t>(p[i]));
  return r;
}
inline Vec load_half(const uint8_t* p) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = half_to_float(p + 2 * i);
  return r;
}
constexpr int kRowsAbreast = 1;
template <int kGroups, int kLargest, int kRows, typename Ahead>
inline void dot(const Bytes* w, const int8_t* x, int64_t, Ahead ahead, Ints* sums) {
  static_assert(kRows == 1);
  for (int g = 0; g < kGroups; ++g) {
    for (int i = 0; i < kWidth; ++i) {
      const uint8_t* row = w[g].v + 4 * i;
      const int8_t* columns = x + 4 * g;
      sums->v[i] +=
          row[0] * columns[0] + row[1] * columns[1] + row[2] * columns[2] + row[3] * columns[3];
    }
    ahead.ask(g);
  }
}

#endif

}  // namespace eecore::cpu::EECORE_CAPABILITY
