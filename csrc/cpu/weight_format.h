// How a weight row is multiplied with a row of x in the skinny products, by the type of the weight.
//
// Format<W> loads kStep elements of a weight row, multiplies them with as many of a packed row of x
// and adds to its Sums, the lanes of one float32 or integer sum. x is packed once per call, in the
// order and form that the products need. The registers hold the sums of kMaxBatch rows of x and
// kRows of a weight.
//
// An int8 weight row stands for w * scale. x is then quantised to 16 bits per row, x = q * scale,
// and products are summed as integers: the rounding error is the weight's, not that of x. The sum
// of every kMaxColumns columns is exact, is rounded to float32 once, and is added to those before
// it: vectors of any width and matrix tiles give the same bits.
#pragma once

#include "pair.h"
#include "vnni_products.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Rows of a weight: [num_rows, n].
template <typename W>
struct WeightRows {
  const W* data;
  int64_t stride;
  const float* scales;  // [num_rows], for Int8 only

  const W* row(int64_t i) const { return data + i * stride; }
  WeightRows from(int64_t i) const { return {row(i), stride, scales ? scales + i : nullptr}; }
};

// A packed weight has a table of its rows instead of a stride, see panel_gemm.h.
template <typename W>
inline WeightRows<W> weight_rows(const void* data, int64_t stride, const float* scales,
                                 const int64_t*) {
  return {static_cast<const W*>(data), stride, scales};
}

template <typename W>
struct Format;

// A thread's state while it multiplies num_rows rows of x with a weight of W.
template <typename W>
struct Unit {
  explicit Unit(int64_t) {}
  static bool uses_tiles() { return false; }
};

// Sums of floating-point numbers have no limit of columns.
constexpr int64_t kAnyColumns = int64_t{1} << 62;

// Vectors of float32, in order. Here and below, with at most kMaxInOrder rows of x each row of a
// weight is read by itself: with more rows, or two in pairs of bfloat16, that is slower if the
// weight is in cache. With AVX2 it is always slower: one sum waits for itself, and a vector is half
// as wide.
template <>
struct Format<float> {
  static constexpr int kStep = kWidth;
  static constexpr int64_t kHeader = 0;
  static constexpr int64_t kMaxColumns = kAnyColumns;
#if defined(__AVX512F__)
  static constexpr int kMaxBatch = 6, kMaxInOrder = 3;
#elif defined(__AVX2__)
  static constexpr int kMaxBatch = 3;
#else
  static constexpr int kMaxBatch = 1, kMaxInOrder = 1;
#endif
  using PackedX = float;
  using Sums = Vec;

  static Vec load(const float* p) { return eecore::cpu::EECORE_CAPABILITY::load(p); }
  static Vec load_partial(const float* p, int64_t n) {
    return eecore::cpu::EECORE_CAPABILITY::load_partial(p, n);
  }
  static Sums start() { return zero(); }
  static Sums multiply_add(Vec w, const PackedX* x, Sums sums) { return fma(w, load(x), sums); }

  static void pack(const float* row, int64_t n, PackedX* x) {
    int64_t k = 0;
    for (; k + kStep <= n; k += kStep) store(x + k, load(row + k));
    if (k < n) store(x + k, load_partial(row + k, n - k));
  }
};

#if defined(__AVX512BF16__)

// Pairs of bfloat16 are multiplied as stored, with float32 sums.
template <>
struct Format<BFloat16> {
  static constexpr int kStep = kPairWidth;
  static constexpr int64_t kHeader = 0;
  static constexpr int64_t kMaxColumns = kAnyColumns;
  static constexpr int kMaxBatch = 6, kMaxInOrder = 1;
  using PackedX = BFloat16;
  using Sums = Vec;

  static __m512i load(const BFloat16* p) { return _mm512_loadu_si512(p); }
  static __m512i load_partial(const BFloat16* p, int64_t n) {
    return _mm512_maskz_loadu_epi16(first_of_pair(n), p);
  }
  static Sums start() { return zero(); }
  static Sums multiply_add(__m512i w, const PackedX* x, Sums sums) {
    return {_mm512_dpbf16_ps(sums.v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)),
                             reinterpret_cast<__m512bh>(w))};
  }

  static void pack(const BFloat16* row, int64_t n, PackedX* x) {
    int64_t k = 0;
    for (; k + kStep <= n; k += kStep) _mm512_storeu_si512(x + k, load(row + k));
    if (k < n) _mm512_storeu_si512(x + k, load_partial(row + k, n - k));
  }
};

#else

// bfloat16 is widened to pairs of float32, in their order.
template <>
struct Format<BFloat16> {
  static constexpr int kStep = kPairWidth;
  static constexpr int64_t kHeader = 0;
  static constexpr int64_t kMaxColumns = kAnyColumns;
#if defined(__AVX512F__)
  static constexpr int kMaxBatch = 4, kMaxInOrder = 1;
#elif defined(__AVX2__)
  static constexpr int kMaxBatch = 2;
#else
  static constexpr int kMaxBatch = 1, kMaxInOrder = 1;
#endif
  using PackedX = float;
  using Sums = Vec;

  static Pair load(const BFloat16* p) { return load_pair(p); }
  static Pair load_partial(const BFloat16* p, int64_t n) { return load_pair_partial(p, n); }
  static Sums start() { return zero(); }
  static Sums multiply_add(Pair w, const PackedX* x, Sums sums) {
    const Pair columns = load_kept(x);
    return fma(w.b, columns.b, fma(w.a, columns.a, sums));
  }

  static void pack(const BFloat16* row, int64_t n, PackedX* x) {
    int64_t k = 0;
    for (; k + kStep <= n; k += kStep) store_kept(x + k, load_pair(row + k));
    if (k < n) store_kept(x + k, load_pair_partial(row + k, n - k));
  }
};

#endif

// A row of x in 16 bits: the factor from x to q, and the factor back, NaN if x holds NaN or
// infinity.
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
  constexpr float kLargestQ = 32767.0f;
  const float bound = max_element(largest), poison = sum(not_finite);
  // Below the smallest normal number the factor could be infinite.
  const bool usable = bound >= 1.17549435e-33f && poison == 0.0f;
  return {usable ? kLargestQ / bound : 0.0f, usable ? bound / kLargestQ : poison};
}

// out[r]: the sum of all lanes of v[r], for the four rows, exact until it is rounded to float32 as
// 65536 * high + low: sums of the lanes' upper and lower 16 bits fit into 32.
#if defined(__AVX512VNNI__)
// A lane has at most 128 products: four lanes may be added before they are split.
inline void sum_four(const __m512i* v, float* out) {
  const __m512i ab =
      _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
  const __m512i cd =
      _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
  const __m512i abcd =
      _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
  const __m512i high = _mm512_srai_epi32(abcd, 16);
  const __m512i low = _mm512_and_si512(abcd, _mm512_set1_epi32(0xffff));
  const __m512i halves = _mm512_add_epi32(_mm512_shuffle_i64x2(high, low, 0x44),
                                          _mm512_shuffle_i64x2(high, low, 0xee));
  const __m512 sums =
      _mm512_cvtepi32_ps(_mm512_add_epi32(halves, _mm512_shuffle_i64x2(halves, halves, 0xb1)));
  _mm_storeu_ps(out, _mm_fmadd_ps(_mm512_castps512_ps128(sums), _mm_set1_ps(65536.0f),
                                  _mm512_extractf32x4_ps(sums, 2)));
}
#elif defined(__AVX2__)
// A lane has at most 256 products: two lanes may be added before they are split.
inline void sum_four(const __m256i* v, float* out) {
  const __m256i ab =
      _mm256_add_epi32(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
  const __m256i cd =
      _mm256_add_epi32(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
  const auto fold = [](__m256i x, __m256i y) {
    return _mm256_add_epi32(_mm256_unpacklo_epi64(x, y), _mm256_unpackhi_epi64(x, y));
  };
  const __m256i mask = _mm256_set1_epi32(0xffff);
  const __m256i high = fold(_mm256_srai_epi32(ab, 16), _mm256_srai_epi32(cd, 16));
  const __m256i low = fold(_mm256_and_si256(ab, mask), _mm256_and_si256(cd, mask));
  const __m256 sums = _mm256_cvtepi32_ps(_mm256_add_epi32(
      _mm256_permute2x128_si256(high, low, 0x20), _mm256_permute2x128_si256(high, low, 0x31)));
  _mm_storeu_ps(out, _mm_fmadd_ps(_mm256_castps256_ps128(sums), _mm_set1_ps(65536.0f),
                                  _mm256_extractf128_ps(sums, 1)));
}
#else
struct IntLanes {
  int32_t v[kWidth];
};
inline void sum_four(const IntLanes* v, float* out) {
  for (int r = 0; r < 4; ++r) {
    int64_t sum = 0;
    for (const int32_t lane : v[r].v) sum += lane;
    out[r] = static_cast<float>(sum);
  }
}
#endif

// Bytes are widened to 16 bits as they are read. A packed row is a header, the scale, then q.
template <>
struct Format<Int8> {
  static constexpr int kStep = 2 * kWidth;
  static constexpr int64_t kHeader = 32;
  // 512 products, of at most 128 * 32767 each, fit into 32 bits. A lane has 256 or fewer.
  static constexpr int64_t kMaxColumns = 2048;
  using PackedX = int16_t;

#if defined(__AVX512VNNI__)
  static constexpr int kMaxBatch = 6;
  using Sums = __m512i;

  static __m512i load(const Int8* p) {
    return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static __m512i load_partial(const Int8* p, int64_t n) {
    return _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(first_of_pair(n), p));
  }
  static Sums start() { return _mm512_setzero_si512(); }
  static Sums multiply_add(__m512i w, const PackedX* x, Sums sums) {
    return _mm512_dpwssd_epi32(sums, w, _mm512_loadu_si512(x));
  }
#elif defined(__AVX2__)
  static constexpr int kMaxBatch = 3;
  using Sums = __m256i;

  static __m256i load(const Int8* p) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  static __m256i load_partial(const Int8* p, int64_t n) {
    Int8 elements[kStep] = {};
    for (int64_t i = 0; i < n; ++i) elements[i] = p[i];
    return load(elements);
  }
  static Sums start() { return _mm256_setzero_si256(); }
  static Sums multiply_add(__m256i w, const PackedX* x, Sums sums) {
    const __m256i columns = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
#if defined(EECORE_VNNI)
    asm("%{" EECORE_VNNI "%} vpdpwssd %2, %1, %0" : "+x"(sums) : "x"(w), "xm"(columns));
    return sums;
#else
    return _mm256_add_epi32(sums, _mm256_madd_epi16(w, columns));
#endif
  }
#else
  static constexpr int kMaxBatch = 1;
  using Sums = IntLanes;
  struct Loaded {
    int16_t v[kStep];
  };

  static Loaded load(const Int8* p) { return load_partial(p, kStep); }
  static Loaded load_partial(const Int8* p, int64_t n) {
    Loaded w{};
    for (int64_t i = 0; i < n; ++i) w.v[i] = p[i].value;
    return w;
  }
  static Sums start() { return {}; }
  static Sums multiply_add(const Loaded& w, const PackedX* x, Sums sums) {
    for (int i = 0; i < kWidth; ++i) {
      sums.v[i] += w.v[2 * i] * x[2 * i] + w.v[2 * i + 1] * x[2 * i + 1];
    }
    return sums;
  }
#endif

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
    const Vec to_q = broadcast(q.to_q);
    int64_t k = 0;
    for (; k < n; k += kWidth) {
      float values[kWidth];
      const Vec v = eecore::cpu::EECORE_CAPABILITY::load_partial(row + k, min_of(n - k, kWidth));
      store(values, round_to_int(v * to_q));
      // For a row that is not finite only the scale counts.
      for (int i = 0; i < kWidth; ++i) {
        out[k + i] = q.to_q > 0.0f ? static_cast<int16_t>(static_cast<int32_t>(values[i])) : 0;
      }
    }
    if (k % kStep != 0) __builtin_memset(out + k, 0, kWidth * sizeof(PackedX));
  }
};

// Storage element of a packed weight.
struct Panel {
  uint8_t byte;
};

#if defined(__AVX512BF16__)
struct TileHardware;
struct TileModel;
template <typename U>
struct Tiled;
struct TiledInt8;

// Rows of x from which int8 rows are multiplied with matrix tiles. By count, 16 rows of a weight of
// 512 columns take 128 cycles of vectors a row of x. On tiles they take 256 cycles for up to 16
// rows of x, and some 200 until their sums are floats.
constexpr int64_t kFewestInt8OnTiles = 4;
#endif

// Calls body<T, W>(), with T the dtype of a call of num_rows rows and W that of its weight: int8
// where there is a scale, packed where there is a table.
template <typename Body>
void dispatch_weight(DType dtype, const float* scale, const int64_t* table,
                     [[maybe_unused]] int64_t num_rows, const Body& body) {
#if defined(__AVX512BF16__)
  const Tiles tiles = tiles_in_use();
  if (scale != nullptr && num_rows >= kFewestInt8OnTiles && tiles != Tiles::kNone) {
    if (dtype == DType::kFloat32) return body.template operator()<float, TiledInt8>();
    return body.template operator()<BFloat16, TiledInt8>();
  }
#endif
  if (dtype == DType::kFloat32) {
    if (table != nullptr) return body.template operator()<float, Panel>();
    if (scale != nullptr) return body.template operator()<float, Int8>();
    return body.template operator()<float, float>();
  }
  if (table != nullptr) return body.template operator()<BFloat16, Panel>();
  if (scale != nullptr) return body.template operator()<BFloat16, Int8>();
#if defined(__AVX512BF16__)
  if (tiles == Tiles::kHardware) return body.template operator()<BFloat16, Tiled<TileHardware>>();
  if (tiles == Tiles::kModel) return body.template operator()<BFloat16, Tiled<TileModel>>();
#endif
  body.template operator()<BFloat16, BFloat16>();
}

template <typename W>
using PackedX = typename Format<W>::PackedX;

// Elements from one packed row of n columns to the next; zeros fill the last step. An odd number of
// cache lines, so that the same columns of many rows do not share a set of the cache.
template <typename W>
inline int64_t packed_stride(int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(PackedX<W>);
  const int64_t elements = Format<W>::kHeader + ceil_div(n, Format<W>::kStep) * Format<W>::kStep;
  return (ceil_div(elements, kLine) | 1) * kLine;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
