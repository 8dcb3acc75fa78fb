// out[b, r] = sum_k x[b, k] * w[r, k] for few rows b: w is read once, from memory, in row order.
//
// A block of kRows weight rows meets up to kMaxBatch rows of x with one float32 accumulator vector
// per pair, k ascending, whatever the block: a result never depends on which other rows were
// computed with it. x is packed first, see PackedX. The next block of w is prefetched while this
// one is multiplied.
#pragma once

#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int kRows = 4;
#if defined(__AVX512F__)
constexpr int kMaxBatch = 4;
#elif defined(__AVX2__)
constexpr int kMaxBatch = 2;
#else
constexpr int kMaxBatch = 1;
#endif

// How kStep elements of a weight row are loaded, and multiplied with as many of x. bfloat16 is
// widened where it lies: even elements by a shift, odd ones by a mask. Packing x loads it the same
// way.
template <typename T>
struct Step {
  static constexpr int kStep = 2 * kWidth;
  using PackedX = float;
  Vec a, b;

  Vec multiply_add(const float* x, Vec accumulator) const {
    return fma(b, load(x + kWidth), fma(a, load(x), accumulator));
  }
  void pack(float* x) const {
    store(x, a);
    store(x + kWidth, b);
  }
};

inline Step<float> load_step(const float* p) { return {load(p), load(p + kWidth)}; }
inline Step<float> load_step_partial(const float* p, int64_t n) {
  if (n <= kWidth) return {load_partial(p, n), zero()};
  return {load(p), load_partial(p + kWidth, n - kWidth)};
}

#if defined(__AVX512BF16__)

// Pairs of bfloat16 are multiplied as they lie, with float32 sums.
template <>
struct Step<BFloat16> {
  static constexpr int kStep = 2 * kWidth;
  using PackedX = BFloat16;
  __m512i bits;

  Vec multiply_add(const BFloat16* x, Vec accumulator) const {
    return {_mm512_dpbf16_ps(accumulator.v, reinterpret_cast<__m512bh>(_mm512_loadu_si512(x)),
                             reinterpret_cast<__m512bh>(bits))};
  }
  void pack(BFloat16* x) const { _mm512_storeu_si512(x, bits); }
};
inline Step<BFloat16> step_of(__m512i bits) { return {bits}; }

#elif defined(__AVX512F__)

inline Step<BFloat16> step_of(__m512i bits) {
  const __m512i odd = _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  return {{_mm512_castsi512_ps(_mm512_slli_epi32(bits, 16))}, {_mm512_castsi512_ps(odd)}};
}

#elif defined(__AVX2__)

inline Step<BFloat16> step_of(__m256i bits) {
  const __m256i odd = _mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  return {{_mm256_castsi256_ps(_mm256_slli_epi32(bits, 16))}, {_mm256_castsi256_ps(odd)}};
}

#endif

#if defined(__AVX512F__)
inline Step<BFloat16> load_step(const BFloat16* p) { return step_of(_mm512_loadu_si512(p)); }
inline Step<BFloat16> load_step_partial(const BFloat16* p, int64_t n) {
  return step_of(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << n) - 1ull), p));
}
#elif defined(__AVX2__)
inline Step<BFloat16> load_step(const BFloat16* p) {
  return step_of(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Step<BFloat16> load_step_partial(const BFloat16* p, int64_t n) {
  BFloat16 lanes[16] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load_step(lanes);
}
#else
inline Step<BFloat16> load_step(const BFloat16* p) { return {load(p), load(p + kWidth)}; }
inline Step<BFloat16> load_step_partial(const BFloat16* p, int64_t n) {
  if (n <= kWidth) return {load_partial(p, n), zero()};
  return {load(p), load_partial(p + kWidth, n - kWidth)};
}
#endif

// The type of packed x, and the elements that a packed row of n takes: zeros fill the last step.
template <typename T>
using PackedX = typename Step<T>::PackedX;
template <typename T>
inline int64_t packed_size(int64_t n) {
  return ceil_div(n, Step<T>::kStep) * Step<T>::kStep;
}

// Packs row: [n] into x: [packed_size(n)].
template <typename T>
inline void pack_row(const T* row, int64_t n, PackedX<T>* x) {
  constexpr int kStep = Step<T>::kStep;
  int64_t k = 0;
  for (; k + kStep <= n; k += kStep) load_step(row + k).pack(x + k);
  if (k < n) load_step_partial(row + k, n - k).pack(x + k);
}

// out[i] = sum(v[i]) for the four vectors, each in the same order.
inline void store_sums(const Vec* v, float* out) {
#if defined(__AVX512F__)
  const __m512 ab =
      _mm512_add_ps(_mm512_unpacklo_ps(v[0].v, v[1].v), _mm512_unpackhi_ps(v[0].v, v[1].v));
  const __m512 cd =
      _mm512_add_ps(_mm512_unpacklo_ps(v[2].v, v[3].v), _mm512_unpackhi_ps(v[2].v, v[3].v));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
  const __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif defined(__AVX2__)
  const __m256 ab = _mm256_hadd_ps(v[0].v, v[1].v);
  const __m256 cd = _mm256_hadd_ps(v[2].v, v[3].v);
  const __m256 abcd = _mm256_hadd_ps(ab, cd);
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
#else
  for (int i = 0; i < 4; ++i) out[i] = sum(v[i]);
#endif
}

// out[b * out_stride + r] for kWRows rows of w and kBatch rows of x; kAhead rows with the stride of
// w are prefetched from `ahead` meanwhile.
template <int kWRows, int kBatch, int kAhead, typename T>
inline void multiply_block(const T* w, int64_t w_stride, const PackedX<T>* x, int64_t x_stride,
                           int64_t n, const T* ahead, float* out, int64_t out_stride) {
  constexpr int kStep = Step<T>::kStep;
  Vec sums[kBatch][kRows];
  for (int b = 0; b < kBatch; ++b) {
    for (int r = 0; r < kRows; ++r) sums[b][r] = zero();
  }
  int64_t k = 0;
  for (; k + kStep <= n; k += kStep) {
#pragma GCC unroll 4
    for (int r = 0; r < kAhead; ++r) {
      for (int line = 0; line < kStep; line += static_cast<int>(64 / sizeof(T))) {
        __builtin_prefetch(ahead + r * w_stride + k + line);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kWRows; ++r) {
      const Step<T> step = load_step(w + r * w_stride + k);
#pragma GCC unroll 4
      for (int b = 0; b < kBatch; ++b) {
        sums[b][r] = step.multiply_add(x + b * x_stride + k, sums[b][r]);
      }
    }
  }
  if (k < n) {
#pragma GCC unroll 4
    for (int r = 0; r < kWRows; ++r) {
      const Step<T> step = load_step_partial(w + r * w_stride + k, n - k);
#pragma GCC unroll 4
      for (int b = 0; b < kBatch; ++b) {
        sums[b][r] = step.multiply_add(x + b * x_stride + k, sums[b][r]);
      }
    }
  }
  for (int b = 0; b < kBatch; ++b) {
    float block[kRows];
    store_sums(sums[b], block);
    for (int r = 0; r < kWRows; ++r) out[b * out_stride + r] = block[r];
  }
}

// The same with the number of rows to prefetch, 0, 1, 2 or 4, and of rows of x chosen by the call.
template <int kWRows, int kBatch, typename T>
inline void multiply_block(const T* w, int64_t w_stride, const PackedX<T>* x, int64_t x_stride,
                           int64_t batch, int64_t n, const T* ahead, int64_t num_ahead, float* out,
                           int64_t out_stride) {
  if constexpr (kBatch > 1) {
    if (batch < kBatch) {
      return multiply_block<kWRows, kBatch - 1>(w, w_stride, x, x_stride, batch, n, ahead,
                                                num_ahead, out, out_stride);
    }
  }
  switch (num_ahead) {
    case 4:
      return multiply_block<kWRows, kBatch, 4>(w, w_stride, x, x_stride, n, ahead, out, out_stride);
    case 2:
      return multiply_block<kWRows, kBatch, 2>(w, w_stride, x, x_stride, n, ahead, out, out_stride);
    case 1:
      return multiply_block<kWRows, kBatch, 1>(w, w_stride, x, x_stride, n, ahead, out, out_stride);
    default:
      return multiply_block<kWRows, kBatch, 0>(w, w_stride, x, x_stride, n, ahead, out, out_stride);
  }
}

// out[b, r]: [num_batch, num_rows] with row stride out_stride, from w: [num_rows, n] and packed
// x: [num_batch, packed_size(n)]. `next`: the rows of w that will be read after these; may be null.
template <typename T>
inline void multiply(const T* w, int64_t w_stride, int64_t num_rows, const PackedX<T>* x,
                     int64_t x_stride, int64_t num_batch, int64_t n, const T* next, float* out,
                     int64_t out_stride) {
  for (int64_t r = 0; r < num_rows; r += kRows) {
    const T* block = w + r * w_stride;
    const T* ahead = r + kRows < num_rows ? block + kRows * w_stride : next;
    // Every group of rows of x prefetches its share of the next block, so that memory never idles.
    for (int64_t b = 0; b < num_batch; b += kMaxBatch) {
      const int64_t batch = min_of(kMaxBatch, num_batch - b);
      const int64_t from = b * kRows / num_batch;
      const int64_t to = min_of(b + kMaxBatch, num_batch) * kRows / num_batch;
      const int64_t num_ahead = ahead ? to - from : 0;
      const T* share = ahead ? ahead + from * w_stride : w;
      const PackedX<T>* group = x + b * x_stride;
      float* group_out = out + b * out_stride + r;
      if (r + kRows <= num_rows) {
        multiply_block<kRows, kMaxBatch>(block, w_stride, group, x_stride, batch, n, share,
                                         num_ahead, group_out, out_stride);
        continue;
      }
      for (int64_t i = 0; i < num_rows - r; ++i) {
        multiply_block<1, kMaxBatch>(block + i * w_stride, w_stride, group, x_stride, batch, n,
                                     share, 0, group_out + i, out_stride);
      }
    }
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
