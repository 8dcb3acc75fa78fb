// Two vectors of consecutive elements in a type-specific order, the same for load and store: plain
// for float32, even and odd elements for bfloat16, which then widens with one shift and one mask.
// Sums over pairs, and arithmetic between pairs of one storage type, need not know the order.
#pragma once

#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int kPairWidth = 2 * kWidth;
struct Pair {
  Vec a, b;
};

inline Pair operator*(Pair x, Vec y) { return {x.a * y, x.b * y}; }

// A pair kept as float32.
inline Pair load_kept(const float* p) { return {load(p), load(p + kWidth)}; }
inline void store_kept(float* p, Pair x) {
  store(p, x.a);
  store(p + kWidth, x.b);
}

template <typename T>
inline Pair load_pair(const T* p) {
  return {load(p), load(p + kWidth)};
}
template <typename T>
inline void store_pair(T* p, Pair x) {
  store(p, x.a);
  store(p + kWidth, x.b);
}
// The first n elements, with n below kPairWidth, and for a store a multiple of 8; a load puts zeros
// in place of the rest.
template <typename T>
inline Pair load_pair_partial(const T* p, int64_t n) {
  return {load_partial(p, min_of(n, kWidth)), load_partial(p + kWidth, max_of(n - kWidth, 0))};
}
template <typename T>
inline void store_pair_partial(T* p, Pair x, int64_t n) {
  store_partial(p, x.a, min_of(n, kWidth));
  store_partial(p + kWidth, x.b, max_of(n - kWidth, 0));
}

// One vector of a pair, the first or the second.
template <int kVector, typename T>
inline Vec load_of_pair(const T* p) {
  return load(p + kVector * kWidth);
}

// Converts a pair from the order of W's pairs to that of T's.
template <typename T, typename W>
inline Pair kept_as(Pair x) {
  return x;
}

#if defined(__AVX512F__)

template <>
inline Pair kept_as<float, BFloat16>(Pair x) {
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  return {{_mm512_permutex2var_ps(x.a.v, low, x.b.v)},
          {_mm512_permutex2var_ps(x.a.v, high, x.b.v)}};
}
template <>
inline Pair kept_as<BFloat16, float>(Pair x) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
  return {{_mm512_permutex2var_ps(x.a.v, even, x.b.v)},
          {_mm512_permutex2var_ps(x.a.v, odd, x.b.v)}};
}
template <int kVector>
inline Vec vector_of_pair(__m512i bits) {
  return {_mm512_castsi512_ps(kVector == 0 ? _mm512_slli_epi32(bits, 16)
                                           : _mm512_and_si512(bits, _mm512_set1_epi32(-65536)))};
}
inline Pair split_pair(__m512i bits) { return {vector_of_pair<0>(bits), vector_of_pair<1>(bits)}; }
template <int kVector>
inline Vec load_of_pair(const BFloat16* p) {
  return vector_of_pair<kVector>(_mm512_loadu_si512(p));
}
inline __m512i join_pair(Pair x) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(narrow(x.a)),
                         _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(x.b)), 16));
}
inline __mmask32 first_of_pair(int64_t n) { return static_cast<__mmask32>((1u << n) - 1u); }
template <>
inline Pair load_pair(const BFloat16* p) {
  return split_pair(_mm512_loadu_si512(p));
}
template <>
inline void store_pair(BFloat16* p, Pair x) {
  _mm512_storeu_si512(p, join_pair(x));
}
template <>
inline Pair load_pair_partial(const BFloat16* p, int64_t n) {
  return split_pair(_mm512_maskz_loadu_epi16(first_of_pair(n), p));
}
template <>
inline void store_pair_partial(BFloat16* p, Pair x, int64_t n) {
  _mm512_mask_storeu_epi16(p, first_of_pair(n), join_pair(x));
}

#elif defined(__AVX2__)

template <>
inline Pair kept_as<float, BFloat16>(Pair x) {
  const __m256 low = _mm256_unpacklo_ps(x.a.v, x.b.v), high = _mm256_unpackhi_ps(x.a.v, x.b.v);
  return {{_mm256_permute2f128_ps(low, high, 0x20)}, {_mm256_permute2f128_ps(low, high, 0x31)}};
}
template <>
inline Pair kept_as<BFloat16, float>(Pair x) {
  const __m256 low = _mm256_permute2f128_ps(x.a.v, x.b.v, 0x20);
  const __m256 high = _mm256_permute2f128_ps(x.a.v, x.b.v, 0x31);
  return {{_mm256_shuffle_ps(low, high, 0x88)}, {_mm256_shuffle_ps(low, high, 0xdd)}};
}
template <int kVector>
inline Vec vector_of_pair(__m256i bits) {
  return {_mm256_castsi256_ps(kVector == 0 ? _mm256_slli_epi32(bits, 16)
                                           : _mm256_and_si256(bits, _mm256_set1_epi32(-65536)))};
}
inline Pair split_pair(__m256i bits) { return {vector_of_pair<0>(bits), vector_of_pair<1>(bits)}; }
template <int kVector>
inline Vec load_of_pair(const BFloat16* p) {
  return vector_of_pair<kVector>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline __m256i join_pair(Pair x) {
  return _mm256_or_si256(_mm256_cvtepu16_epi32(narrow(x.a)),
                         _mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow(x.b)), 16));
}
template <>
inline Pair load_pair(const BFloat16* p) {
  return split_pair(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <>
inline void store_pair(BFloat16* p, Pair x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), join_pair(x));
}
template <>
inline Pair load_pair_partial(const BFloat16* p, int64_t n) {
  if (n == 8) {
    return split_pair(_mm256_zextsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  }
  BFloat16 lanes[kPairWidth] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load_pair(lanes);
}
// n is 8, half of the pair.
template <>
inline void store_pair_partial(BFloat16* p, Pair x, int64_t) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(join_pair(x)));
}

#endif

}  // namespace eecore::cpu::EECORE_CAPABILITY
