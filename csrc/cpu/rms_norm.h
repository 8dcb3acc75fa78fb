// RMS norm of one row, computed in float32 and rounded where a model of dtype T rounds.
#pragma once

#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// 1 / sqrt(mean(x^2) + eps) for x: [n].
template <typename T>
inline float inverse_rms(const T* x, int64_t n, float eps) {
  Vec even = zero(), odd = zero();
  int64_t i = 0;
  for (; i + 2 * kWidth <= n; i += 2 * kWidth) {
    const Vec a = load(x + i), b = load(x + i + kWidth);
    even = fma(a, a, even);
    odd = fma(b, b, odd);
  }
  for (; i < n; i += kWidth) {
    const Vec a = load_partial(x + i, min_of(n - i, kWidth));
    even = fma(a, a, even);
  }
  return 1.0f / __builtin_sqrtf(sum(even + odd) / static_cast<float>(n) + eps);
}

// out = weight * T(x * scale), rounded to T; x, weight, out: [n].
template <typename T>
inline void scale_row(const T* x, const T* weight, float scale, int64_t n, T* out) {
  const Vec factor = broadcast(scale);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t lanes = min_of(n - i, kWidth);
    if (lanes == kWidth) {
      store(out + i, load(x + i) * factor);
      store(out + i, load(out + i) * load(weight + i));
    } else {
      store_partial(out + i, load_partial(x + i, lanes) * factor, lanes);
      store_partial(out + i, load_partial(out + i, lanes) * load_partial(weight + i, lanes), lanes);
    }
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
