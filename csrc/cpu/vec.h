// One float vector type per capability, with loads and stores that convert bfloat16.
//
// Vec holds kWidth floats: 16 (AVX-512), 8 (AVX2, portable). bfloat16 is a uint16_t in memory; it
// is widened exactly and narrowed to nearest even, NaN kept. load_partial and store_partial touch
// only the first n elements, so a tail never reads or writes past its row.
#pragma once

#include "kernel.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace eecore::cpu::EECORE_CAPABILITY {

// Unrolls the following loop early, so that an array of vectors indexed by constants stays in
// registers. Not where a vector is itself a loop: unrolling would keep it from being vectorised.
#if defined(__AVX2__)
#define EECORE_UNROLL _Pragma("GCC unroll 16")
#else
#define EECORE_UNROLL
#endif

// Prefetches a line of 64 bytes that is read soon, into the second-level cache: the first level has
// too few lines in flight to keep memory busy.
// Always inlined: GCC treats a function that only prefetches as one without effect, and drops calls
// of it.
[[gnu::always_inline]] inline void prefetch(const void* line) { __builtin_prefetch(line, 0, 2); }
// The same for a weight; kNear: into the first level, see kAsksFirstLevel.
template <bool kNear>
[[gnu::always_inline]] inline void prefetch_weight(const void* line) {
  __builtin_prefetch(line, 0, kNear ? 3 : 2);
}

// Storage element of DType::kBFloat16.
struct BFloat16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}
inline void from_float(float value, float* out) { *out = value; }
inline void from_float(float value, BFloat16* out) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  out->bits = is_nan ? static_cast<uint16_t>((bits >> 16) | 0x40u) : static_cast<uint16_t>(rounded);
}

#if defined(__AVX512F__)

constexpr int kWidth = 16;
struct Vec {
  __m512 v;
};
inline __mmask16 first(int64_t n) { return static_cast<__mmask16>((1u << n) - 1u); }
inline Vec zero() { return {_mm512_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm512_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline Vec widen(__m256i bits) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16))};
}
inline Vec load(const BFloat16* p) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Vec load_partial(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first(n), p)}; }
inline Vec load_partial(const BFloat16* p, int64_t n) {
  return widen(_mm256_maskz_loadu_epi16(first(n), p));
}
inline __m256i narrow(Vec x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_srli_epi32(
      _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __m512i quiet = _mm512_or_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  const __mmask16 nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, quiet));
}
inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x.v); }
inline void store(BFloat16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(x));
}
inline void store_partial(float* p, Vec x, int64_t n) { _mm512_mask_storeu_ps(p, first(n), x.v); }
inline void store_partial(BFloat16* p, Vec x, int64_t n) {
  _mm256_mask_storeu_epi16(p, first(n), narrow(x));
}
inline Vec operator+(Vec a, Vec b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm512_min_ps(a.v, b.v)}; }
// By lane: yes where a > b, else no, also where one is NaN.
inline Vec where_greater(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm512_mask_mov_ps(no.v, _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), yes.v)};
}
inline float sum(Vec x) { return _mm512_reduce_add_ps(x.v); }
inline float max_element(Vec x) { return _mm512_reduce_max_ps(x.v); }
inline Vec round_to_int(Vec x) {
  return {_mm512_roundscale_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x * 2^n for whole n in [-126, 128].
inline Vec scale_by_power_of_two(Vec x, Vec n) { return {_mm512_scalef_ps(x.v, n.v)}; }
// y, but 0 where x is less than a bound.
inline Vec zero_below(Vec bound, Vec x, Vec y) {
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, bound.v, _CMP_NLT_UQ), y.v)};
}

#elif defined(__AVX2__)

constexpr int kWidth = 8;
struct Vec {
  __m256 v;
};
inline __m256i first(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)),
                            _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline Vec zero() { return {_mm256_setzero_ps()}; }
inline Vec broadcast(float x) { return {_mm256_set1_ps(x)}; }
inline Vec load(const float* p) { return {_mm256_loadu_ps(p)}; }
inline Vec widen(__m128i bits) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}
inline Vec load(const BFloat16* p) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load_partial(const float* p, int64_t n) { return {_mm256_maskload_ps(p, first(n))}; }
inline Vec load_partial(const BFloat16* p, int64_t n) {
  uint16_t lanes[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i].bits;
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(lanes)));
}
inline __m128i narrow(Vec x) {
  const __m256i bits = _mm256_castps_si256(x.v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x.v, x.v, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  return _mm256_castsi256_si128(packed);
}
inline void store(float* p, Vec x) { _mm256_storeu_ps(p, x.v); }
inline void store(BFloat16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(x));
}
inline void store_partial(float* p, Vec x, int64_t n) { _mm256_maskstore_ps(p, first(n), x.v); }
inline void store_partial(BFloat16* p, Vec x, int64_t n) {
  uint16_t lanes[8];
  _mm_storeu_si128(reinterpret_cast<__m128i*>(lanes), narrow(x));
  for (int64_t i = 0; i < n; ++i) p[i].bits = lanes[i];
}
inline Vec operator+(Vec a, Vec b) { return {_mm256_add_ps(a.v, b.v)}; }
inline Vec operator-(Vec a, Vec b) { return {_mm256_sub_ps(a.v, b.v)}; }
inline Vec operator*(Vec a, Vec b) { return {_mm256_mul_ps(a.v, b.v)}; }
inline Vec operator/(Vec a, Vec b) { return {_mm256_div_ps(a.v, b.v)}; }
inline Vec fma(Vec a, Vec b, Vec c) { return {_mm256_fmadd_ps(a.v, b.v, c.v)}; }
inline Vec max(Vec a, Vec b) { return {_mm256_max_ps(a.v, b.v)}; }
inline Vec min(Vec a, Vec b) { return {_mm256_min_ps(a.v, b.v)}; }
// By lane: yes where a > b, else no, also where one is NaN.
inline Vec where_greater(Vec a, Vec b, Vec yes, Vec no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_GT_OQ))};
}
inline float sum(Vec x) {
  __m128 half = _mm_add_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  half = _mm_add_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
inline float max_element(Vec x) {
  __m128 half = _mm_max_ps(_mm256_castps256_ps128(x.v), _mm256_extractf128_ps(x.v, 1));
  half = _mm_max_ps(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
inline Vec round_to_int(Vec x) {
  return {_mm256_round_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
// x * 2^n for whole n in [-126, 128], in two steps so that neither power is outside the normal
// range.
inline Vec scale_by_power_of_two(Vec x, Vec n) {
  const __m256i whole = _mm256_cvtps_epi32(n.v);
  const __m256i low = _mm256_srai_epi32(whole, 1);
  const __m256i high = _mm256_sub_epi32(whole, low);
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256 a = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(low, bias), 23));
  const __m256 b = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(high, bias), 23));
  return {_mm256_mul_ps(_mm256_mul_ps(x.v, a), b)};
}
// y, but 0 where x is less than a bound.
inline Vec zero_below(Vec bound, Vec x, Vec y) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.v, bound.v, _CMP_NLT_UQ), y.v)};
}

#else

// Plain loops over eight lanes, which compilers turn into the baseline's vectors.
constexpr int kWidth = 8;
struct Vec {
  float v[8];
};
#define EECORE_LANES for (int i = 0; i < 8; ++i)
inline Vec broadcast(float x) {
  Vec r;
  EECORE_LANES r.v[i] = x;
  return r;
}
inline Vec zero() { return broadcast(0.0f); }
template <typename T>
inline Vec load(const T* p) {
  Vec r;
  EECORE_LANES r.v[i] = to_float(p[i]);
  return r;
}
template <typename T>
inline Vec load_partial(const T* p, int64_t n) {
  Vec r;
  EECORE_LANES r.v[i] = i < n ? to_float(p[i]) : 0.0f;
  return r;
}
template <typename T>
inline void store_partial(T* p, Vec x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) from_float(x.v[i], p + i);
}
template <typename T>
inline void store(T* p, Vec x) {
  EECORE_LANES from_float(x.v[i], p + i);
}
#define EECORE_BINARY(name, expression) \
  inline Vec name(Vec a, Vec b) { \
    Vec r; \
    EECORE_LANES r.v[i] = expression; \
    return r; \
  }
EECORE_BINARY(operator+, a.v[i] + b.v[i])
EECORE_BINARY(operator-, a.v[i] - b.v[i])
EECORE_BINARY(operator*, a.v[i] * b.v[i])
EECORE_BINARY(operator/, a.v[i] / b.v[i])
EECORE_BINARY(max, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
EECORE_BINARY(min, a.v[i] < b.v[i] ? a.v[i] : b.v[i])
#undef EECORE_BINARY
inline Vec fma(Vec a, Vec b, Vec c) {
  Vec r;
  EECORE_LANES r.v[i] = a.v[i] * b.v[i] + c.v[i];
  return r;
}
// By lane: yes where a > b, else no, also where one is NaN.
inline Vec where_greater(Vec a, Vec b, Vec yes, Vec no) {
  EECORE_LANES no.v[i] = a.v[i] > b.v[i] ? yes.v[i] : no.v[i];
  return no;
}
inline float sum(Vec x) {
  return ((x.v[0] + x.v[4]) + (x.v[2] + x.v[6])) + ((x.v[1] + x.v[5]) + (x.v[3] + x.v[7]));
}
inline float max_element(Vec x) {
  float r = x.v[0];
  for (int i = 1; i < 8; ++i) r = x.v[i] > r ? x.v[i] : r;
  return r;
}
inline Vec round_to_int(Vec x) {
  // Adding and subtracting 1.5 * 2^23 rounds to nearest even; exact for |x| < 2^22.
  Vec r;
  EECORE_LANES r.v[i] = (x.v[i] + 12582912.0f) - 12582912.0f;
  return r;
}
// x * 2^n for whole n in [-126, 128], in two steps so that neither power is outside the normal
// range.
inline Vec scale_by_power_of_two(Vec x, Vec n) {
  Vec r;
  EECORE_LANES {
    const int32_t whole = n.v[i] == n.v[i] ? static_cast<int32_t>(n.v[i]) : 0;  // then x is NaN too
    const int32_t low = whole >> 1;
    const uint32_t a_bits = static_cast<uint32_t>(low + 127) << 23;
    const uint32_t b_bits = static_cast<uint32_t>(whole - low + 127) << 23;
    float a, b;
    __builtin_memcpy(&a, &a_bits, 4);
    __builtin_memcpy(&b, &b_bits, 4);
    r.v[i] = x.v[i] * a * b;
  }
  return r;
}
// y, but 0 where x is less than a bound.
inline Vec zero_below(Vec bound, Vec x, Vec y) {
  EECORE_LANES y.v[i] = x.v[i] < bound.v[i] ? 0.0f : y.v[i];
  return y;
}
#undef EECORE_LANES

#endif

// sum + x * y, in the register of sum: where sums take nearly all registers, GCC would move some to
// memory between their products.
[[gnu::always_inline]] inline Vec add_product(Vec sum, Vec x, Vec y) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm("vfmadd231ps %2, %1, %0" : "+x"(sum.v) : "x"(x.v), "x"(y.v));
  return sum;
#else
  return fma(x, y, sum);
#endif
}

// x rounded to T.
template <typename T>
inline Vec round_to(Vec x);
template <>
inline Vec round_to<float>(Vec x) {
  return x;
}
template <>
inline Vec round_to<BFloat16>(Vec x) {
#if defined(__AVX2__)
  return widen(narrow(x));
#else
  BFloat16 stored[kWidth];
  store(stored, x);
  return load(stored);
#endif
}

// Four vectors folded into one, an input of merge_fours.
inline Vec fold_four(const Vec* v) {
#if defined(__AVX512F__)
  const __m512 ab =
      _mm512_add_ps(_mm512_unpacklo_ps(v[0].v, v[1].v), _mm512_unpackhi_ps(v[0].v, v[1].v));
  const __m512 cd =
      _mm512_add_ps(_mm512_unpacklo_ps(v[2].v, v[3].v), _mm512_unpackhi_ps(v[2].v, v[3].v));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  return {_mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))};
#elif defined(__AVX2__)
  const __m256 ab =
      _mm256_add_ps(_mm256_unpacklo_ps(v[0].v, v[1].v), _mm256_unpackhi_ps(v[0].v, v[1].v));
  const __m256 cd =
      _mm256_add_ps(_mm256_unpacklo_ps(v[2].v, v[3].v), _mm256_unpackhi_ps(v[2].v, v[3].v));
  const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
  return {_mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high))};
#else
  Vec sums = zero();
  for (int i = 0; i < 4; ++i) reinterpret_cast<float*>(&sums)[i] = sum(v[i]);
  return sums;
#endif
}
// The sums of kWidth vectors, from kWidth / 4 folded ones: each in the order of sum_four.
inline Vec merge_fours(const Vec* folded) {
#if defined(__AVX512F__)
  const __m512 a = folded[0].v, b = folded[1].v, c = folded[2].v, d = folded[3].v;
  const __m512 ab =
      _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  const __m512 cd =
      _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  return {_mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd))};
#elif defined(__AVX2__)
  const __m256 a = folded[0].v, b = folded[1].v;
  return {_mm256_add_ps(_mm256_permute2f128_ps(a, b, 0x20), _mm256_permute2f128_ps(a, b, 0x31))};
#else
  Vec sums;
  for (int i = 0; i < kWidth; ++i) {
    reinterpret_cast<float*>(&sums)[i] = reinterpret_cast<const float*>(folded + i / 4)[i % 4];
  }
  return sums;
#endif
}
// out[i] = sum(v[i]) for the four vectors, each in the same order.
inline void sum_four(const Vec* v, float* out) {
#if defined(__AVX512F__)
  const __m512 abcd = fold_four(v).v;
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
  const __m256 abcd = fold_four(v).v;
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
#endif
}

// e^r for |r| <= log(2) / 2.
inline Vec exp_of_rest(Vec r) {
  Vec p = broadcast(1.98756912e-4f);
  p = fma(p, r, broadcast(1.39819994e-3f));
  p = fma(p, r, broadcast(8.33345205e-3f));
  p = fma(p, r, broadcast(4.16657962e-2f));
  p = fma(p, r, broadcast(1.66666657e-1f));
  p = fma(p, r, broadcast(5.00000000e-1f));
  return fma(p * r, r, r + broadcast(1.0f));
}
// x - n * log(2).
inline Vec rest_of(Vec x, Vec n) {
  return fma(n, broadcast(-1.42860677e-6f), fma(n, broadcast(-0.693145752f), x));
}
constexpr float kMinExponent = -87.3f;
constexpr float kLog2OfE = 1.44269504f;

// e^x, within 2 ulp for x in [-87.3, 88]; 0 for smaller x and -inf, infinity for larger x, NaN for
// NaN. Denormal results are never computed: one takes a core some 150 cycles, and a hidden score is
// -inf.
inline Vec exp(Vec x) {
  // If one operand is NaN, max and min return the second: NaN passes both.
  const Vec bounded = max(broadcast(kMinExponent), min(broadcast(88.8f), x));
  const Vec n = round_to_int(bounded * broadcast(kLog2OfE));
  const Vec p = exp_of_rest(rest_of(bounded, n));
  return zero_below(broadcast(kMinExponent), x, scale_by_power_of_two(p, n));
}

#if defined(__AVX512F__)
// The bits of 2^(i / 16) minus i << 19: with n << 19 added they are the bits of 2^(n / 16) where
// the last four bits of n are i.
inline __m512i powers_of_sixteenths() {
  return _mm512_setr_epi32(0x3f800000, 0x3f7daac3, 0x3f7b95c2, 0x3f79c3d3, 0x3f7837f0, 0x3f76f532,
                           0x3f75fed7, 0x3f75583f, 0x3f7504f3, 0x3f7508a4, 0x3f75672a, 0x3f76248c,
                           0x3f7744fd, 0x3f78ccdf, 0x3f7ac0c7, 0x3f7d257d);
}
#endif

// The same for x <= 0 only.
inline Vec exp_at_most_one(Vec x) {
#if defined(__AVX512F__)
  // A sum this large keeps no fraction, and its last bits are n.
  const Vec large = broadcast(12582912.0f);
  const Vec bounded = max(broadcast(kMinExponent), x);
  const Vec sum = fma(bounded, broadcast(16.0f * kLog2OfE), large);
  const Vec n = sum - large;
  const Vec r =
      fma(n, broadcast(-1.42860677e-6f / 16), fma(n, broadcast(-0.693145752f / 16), bounded));
  const __m512i bits = _mm512_castps_si512(sum.v);
  const __m512i power = _mm512_add_epi32(_mm512_permutexvar_epi32(bits, powers_of_sixteenths()),
                                         _mm512_slli_epi32(bits, 19));
  const Vec whole = {_mm512_castsi512_ps(power)};
  const Vec p =
      fma(fma(broadcast(1.66666657e-1f), r, broadcast(5.00000000e-1f)), r, broadcast(1.0f)) * r;
  return zero_below(broadcast(kMinExponent), x, fma(whole, p, whole));
#elif defined(__AVX2__)
  // A sum this large keeps no fraction, and its last bits are n + 127: the exponent of 2^n.
  const Vec large = broadcast(12582912.0f + 127.0f);
  const Vec bounded = max(broadcast(kMinExponent), x);
  const Vec sum = fma(bounded, broadcast(kLog2OfE), large);
  const Vec power = {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(sum.v), 23))};
  const Vec p = exp_of_rest(rest_of(bounded, sum - large));
  return zero_below(broadcast(kMinExponent), x, p * power);
#else
  return exp(x);
#endif
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
