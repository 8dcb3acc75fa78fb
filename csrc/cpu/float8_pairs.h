// Rows of float8 as float16 numbers of 1/256 of their values, which CPUs with AVX2 widen in one
// instruction: sign, exponent and mantissa are shifted to their places in float16, whose bias is 8
// larger. That is exact, also for multiples of 2^-9. Only NaN becomes finite.
#pragma once

#include "float8.h"
#include "pair.h"

#if defined(__AVX2__)

namespace eecore::cpu::EECORE_CAPABILITY {

// Storage element of such a row, in pairs of vectors: even and odd elements, like bfloat16, but the
// even ones come first, then the odd ones.
struct ScaledHalf {
  uint16_t bits;
};
constexpr float kScaledHalf = 256.0f;  // the factor back to the values

template <>
inline Pair kept_as<ScaledHalf, float>(Pair x) {
  return kept_as<BFloat16, float>(x);
}
template <>
inline Pair kept_as<float, ScaledHalf>(Pair x) {
  return kept_as<float, BFloat16>(x);
}

#if defined(__AVX512F__)

template <int kVector>
inline Vec load_of_pair(const ScaledHalf* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + kVector))};
}

// Widens rows, and detects whether one of them holds NaN.
class ScaledHalves {
 public:
  // Whole pairs, with zeros for missing elements.
  void widen(const Float8* in, int64_t n, ScaledHalf* out) {
    for (int64_t i = 0; i < n; i += 64) {
      const __m512i x = load_bytes(in + i, n - i);
      // Adding one changes the sign only for NaN.
      const __m512i next = _mm512_add_epi8(x, _mm512_set1_epi8(1));
      changed_ = _mm512_ternarylogic_epi32(changed_, next, x, 0xf6);
      store(even_of(x), odd_of(x), n - i, out + i);
    }
  }
  bool has_nan() const { return _mm512_movepi8_mask(changed_) != 0; }
  // The same for rows that hold NaN.
  static void widen_nan(const Float8* in, int64_t n, ScaledHalf* out) {
    const __m512i nan = _mm512_set1_epi16(0x7e00);
    for (int64_t i = 0; i < n; i += 64) {
      const __m512i x = load_bytes(in + i, n - i);
      const __m512i all = _mm512_or_si512(x, _mm512_set1_epi8(-0x80));
      const __mmask64 is_nan = _mm512_cmpeq_epi8_mask(all, _mm512_set1_epi8(-1));
      const __m512i where = _mm512_movm_epi8(is_nan);
      const __mmask32 even = _mm512_movepi16_mask(_mm512_slli_epi16(where, 8));
      const __mmask32 odd = _mm512_movepi16_mask(where);
      store(_mm512_mask_mov_epi16(even_of(x), even, nan),
            _mm512_mask_mov_epi16(odd_of(x), odd, nan), n - i, out + i);
    }
  }

 private:
  static __m512i load_bytes(const Float8* p, int64_t n) {
    return n >= 64 ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi8((uint64_t{1} << n) - 1, p);
  }
  static __m512i odd_of(__m512i x) {
    return _mm512_and_si512(_mm512_srai_epi16(x, 1), _mm512_set1_epi16(-0x4080));
  }
  // A shuffle, because shifts have only one unit.
  static __m512i even_of(__m512i x) {
    const __m128i low = _mm_setr_epi8(-1, 0, -1, 2, -1, 4, -1, 6, -1, 8, -1, 10, -1, 12, -1, 14);
    return odd_of(_mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(low)));
  }
  static void store(__m512i even, __m512i odd, int64_t n, ScaledHalf* out) {
    auto* pairs = reinterpret_cast<__m256i*>(out);
    _mm256_storeu_si256(pairs, _mm512_castsi512_si256(even));
    _mm256_storeu_si256(pairs + 1, _mm512_castsi512_si256(odd));
    if (n <= 32) return;
    _mm256_storeu_si256(pairs + 2, _mm512_extracti64x4_epi64(even, 1));
    _mm256_storeu_si256(pairs + 3, _mm512_extracti64x4_epi64(odd, 1));
  }

  __m512i changed_ = _mm512_setzero_si512();  // the sign bit is set if any element changed its sign
};

#else

template <int kVector>
inline Vec load_of_pair(const ScaledHalf* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + kVector))};
}

// Widens rows, and detects whether one of them holds NaN.
class ScaledHalves {
 public:
  // Whole pairs, with zeros for missing elements.
  void widen(const Float8* in, int64_t n, ScaledHalf* out) {
    for (int64_t i = 0; i < n; i += 32) {
      const __m256i x = load_bytes(in + i, n - i);
      // Adding one changes the sign only for NaN.
      const __m256i next = _mm256_add_epi8(x, _mm256_set1_epi8(1));
      changed_ = _mm256_or_si256(changed_, _mm256_xor_si256(next, x));
      store(even_of(x), odd_of(x), n - i, out + i);
    }
  }
  bool has_nan() const { return _mm256_movemask_epi8(changed_) != 0; }
  // The same for rows that hold NaN.
  static void widen_nan(const Float8* in, int64_t n, ScaledHalf* out) {
    const __m256i nan = _mm256_set1_epi16(0x7e00);
    for (int64_t i = 0; i < n; i += 32) {
      const __m256i x = load_bytes(in + i, n - i);
      const __m256i where =
          _mm256_cmpeq_epi8(_mm256_or_si256(x, _mm256_set1_epi8(-0x80)), _mm256_set1_epi8(-1));
      const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(where, 8), 15);
      const __m256i odd = _mm256_srai_epi16(where, 15);
      store(_mm256_blendv_epi8(even_of(x), nan, even), _mm256_blendv_epi8(odd_of(x), nan, odd),
            n - i, out + i);
    }
  }

 private:
  static __m256i load_bytes(const Float8* p, int64_t n) {
    if (n >= 32) return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    alignas(32) uint8_t bytes[32] = {};
    __builtin_memcpy(bytes, p, static_cast<uint64_t>(n));
    return _mm256_load_si256(reinterpret_cast<const __m256i*>(bytes));
  }
  static __m256i odd_of(__m256i x) {
    return _mm256_and_si256(_mm256_srai_epi16(x, 1), _mm256_set1_epi16(-0x4080));
  }
  static __m256i even_of(__m256i x) { return odd_of(_mm256_slli_epi16(x, 8)); }
  static void store(__m256i even, __m256i odd, int64_t n, ScaledHalf* out) {
    auto* pairs = reinterpret_cast<__m128i*>(out);
    _mm_storeu_si128(pairs, _mm256_castsi256_si128(even));
    _mm_storeu_si128(pairs + 1, _mm256_castsi256_si128(odd));
    if (n <= 16) return;
    _mm_storeu_si128(pairs + 2, _mm256_extracti128_si256(even, 1));
    _mm_storeu_si128(pairs + 3, _mm256_extracti128_si256(odd, 1));
  }

  __m256i changed_ = _mm256_setzero_si256();  // the sign bit is set if any element changed its sign
};

#endif

template <>
inline Pair load_pair(const ScaledHalf* p) {
  return {load_of_pair<0>(p), load_of_pair<1>(p)};
}
// Missing elements are zero.
template <>
inline Pair load_pair_partial(const ScaledHalf* p, int64_t) {
  return load_pair(p);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY

#endif
