// float8 (e4m3, without infinities) in addition to vec.h's types: widened exactly, narrowed to
// nearest even. What is too large becomes the largest number, 448; NaN stays NaN.
//
// Sign, four bits of exponent with a bias of 7, three of mantissa. Numbers below 2^-6 are multiples
// of 2^-9: adding 2^14 to a float32 puts them in its last bits. Neither direction uses a denormal
// float32, so a CPU may treat denormals as zeros.
#pragma once

#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Storage element of a cache in float8.
struct Float8 {
  uint8_t bits;
};

constexpr float kLargestFloat8 = 448.0f;
constexpr float kSmallestNormalFloat8 = 0.015625f;  // 2^-6
constexpr float kFloat8Grid = 16384.0f;  // 2^14, where neighbouring floats are 2^-9 apart
constexpr int kFloat8GridBits = 0x46800000;
constexpr int kFloat8Bias = 120 << 3;  // of a float32's exponent relative to a float8's
constexpr int kNaNFloat8 = 0x7f;

inline float to_float(Float8 x) {
  const int magnitude = x.bits & 0x7f;
  if (magnitude == kNaNFloat8) return __builtin_nanf("");
  const bool is_small = magnitude < 8;
  const int bits = (magnitude + kFloat8Bias + (is_small ? 8 : 0)) << 20;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  if (is_small) value -= kSmallestNormalFloat8;
  return (x.bits & 0x80) != 0 ? -value : value;
}

inline void from_float(float value, Float8* out) {
  float magnitude = __builtin_fabsf(value);
  if (magnitude > kLargestFloat8) magnitude = kLargestFloat8;
  int code;
  if (magnitude < kSmallestNormalFloat8) {
    const float on_grid = magnitude + kFloat8Grid;
    __builtin_memcpy(&code, &on_grid, 4);
    code -= kFloat8GridBits;
  } else {
    __builtin_memcpy(&code, &magnitude, 4);
    code = ((code + 0x7ffff + (code >> 20 & 1)) >> 20) - kFloat8Bias;
  }
  const int sign = __builtin_signbit(value) != 0 ? 0x80 : 0;
  out->bits = static_cast<uint8_t>(value != value ? kNaNFloat8 : code | sign);
}

#if defined(__AVX512F__)

inline Vec widen_float8(__m128i bits) {
  const __m512i x = _mm512_cvtepu8_epi32(bits);
  const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi32(0x7f));
  const __mmask16 is_small = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
  const __mmask16 is_nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(kNaNFloat8));
  __m512i code = _mm512_add_epi32(magnitude, _mm512_set1_epi32(kFloat8Bias));
  code = _mm512_mask_add_epi32(code, is_small, code, _mm512_set1_epi32(8));
  __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(code, 20));
  value = _mm512_mask_sub_ps(value, is_small, value, _mm512_set1_ps(kSmallestNormalFloat8));
  const __m512i sign = _mm512_slli_epi32(_mm512_and_si512(x, _mm512_set1_epi32(0x80)), 24);
  const __m512i quiet =
      _mm512_mask_mov_epi32(_mm512_castps_si512(value), is_nan, _mm512_set1_epi32(0x7fc00000));
  return {_mm512_castsi512_ps(_mm512_or_si512(quiet, sign))};
}
inline __m128i narrow_float8(Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  const __m512 magnitude = _mm512_min_ps(_mm512_abs_ps(x.v), _mm512_set1_ps(kLargestFloat8));
  const __m512i code = _mm512_castps_si512(magnitude);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(code, 20), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_sub_epi32(
      _mm512_srli_epi32(_mm512_add_epi32(code, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7ffff))),
                        20),
      _mm512_set1_epi32(kFloat8Bias));
  const __mmask16 is_small =
      _mm512_cmp_ps_mask(magnitude, _mm512_set1_ps(kSmallestNormalFloat8), _CMP_LT_OQ);
  const __m512i on_grid =
      _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(magnitude, _mm512_set1_ps(kFloat8Grid))),
                       _mm512_set1_epi32(kFloat8GridBits));
  const __m512i whole = _mm512_or_si512(_mm512_mask_mov_epi32(rounded, is_small, on_grid), sign);
  return _mm512_cvtepi32_epi8(_mm512_mask_mov_epi32(whole, is_nan, _mm512_set1_epi32(kNaNFloat8)));
}
inline Vec load(const Float8* p) {
  return widen_float8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_partial(const Float8* p, int64_t n) {
  return widen_float8(_mm_maskz_loadu_epi8(first(n), p));
}
inline void store(Float8* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow_float8(x));
}
inline void store_partial(Float8* p, Vec x, int64_t n) {
  _mm_mask_storeu_epi8(p, first(n), narrow_float8(x));
}

// The first n elements as bfloat16, with zeros in place of the rest, 64 at a time.
struct Float8Words {
  __m512i low, high;  // 32 each
};

// Makes such words: their upper bytes from a table by sign and exponent, both bytes of the
// multiples of 2^-9 from tables by mantissa. The tables are kept in registers: the compiler would
// rebuild them for each row, on the shuffle unit, which is already the busiest.
class Float8Widener {
 public:
  Float8Words load(const Float8* p, int64_t n) const {
    const __m512i loaded =
        n >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, p);
    // Unpacking takes the lower or the upper half of each of four parts.
    const __m512i x = _mm512_permutexvar_epi64(order_, loaded);
    const __mmask64 is_small = _mm512_testn_epi8_mask(x, exponent_);
    const __mmask64 is_nan = _mm512_cmpeq_epi8_mask(_mm512_or_si512(x, sign_), ones_);
    const __m512i nibble = _mm512_and_si512(x, nibble_);
    __m512i high = _mm512_shuffle_epi8(upper_, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble_));
    high = _mm512_mask_shuffle_epi8(high, is_small, upper_of_small_, nibble);
    high = _mm512_mask_mov_epi8(high, is_nan, nan_);
    high = _mm512_or_si512(high, _mm512_and_si512(x, sign_));
    __m512i low = _mm512_slli_epi16(nibble, 4);
    low = _mm512_mask_shuffle_epi8(low, is_small, lower_of_small_, nibble);
    return {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  }

 private:
  static __m512i held(__m512i x) {
    asm("" : "+v"(x));
    return x;
  }
  static __m512i all(int byte) { return held(_mm512_set1_epi8(static_cast<char>(byte))); }
  static __m512i each_16(__m128i bytes) { return held(_mm512_broadcast_i32x4(bytes)); }

  __m512i exponent_ = all(0x78), sign_ = all(0x80), ones_ = all(0xff), nibble_ = all(0x0f);
  __m512i nan_ = all(0x7f);
  __m512i order_ = held(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
  __m512i upper_ = each_16(_mm_setr_epi8(0x3c, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43, -0x44,
                                         -0x43, -0x42, -0x41, -0x40, -0x3f, -0x3e, -0x3d));
  __m512i upper_of_small_ =
      each_16(_mm_setr_epi8(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0));
  __m512i lower_of_small_ =
      each_16(_mm_setr_epi8(0, 0, -0x80, -0x40, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0));
};

#elif defined(__AVX2__)

inline Vec widen_float8(__m128i bits) {
  const __m256i x = _mm256_cvtepu8_epi32(bits);
  const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
  const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(kNaNFloat8));
  const __m256i code = _mm256_add_epi32(_mm256_add_epi32(magnitude, _mm256_set1_epi32(kFloat8Bias)),
                                        _mm256_and_si256(is_small, _mm256_set1_epi32(8)));
  const __m256 less =
      _mm256_and_ps(_mm256_castsi256_ps(is_small), _mm256_set1_ps(kSmallestNormalFloat8));
  const __m256 value = _mm256_sub_ps(_mm256_castsi256_ps(_mm256_slli_epi32(code, 20)), less);
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x80)), 24);
  const __m256i quiet =
      _mm256_blendv_epi8(_mm256_castps_si256(value), _mm256_set1_epi32(0x7fc00000), is_nan);
  return {_mm256_castsi256_ps(_mm256_or_si256(quiet, sign))};
}
inline __m128i narrow_float8(Vec x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256 absolute =
      _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
  const __m256 magnitude = _mm256_min_ps(absolute, _mm256_set1_ps(kLargestFloat8));
  const __m256i code = _mm256_castps_si256(magnitude);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(code, 20), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_sub_epi32(
      _mm256_srli_epi32(_mm256_add_epi32(code, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7ffff))),
                        20),
      _mm256_set1_epi32(kFloat8Bias));
  const __m256i is_small = _mm256_castps_si256(
      _mm256_cmp_ps(magnitude, _mm256_set1_ps(kSmallestNormalFloat8), _CMP_LT_OQ));
  const __m256i on_grid =
      _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(magnitude, _mm256_set1_ps(kFloat8Grid))),
                       _mm256_set1_epi32(kFloat8GridBits));
  __m256i whole = _mm256_or_si256(_mm256_blendv_epi8(rounded, on_grid, is_small), sign);
  whole = _mm256_blendv_epi8(whole, _mm256_set1_epi32(kNaNFloat8), is_nan);
  const __m128i words =
      _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  return _mm_packus_epi16(words, words);
}
inline Vec load(const Float8* p) {
  return widen_float8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_partial(const Float8* p, int64_t n) {
  uint8_t lanes[8] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i].bits;
  return widen_float8(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(lanes)));
}
inline void store(Float8* p, Vec x) {
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), narrow_float8(x));
}
inline void store_partial(Float8* p, Vec x, int64_t n) {
  uint8_t lanes[8];
  _mm_storel_epi64(reinterpret_cast<__m128i*>(lanes), narrow_float8(x));
  for (int64_t i = 0; i < n; ++i) p[i].bits = lanes[i];
}

#endif

// A head's scale; null where there are no scales.
inline const float* scale_of(const float* scales, int64_t head) {
  return scales != nullptr ? scales + head : nullptr;
}

// out = row / scale, rounded: computed with the inverse of scale, as on every path.
inline void store_scaled_row(const float* row, int64_t n, const float* scale, Float8* out) {
  const Vec inverse = broadcast(scale != nullptr ? 1.0f / *scale : 1.0f);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(row + i) * inverse);
  if (i < n) store_partial(out + i, load_partial(row + i, n - i) * inverse, n - i);
}

// Calls body<T, C>() for a model of `dtype`, whose elements are T, with caches of C.
template <typename Body>
void dispatch_cache(DType dtype, const CacheFormat& format, const Body& body) {
  if (dtype == DType::kFloat32) {
    if (format.is_float8) return body.template operator()<float, Float8>();
    if (format.is_bfloat16) return body.template operator()<float, BFloat16>();
    return body.template operator()<float, float>();
  }
  if (format.is_float8) return body.template operator()<BFloat16, Float8>();
  body.template operator()<BFloat16, BFloat16>();
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
