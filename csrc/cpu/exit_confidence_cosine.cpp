// exit_confidence_cosine on the CPU: one pass over both rows; a second one, scaled, only where the
// sums of squares are outside float's safe range.
#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

struct Products {
  float dot, previous, hidden;  // sums of a * b, a * a and b * b
};

// Sums over two rows of n elements, each row multiplied by its scale first.
template <typename T>
Products sum_products(const T* a, const T* b, int64_t n, float a_scale, float b_scale) {
  const Vec a_factor = broadcast(a_scale), b_factor = broadcast(b_scale);
  Vec ab[2] = {zero(), zero()}, aa[2] = {zero(), zero()}, bb[2] = {zero(), zero()};
  const auto add = [&](Vec x, Vec y, int half) {
    x = x * a_factor;
    y = y * b_factor;
    ab[half] = fma(x, y, ab[half]);
    aa[half] = fma(x, x, aa[half]);
    bb[half] = fma(y, y, bb[half]);
  };
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    add(load(a + i), load(b + i), 0);
    add(load(a + i + kWidth), load(b + i + kWidth), 1);
  }
  for (; i < n; i += kWidth) {
    const int64_t count = min_of(kWidth, n - i);
    add(load_partial(a + i, count), load_partial(b + i, count), 0);
  }
  return {sum(ab[0] + ab[1]), sum(aa[0] + aa[1]), sum(bb[0] + bb[1])};
}

// A power of two that brings the largest of n magnitudes near 1; 0 for a zero row, 1 for infinity.
template <typename T>
float scale_of(const T* row, int64_t n) {
  Vec largest = zero();
  for (int64_t i = 0; i < n; i += kWidth) {
    const Vec x = load_partial(row + i, min_of(kWidth, n - i));
    largest = max(largest, max(x, zero() - x));
  }
  const float magnitude = max_element(largest);
  if (magnitude == 0.0f) return 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &magnitude, 4);
  const int32_t exponent = static_cast<int32_t>(bits >> 23) - 127;  // -127 for denormals
  if (exponent == 128) return 1.0f;
  // Exponents from -126 to 126 keep the scale normal; at most a factor of four is left, or 2^23 for
  // denormals, and the squares are then far inside the range.
  const int32_t inverse = exponent > 126 ? -126 : exponent < -126 ? 126 : -exponent;
  const uint32_t scale_bits = static_cast<uint32_t>(inverse + 127) << 23;
  float scale;
  __builtin_memcpy(&scale, &scale_bits, 4);
  return scale;
}

template <typename T>
float cosine(const T* a, const T* b, int64_t n) {
  constexpr float kSmall = 1e-20f, kLarge = 1e30f;
  Products sums = sum_products(a, b, n, 1.0f, 1.0f);
  const bool comfortable = sums.previous > kSmall && sums.previous < kLarge &&
                           sums.hidden > kSmall && sums.hidden < kLarge;
  const bool has_nan = sums.previous != sums.previous || sums.hidden != sums.hidden;
  if (!comfortable && !has_nan) {
    const float a_scale = scale_of(a, n), b_scale = scale_of(b, n);
    if (a_scale == 0.0f || b_scale == 0.0f) return 0.0f;
    sums = sum_products(a, b, n, a_scale, b_scale);
  }
  const double norms = static_cast<double>(sums.previous) * static_cast<double>(sums.hidden);
  const float ratio = static_cast<float>(sums.dot / __builtin_sqrt(norms));
  // Rounding must not leave [-1, 1]; NaN stays NaN.
  return ratio > 1.0f ? 1.0f : ratio < -1.0f ? -1.0f : ratio;
}

template <typename T>
void run(const ExitConfidenceCosineParams& params, const Parallel& parallel) {
  const T* previous = static_cast<const T*>(params.previous);
  const T* hidden = static_cast<const T*>(params.hidden);
  const int64_t grain = ceil_div(int64_t{1} << 16, max_of(params.hidden_size, 1));
  parallel_for(parallel, params.num_seqs, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      params.confidence[row] = cosine(previous + row * params.previous_stride,
                                      hidden + row * params.hidden_stride, params.hidden_size);
    }
  });
}

}  // namespace

void run_exit_confidence_cosine(const ExitConfidenceCosineParams& params,
                                const Parallel& parallel) {
  if (params.dtype == DType::kFloat32) return run<float>(params, parallel);
  run<BFloat16>(params, parallel);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
