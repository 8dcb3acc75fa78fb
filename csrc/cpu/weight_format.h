// How a weight row and a row of x meet in the skinny products, by the type of the weight.
//
// Format<W> loads kStep elements of a weight row, multiplies them with as many of a packed row of x
// and adds to its Sums, the lanes of one float32 or integer sum. x is packed once per call, in
// whatever order and form the products want it.
//
// An int8 weight row stands for w * scale. x is then quantised to 16 bits per row, x = q * scale
// with |q| <= 127 * 256, and split into q = 256 * high + low, two signed bytes, so that both sums
// are exact integers: a result depends on no order of summation, and what is lost is the weight's
// rounding, not that of x.
#pragma once

#include "pair.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Storage element of an int8 weight.
struct Int8 {
  int8_t value;
};

// Rows of a weight: [num_rows, n].
template <typename W>
struct WeightRows {
  const W* data;
  int64_t stride;
  const float* scales;  // [num_rows], of Int8 only

  const W* row(int64_t i) const { return data + i * stride; }
  WeightRows from(int64_t i) const { return {row(i), stride, scales ? scales + i : nullptr}; }
};

template <typename W>
struct Format;

// What is the same for weights of float32 and bfloat16: x is packed as pairs, in their order.
template <typename W>
struct FloatFormat {
  static constexpr int kStep = kPairWidth;
  static constexpr int64_t kHeader = 0;
#if defined(__AVX512F__)
  static constexpr int kMaxBatch = 4;
#elif defined(__AVX2__)
  static constexpr int kMaxBatch = 2;
#else
  static constexpr int kMaxBatch = 1;
#endif
  using PackedX = float;
  using Sums = Vec;
  using Loaded = Pair;

  static Loaded load(const W* p) { return load_pair(p); }
  static Loaded load_partial(const W* p, int64_t n) { return load_pair_partial(p, n); }
  static Sums start(const PackedX*) { return zero(); }
  static Sums multiply_add(Loaded w, const PackedX* x, Sums sums) {
    return fma(w.b, eecore::cpu::EECORE_CAPABILITY::load(x + kWidth),
               fma(w.a, eecore::cpu::EECORE_CAPABILITY::load(x), sums));
  }
  static Vec lanes(Sums sums) { return sums; }
  static float scale(const PackedX*) { return 1.0f; }

  static void pack(const W* row, int64_t n, PackedX* x) {
    int64_t k = 0;
    for (; k + kStep <= n; k += kStep) store_kept(x + k, load_pair(row + k));
    if (k < n) store_kept(x + k, load_pair_partial(row + k, n - k));
  }
};

template <>
struct Format<float> : FloatFormat<float> {};

#if defined(__AVX512BF16__)

// Pairs of bfloat16 are multiplied as they lie, with float32 sums.
template <>
struct Format<BFloat16> : FloatFormat<BFloat16> {
  using PackedX = BFloat16;
  using Loaded = __m512i;

  static Loaded load(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static Loaded load_partial(const BFloat16* p, int64_t n) {
    return _mm512_maskz_loadu_epi16(first_of_pair(n), p);
  }
  static Sums start(const PackedX*) { return zero(); }
  static Sums multiply_add(Loaded w, const PackedX* x, Sums sums) {
    return {_mm512_dpbf16_ps(sums.v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)),
                             reinterpret_cast<__m512bh>(w))};
  }
  static float scale(const PackedX*) { return 1.0f; }

  static void pack(const BFloat16* row, int64_t n, PackedX* x) {
    int64_t k = 0;
    for (; k + kStep <= n; k += kStep) _mm512_storeu_si512(x + k, load(row + k));
    if (k < n) _mm512_storeu_si512(x + k, load_partial(row + k, n - k));
  }
};

#else

template <>
struct Format<BFloat16> : FloatFormat<BFloat16> {};

#endif

// A row of x in 16 bits: the factor from x to q, and the one back, NaN if x holds NaN or infinity.
struct Quantisation {
  float to_q, scale;
};
template <typename T>
inline Quantisation quantisation(const T* x, int64_t n) {
  const Vec sign = broadcast(-1.0f);
  Vec largest = zero(), not_finite = zero();
  for (int64_t i = 0; i < n; i += kWidth) {
    const Vec v = load_partial(x + i, min_of(n - i, kWidth));
    largest = max(largest, max(v, v * sign));
    not_finite = fma(v, zero(), not_finite);
  }
  constexpr float kLargestQ = 127.0f * 256.0f;
  const float bound = max_element(largest), poison = sum(not_finite);
  // Below the smallest normal number the factor could be infinite.
  const bool usable = bound >= 1.17549435e-33f && poison == 0.0f;
  return {usable ? kLargestQ / bound : 0.0f, usable ? bound / kLargestQ : poison};
}

#if defined(__AVX512VNNI__)

// Bytes are multiplied as unsigned w + 128 with signed x; the sums start at what takes the 128
// back. A packed row is a header (the starts of the high and the low sums, the scale), then for
// each step the high bytes and the low bytes.
template <>
struct Format<Int8> {
  static constexpr int kStep = 64;
  static constexpr int64_t kHeader = 192;
  static constexpr int kMaxBatch = 3;
  using PackedX = int8_t;
  struct Sums {
    __m512i high, low;
  };
  using Loaded = __m512i;

  static Loaded load(const Int8* p) {
    return _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(-128));
  }
  static Loaded load_partial(const Int8* p, int64_t n) {
    const __m512i bytes = _mm512_maskz_loadu_epi8((1ull << n) - 1ull, p);
    return _mm512_xor_si512(bytes, _mm512_set1_epi8(-128));
  }
  static Sums start(const PackedX* row) {
    return {_mm512_loadu_si512(row), _mm512_loadu_si512(row + 64)};
  }
  static Sums multiply_add(Loaded w, const PackedX* x, Sums sums) {
    return {_mm512_dpbusd_epi32(sums.high, w, _mm512_loadu_si512(x)),
            _mm512_dpbusd_epi32(sums.low, w, _mm512_loadu_si512(x + 64))};
  }
  static Vec lanes(Sums sums) {
    return fma({_mm512_cvtepi32_ps(sums.high)}, broadcast(256.0f), {_mm512_cvtepi32_ps(sums.low)});
  }
  static float scale(const PackedX* row) {
    float value;
    __builtin_memcpy(&value, row + 128, sizeof(value));
    return value;
  }

  template <typename T>
  static void pack(const T* row, int64_t n, PackedX* x) {
    const Quantisation q = quantisation(row, n);
    const __m512i all_128 = _mm512_set1_epi8(-128);
    Sums starts{_mm512_setzero_si512(), _mm512_setzero_si512()};
    PackedX* out = x + kHeader;
    for (int64_t k = 0; k < n; k += kStep, out += 2 * kStep) {
      for (int64_t i = 0; i < kStep; i += kWidth) {
        const int64_t count = max_of(0, min_of(n - k - i, kWidth));
        const Vec v = count ? load_partial_of(row + k + i, count) : zero();
        const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(v.v, _mm512_set1_ps(q.to_q)));
        const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
        const __m512i low = _mm512_sub_epi32(whole, _mm512_slli_epi32(high, 8));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), _mm512_cvtepi32_epi8(high));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + kStep + i), _mm512_cvtepi32_epi8(low));
      }
      starts.high = _mm512_dpbusd_epi32(starts.high, all_128, _mm512_loadu_si512(out));
      starts.low = _mm512_dpbusd_epi32(starts.low, all_128, _mm512_loadu_si512(out + kStep));
    }
    const __m512i none = _mm512_setzero_si512();
    _mm512_storeu_si512(x, _mm512_sub_epi32(none, starts.high));
    _mm512_storeu_si512(x + 64, _mm512_sub_epi32(none, starts.low));
    __builtin_memcpy(x + 128, &q.scale, sizeof(q.scale));
  }

 private:
  template <typename T>
  static Vec load_partial_of(const T* p, int64_t n) {
    return eecore::cpu::EECORE_CAPABILITY::load_partial(p, n);
  }
};

#else

// Bytes are widened to 16 bits. A packed row is a header (the scale), then for each step the high
// and the low parts as 16-bit numbers.
template <>
struct Format<Int8> {
  static constexpr int kStep = 16;
  static constexpr int64_t kHeader = 32;
  static constexpr int kMaxBatch = 1;
  using PackedX = int16_t;
#if defined(__AVX2__)
  struct Sums {
    __m256i high, low;
  };
  using Loaded = __m256i;

  static Loaded load(const Int8* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static Sums start(const PackedX*) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static Sums multiply_add(Loaded w, const PackedX* x, Sums sums) {
    const __m256i* parts = reinterpret_cast<const __m256i*>(x);
    return {_mm256_add_epi32(sums.high, _mm256_madd_epi16(w, _mm256_loadu_si256(parts))),
            _mm256_add_epi32(sums.low, _mm256_madd_epi16(w, _mm256_loadu_si256(parts + 1)))};
  }
#if defined(__AVX512F__)
#error "AVX-512 without VNNI is not compiled"
#endif
  static Vec lanes(Sums sums) {
    return fma({_mm256_cvtepi32_ps(sums.high)}, broadcast(256.0f), {_mm256_cvtepi32_ps(sums.low)});
  }
#else
  struct Sums {
    int32_t high[kWidth], low[kWidth];
  };
  struct Loaded {
    int16_t v[kStep];
  };

  static Loaded load(const Int8* p) {
    Loaded w;
    for (int i = 0; i < kStep; ++i) w.v[i] = p[i].value;
    return w;
  }
  static Sums start(const PackedX*) { return {}; }
  static Sums multiply_add(const Loaded& w, const PackedX* x, Sums sums) {
    for (int i = 0; i < kWidth; ++i) {
      sums.high[i] += w.v[2 * i] * x[2 * i] + w.v[2 * i + 1] * x[2 * i + 1];
      sums.low[i] += w.v[2 * i] * x[kStep + 2 * i] + w.v[2 * i + 1] * x[kStep + 2 * i + 1];
    }
    return sums;
  }
  static Vec lanes(const Sums& sums) {
    Vec result;
    for (int i = 0; i < kWidth; ++i) {
      result.v[i] = static_cast<float>(sums.high[i]) * 256.0f + static_cast<float>(sums.low[i]);
    }
    return result;
  }
#endif
  static Loaded load_partial(const Int8* p, int64_t n) {
    Int8 elements[kStep] = {};
    for (int64_t i = 0; i < n; ++i) elements[i] = p[i];
    return load(elements);
  }
  static float scale(const PackedX* row) {
    float value;
    __builtin_memcpy(&value, row, sizeof(value));
    return value;
  }

  template <typename T>
  static void pack(const T* row, int64_t n, PackedX* x) {
    const Quantisation q = quantisation(row, n);
    __builtin_memcpy(x, &q.scale, sizeof(q.scale));
    PackedX* out = x + kHeader;
    for (int64_t k = 0; k < n; k += kStep, out += 2 * kStep) {
      for (int64_t i = 0; i < kStep; ++i) {
        float value = k + i < n ? to_float(row[k + i]) * q.to_q : 0.0f;
        value = q.to_q > 0.0f ? (value + 12582912.0f) - 12582912.0f : 0.0f;  // to nearest even
        const int32_t whole = static_cast<int32_t>(value);
        const int32_t high = (whole + 128) >> 8;
        out[i] = static_cast<int16_t>(high);
        out[kStep + i] = static_cast<int16_t>(whole - 256 * high);
      }
    }
  }
};

#endif

// Calls function<T, W>, T the dtype of params and W that of its weight, which is int8 where there
// is a scale.
#define EECORE_DISPATCH_WEIGHT(params, scale, function, arguments) \
  (params).dtype == DType::kFloat32 \
      ? ((params).scale ? function<float, Int8> arguments : function<float, float> arguments) \
      : ((params).scale ? function<BFloat16, Int8> arguments \
                        : function<BFloat16, BFloat16> \
                              arguments)

template <typename W>
using PackedX = typename Format<W>::PackedX;

// Elements that column k takes in a packed row, after its header.
template <typename W>
constexpr int64_t packed_columns(int64_t k) {
  return (Format<W>::kHeader > 0 ? 2 : 1) * k;
}
// Where column k, a multiple of the step, is in a packed row.
template <typename W>
constexpr int64_t packed_offset(int64_t k) {
  return Format<W>::kHeader + packed_columns<W>(k);
}
// Elements from one packed row of n columns to the next; zeros fill the last step. An odd number of
// cache lines, so that the same columns of many rows do not fall into one set of the cache.
template <typename W>
inline int64_t packed_stride(int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(PackedX<W>);
  const int64_t elements = packed_offset<W>(ceil_div(n, Format<W>::kStep) * Format<W>::kStep);
  return (ceil_div(elements, kLine) | 1) * kLine;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
