// Bytes of a panel and the sums of their products: kWidth rows of a panel at once, 4 columns each.
//
// Weights are unsigned bytes, x is signed bytes from -127 to 127; sums are exact. Weights of 8 bits
// have 128 subtracted where PanelDot says so.
#pragma once

#include <type_traits>

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
  value *= 0x1p112f;  // the exponent's bias; small float16 numbers become normal ones
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  if (magnitude >= 0x0f800000u) bits = 0x7f800000u | (magnitude & 0x007fffffu);
  bits |= static_cast<uint32_t>(half & 0x8000) << 16;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

#if defined(__AVX512VNNI__)

constexpr int kMaxPanelBatch = 8;
struct Bytes {
  __m512i v;
};
struct Ints {
  __m512i v;
};
inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
// Four columns of x for each row.
inline Bytes broadcast_bytes(const int8_t* p) {
  int32_t columns;
  __builtin_memcpy(&columns, p, 4);
  return {_mm512_set1_epi32(columns)};
}
inline Bytes low_nibbles(Bytes x) { return {_mm512_and_si512(x.v, _mm512_set1_epi8(15))}; }
// Combines q with the bits of `mask`, which are kBy places lower in x, or higher where kBy is
// negative.
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
  const __m512i lanes = _mm512_set1_epi32(x);
  return {_mm512_slli_epi32(lanes, kShift)};
}
// Elements of a table of 16, by their places.
inline Bytes taken_from(const uint8_t* table, Bytes places) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), places.v)};
}
inline Vec to_vec(Ints x) { return {_mm512_cvtepi32_ps(x.v)}; }
// kWidth bytes, of which kMask is left after they are shifted right by kShift.
template <int kShift = 0, int kMask = 255>
inline Ints load_unsigned(const uint8_t* p) {
  __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  if constexpr (kShift > 0) bytes = _mm512_srli_epi32(bytes, kShift);
  if constexpr (kMask < 255) bytes = _mm512_and_si512(bytes, _mm512_set1_epi32(kMask));
  return {bytes};
}
inline Ints load_signed(const uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// sums + x * factors
inline Ints add_scaled(Ints sums, Ints x, Ints factors) {
  return {_mm512_add_epi32(sums.v, _mm512_mullo_epi32(x.v, factors.v))};
}
// The lower halves of a and b, b's above a's.
inline Ints pairs_of(Ints a, Ints b) {
  return {_mm512_mask_blend_epi16(0xaaaaaaaau, a.v, _mm512_slli_epi32(b.v, 16))};
}
inline Ints scaled_pairs(Ints pairs, int16_t by) {
  return {_mm512_mullo_epi16(pairs.v, _mm512_set1_epi16(by))};
}
// sums + both products of each pair with x: [2]
inline Ints add_pairs(Ints sums, Ints pairs, const int16_t* x) {
  int32_t both;
  __builtin_memcpy(&both, x, 4);
  return {_mm512_dpwssd_epi32(sums.v, pairs.v, _mm512_set1_epi32(both))};
}
inline Vec load_half(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// sums[b] + the products of kGroups groups of columns with row b of x, for kRows rows, which take
// turns; see PanelDot. `ahead` prefetches a part of the next memory after each group.
template <int kGroups, int kRows, typename Ahead>
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

// sums + the products of a group of columns.
inline Ints add_products(Ints sums, Bytes w, Bytes columns) {
  return {_mm512_dpbusd_epi32(sums.v, w.v, columns.v)};
}

#elif defined(__AVX2__)

struct Bytes {
  __m256i v;
};
struct Ints {
  __m256i v;
};
inline Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))};
}
inline Bytes broadcast_bytes(const int8_t* p) {
  int32_t columns;
  __builtin_memcpy(&columns, p, 4);
  return {_mm256_set1_epi32(columns)};
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
  const __m256i lanes = _mm256_set1_epi32(x);
  return {_mm256_slli_epi32(lanes, kShift)};
}
inline Bytes taken_from(const uint8_t* table, Bytes places) {
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return {_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), places.v)};
}
inline Vec to_vec(Ints x) { return {_mm256_cvtepi32_ps(x.v)}; }
template <int kShift = 0, int kMask = 255>
inline Ints load_unsigned(const uint8_t* p) {
  __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  if constexpr (kShift > 0) bytes = _mm256_srli_epi32(bytes, kShift);
  if constexpr (kMask < 255) bytes = _mm256_and_si256(bytes, _mm256_set1_epi32(kMask));
  return {bytes};
}
inline Ints load_signed(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)))};
}
inline Ints add_scaled(Ints sums, Ints x, Ints factors) {
  return {_mm256_add_epi32(sums.v, _mm256_mullo_epi32(x.v, factors.v))};
}
inline Ints pairs_of(Ints a, Ints b) {
  return {_mm256_blend_epi16(a.v, _mm256_slli_epi32(b.v, 16), 0xaa)};
}
inline Ints scaled_pairs(Ints pairs, int16_t by) {
  return {_mm256_mullo_epi16(pairs.v, _mm256_set1_epi16(by))};
}
inline Ints add_pairs(Ints sums, Ints pairs, const int16_t* x) {
  int32_t both;
  __builtin_memcpy(&both, x, 4);
  return {_mm256_add_epi32(sums.v, _mm256_madd_epi16(pairs.v, _mm256_set1_epi32(both)))};
}
inline Vec load_half(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}

#if defined(EECORE_VNNI)

// EECORE_VNNI is the encoding of the instruction: that of AVX-VNNI, or in the model of it that of
// AVX-512. Sums are passed by value: the compiler would keep members of PanelDot in memory.
inline Ints add_products(Ints sums, Bytes w, Bytes columns) {
  asm("%{" EECORE_VNNI "%} vpdpbusd %2, %1, %0" : "+x"(sums.v) : "x"(w.v), "x"(columns.v));
  return sums;
}

#else

// Pairs of products are summed in 16 bits over as many groups as certainly fit, and multiplied with
// a part's scale when they become sums of 32 bits. Where not even one group fits, 128 is subtracted
// from the weights, and their signs are moved to x. With half as many registers as AVX-512 there is
// no room for sums of many rows: one row takes all groups at a time.
template <int kGroups_, int kBits, bool kScaled>
struct PanelDot {
  static constexpr int kGroups = kGroups_;
  static constexpr int kFit = 32767 / (2 * 127 * ((1 << kBits) - 1));
  static constexpr bool kIsSigned = kFit < 1;
  static constexpr bool kTakesTurns = false;
  // More sums than there are registers: idle sums are kept in memory, which takes less time than
  // unpacking the weights once more.
  static constexpr int kBatch = 8;
  static constexpr int kRun = kFit < kGroups ? kFit : kGroups;
  __m256i pairs, sums;

  static Ints factors(Ints scales) { return pairs_of(scales, scales); }
  static Ints ones() { return {_mm256_set1_epi16(1)}; }
  void begin(int32_t) { sums = _mm256_setzero_si256(); }
  void begin_part() {}
  template <int kGroup>
  void add(Bytes w, Bytes columns, Ints factors) {
    if constexpr (kIsSigned) {
      const __m256i whole = _mm256_xor_si256(w.v, _mm256_set1_epi8(-128));
      const __m256i product =
          _mm256_maddubs_epi16(_mm256_abs_epi8(whole), _mm256_sign_epi8(columns.v, whole));
      sums = _mm256_add_epi32(sums, _mm256_madd_epi16(product, factors.v));
    } else {
      static_assert(kGroups % kRun == 0);
      const __m256i product = _mm256_maddubs_epi16(w.v, columns.v);
      pairs = kGroup % kRun == 0 ? product : _mm256_add_epi16(pairs, product);
      if constexpr (kGroup % kRun == kRun - 1) {
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, factors.v));
      }
    }
  }
  void end_part(Ints) {}
  Ints total(int32_t offset) const {
    if constexpr (kScaled) {
      return {sums};
    } else {
      return {_mm256_add_epi32(sums, broadcast_shifted<kBits - 4>(offset).v)};
    }
  }
};

#endif

#else

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
inline Bytes broadcast_bytes(const int8_t* p) {
  Bytes r;
  for (int i = 0; i < kLaneBytes; i += 4) __builtin_memcpy(r.v + i, p, 4);
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
inline Bytes taken_from(const uint8_t* table, Bytes places) {
  for (uint8_t& byte : places.v) byte = table[byte];
  return places;
}
inline Vec to_vec(const Ints& x) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = static_cast<float>(x.v[i]);
  return r;
}
template <int kShift = 0, int kMask = 255>
inline Ints load_unsigned(const uint8_t* p) {
  Ints r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = p[i] >> kShift & kMask;
  return r;
}
inline Ints load_signed(const uint8_t* p) {
  Ints r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = static_cast<int8_t>(p[i]);
  return r;
}
inline Ints add_scaled(Ints sums, const Ints& x, const Ints& factors) {
  for (int i = 0; i < kWidth; ++i) sums.v[i] += x.v[i] * factors.v[i];
  return sums;
}
inline Ints pairs_of(Ints a, const Ints& b) {
  for (int i = 0; i < kWidth; ++i) a.v[i] = (a.v[i] & 0xffff) | b.v[i] * 65536;
  return a;
}
inline Ints scaled_pairs(Ints pairs, int16_t by) {
  for (int32_t& both : pairs.v) {
    both = ((static_cast<int16_t>(both) * by) & 0xffff) | (both >> 16) * by * 65536;
  }
  return pairs;
}
inline Ints add_pairs(Ints sums, const Ints& pairs, const int16_t* x) {
  for (int i = 0; i < kWidth; ++i) {
    sums.v[i] += static_cast<int16_t>(pairs.v[i]) * x[0] + (pairs.v[i] >> 16) * x[1];
  }
  return sums;
}
inline Vec load_half(const uint8_t* p) {
  Vec r;
  for (int i = 0; i < kWidth; ++i) r.v[i] = half_to_float(p + 2 * i);
  return r;
}
template <bool kFits>
constexpr auto sum_of() {
  if constexpr (kFits) return int16_t{0};
  if constexpr (!kFits) return int32_t{0};
}
// Byte by byte, in 16 bits where all groups of a part certainly fit; the four bytes of a row are
// added up in the end.
template <int kGroups_, int kBits, bool kScaled>
struct PanelDot {
  static constexpr int kGroups = kGroups_;
  static constexpr bool kIsSigned = false;
  static constexpr bool kTakesTurns = false;
  static constexpr int kBatch = 2;
  static constexpr bool kFits = kGroups * 127 * ((1 << kBits) - 1) <= 32767;
  using Sum = decltype(sum_of<kFits>());
  Sum sums[kLaneBytes];
  Ints totals;  // of all parts

  static Ints factors(const Ints& scales) { return scales; }
  static Ints ones() { return {}; }
  void begin(int32_t) {
    totals = {};
    begin_part();
  }
  void begin_part() {
    for (Sum& sum : sums) sum = 0;
  }
  template <int kGroup>
  void add(const Bytes& w, const Bytes& columns, const Ints&) {
    for (int i = 0; i < kLaneBytes; ++i) {
      const int16_t x = static_cast<int8_t>(columns.v[i]);
      sums[i] = static_cast<Sum>(sums[i] + static_cast<int16_t>(w.v[i] * x));
    }
  }
  Ints part() const {
    Ints r;
    for (int i = 0; i < kWidth; ++i) {
      const Sum* four = sums + 4 * i;
      r.v[i] = four[0] + four[1] + four[2] + four[3];
    }
    return r;
  }
  void end_part(const Ints& factors) { totals = add_scaled(totals, part(), factors); }
  Ints total(int32_t offset) const {
    if constexpr (kScaled) {
      return totals;
    } else {
      Ints r = broadcast_shifted<kBits - 4>(offset);
      const Ints products = part();
      for (int i = 0; i < kWidth; ++i) r.v[i] += products.v[i];
      return r;
    }
  }
};

#endif

#if defined(__AVX512VNNI__) || defined(EECORE_VNNI)

// The products of one row of x with weights of kBits bits, in parts of kGroups groups of columns.
// Without kScaled there is one part, and a correction for the weights' offset, times x: `offset`,
// for 4 bits -8 times the sum of x, doubled with each further bit. With kScaled each part's sum is
// multiplied with factors, the parts' scales. kIsSigned: weights have no offset. kTakesTurns: a sum
// waits for its last product, and a core looks ahead to only few of them, so all sums take one
// group before any takes the next; with few registers one row takes all groups. kBatch: rows of x
// that are multiplied with two vectors of weights at once.
template <int kGroups_, int kBits, bool kScaled>
struct PanelDot {
  static constexpr int kGroups = kGroups_;
  static constexpr bool kIsSigned = false;
  static constexpr bool kTakesTurns = kWidth == 16;
  // Where parts are half a block and registers are few, unpacking takes longer than moving sums to
  // and from memory.
  static constexpr int kBatch = kWidth == 8 && kGroups == 4 ? 8 : 5;
  struct NoSums {};
  Ints products;
  [[no_unique_address]] std::conditional_t<kScaled, Ints, NoSums> sums;

  static Ints factors(Ints scales) { return scales; }
  static Ints ones() { return broadcast_shifted<0>(1); }
  void begin(int32_t offset) {
    if constexpr (kScaled) {
      sums = broadcast_shifted<0>(0);
    } else {
      products = broadcast_shifted<kBits - 4>(offset);
    }
  }
  void begin_part() { products = broadcast_shifted<0>(0); }
  template <int kGroup>
  void add(Bytes w, Bytes columns, Ints) {
    products = add_products(products, w, columns);
  }
  void end_part(Ints factors) { sums = add_scaled(sums, products, factors); }
  Ints total(int32_t) const {
    if constexpr (kScaled) {
      return sums;
    } else {
      return products;
    }
  }
};

#endif

}  // namespace eecore::cpu::EECORE_CAPABILITY
