// quantise_weight on the CPU: each block of 32 numbers separately; threads share the rows.
//
// A block is cut into steps of several widths. For each width the best scale and minimum for the
// whole numbers follow from two equations (weighted least squares); the best of all are kept.
#include "panel_lanes.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int kVecs = kBlockColumns / kWidth;

constexpr float kLargestHalf = 65504.0f;

// float16 of a finite float, to nearest even; the largest float16 where the float is beyond it.
uint16_t half_of(float value) {
  value = value > kLargestHalf ? kLargestHalf : value < -kLargestHalf ? -kLargestHalf : value;
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude < 0x38800000u) {  // below the smallest normal number steps are 2^-24
    float steps;
    __builtin_memcpy(&steps, &magnitude, 4);
    steps *= 0x1p24f;
    const float whole = (steps + 12582912.0f) - 12582912.0f;  // to nearest even
    return static_cast<uint16_t>(sign | static_cast<uint32_t>(whole));
  }
  const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}
float rounded_to_half(float value, uint8_t* out) {
  const uint16_t half = half_of(value);
  __builtin_memcpy(out, &half, 2);
  return half_to_float(out);
}

struct Block {
  Vec v[kVecs];
};
inline float sum(const Block& block) {
  Vec total = block.v[0];
  for (int i = 1; i < kVecs; ++i) total = total + block.v[i];
  return EECORE_CAPABILITY::sum(total);
}
inline float largest(const Block& block) {
  Vec most = block.v[0];
  for (int i = 1; i < kVecs; ++i) most = max(most, block.v[i]);
  return max_element(most);
}
inline Block negated(const Block& block) {
  Block out;
  for (int i = 0; i < kVecs; ++i) out.v[i] = zero() - block.v[i];
  return out;
}

struct Fit {
  float scale, minimum;
  float error;  // without the part that all fits of a block share
};

// The numbers of a block, their weights, and sums.
struct Numbers {
  Block x, weight, weighted;  // weight * x
  float total, sum_x;         // of weight, of weighted
};
inline Numbers numbers_of(const Block& x) {
  Numbers out;
  out.x = x;
  Block squares, magnitudes;
  for (int i = 0; i < kVecs; ++i) {
    squares.v[i] = x.v[i] * x.v[i];
    magnitudes.v[i] = max(x.v[i], zero() - x.v[i]);
  }
  const Vec rms = broadcast(__builtin_sqrtf(sum(squares) / kBlockColumns));
  for (int i = 0; i < kVecs; ++i) {
    out.weight.v[i] = magnitudes.v[i] + rms;
    out.weighted.v[i] = out.weight.v[i] * x.v[i];
  }
  out.total = sum(out.weight);
  out.sum_x = sum(out.weighted);
  return out;
}

// Whole numbers of 0..most: round((x - minimum) * factor).
inline Block whole_of(const Block& x, float minimum, float factor, float most) {
  Block out;
  for (int i = 0; i < kVecs; ++i) {
    const Vec steps = (x.v[i] - broadcast(minimum)) * broadcast(factor);
    out.v[i] = min(max(round_to_int(steps), zero()), broadcast(most));
  }
  return out;
}

// The scale and minimum that fit whole numbers best; a scale of zero where they are all alike.
inline Fit fit_of(const Numbers& numbers, const Block& whole) {
  Block by_weight, squares, products;
  for (int i = 0; i < kVecs; ++i) {
    by_weight.v[i] = numbers.weight.v[i] * whole.v[i];
    squares.v[i] = by_weight.v[i] * whole.v[i];
    products.v[i] = numbers.weighted.v[i] * whole.v[i];
  }
  const float sum_q = sum(by_weight), sum_qq = sum(squares), sum_qx = sum(products);
  const float spread = numbers.total * sum_qq - sum_q * sum_q;
  Fit fit;
  fit.scale = spread > 0 ? (numbers.total * sum_qx - sum_q * numbers.sum_x) / spread : 0.0f;
  fit.minimum = (numbers.sum_x - fit.scale * sum_q) / numbers.total;
  fit.error = -(fit.scale * sum_qx + fit.minimum * numbers.sum_x);
  return fit;
}

inline float inverse(float scale) { return scale > 1e-38f ? 1.0f / scale : 0.0f; }

// Fits a block of finite numbers that are not all alike.
template <int kMax>
Fit best_fit(const Block& x, float least, float most) {
  constexpr int kCuts = 11, kRefinements = 2;
  const Numbers numbers = numbers_of(x);
  Fit best{(most - least) / kMax, least, __builtin_inff()};
  const float range = inverse(most - least);
  for (int cut = 0; cut < kCuts; ++cut) {
    const float factor = (kMax - 1.2f + 0.2f * static_cast<float>(cut)) * range;
    const Fit fit = fit_of(numbers, whole_of(x, least, factor, kMax));
    if (fit.scale > 0 && fit.error < best.error) best = fit;
  }
  for (int i = 0; i < kRefinements; ++i) {
    const Fit fit = fit_of(numbers, whole_of(x, best.minimum, inverse(best.scale), kMax));
    if (fit.scale > 0 && fit.error < best.error) best = fit;
  }
  return best;
}

bool finite(float value) { return value - value == 0.0f; }

// A block of Q4_1 or Q5_1.
template <BlockFormat kFormat>
void quantise(const Block& x, uint8_t* out) {
  constexpr int kMax = (1 << quant_bits(kFormat)) - 1;
  const float least = -largest(negated(x)), most = largest(x);
  Fit fit{0.0f, least, 0.0f};
  if (most > least) fit = best_fit<kMax>(x, least, most);
  const float scale = rounded_to_half(fit.scale, out);
  const float minimum = rounded_to_half(fit.minimum, out + 2);
  const Block whole = whole_of(x, minimum, inverse(scale), kMax);
  alignas(64) float q[kBlockColumns];
  for (int i = 0; i < kVecs; ++i) store(q + i * kWidth, whole.v[i]);
  uint32_t fifth = 0;
  uint8_t* low = out + (kFormat == BlockFormat::kQ5_1 ? 8 : 4);
  for (int i = 0; i < kBlockColumns / 2; ++i) {
    const uint32_t first = static_cast<uint32_t>(q[i]);
    const uint32_t second = static_cast<uint32_t>(q[i + 16]);
    low[i] = static_cast<uint8_t>((first & 15) | (second & 15) << 4);
    fifth |= (first >> 4) << i | (second >> 4) << (i + 16);
  }
  if (kFormat == BlockFormat::kQ5_1) __builtin_memcpy(out + 4, &fifth, 4);
}

template <>
void quantise<BlockFormat::kQ8_0>(const Block& x, uint8_t* out) {
  const float below = largest(negated(x)), above = largest(x);
  const float scale = rounded_to_half((below > above ? below : above) / 127.0f, out);
  const Vec factor = broadcast(inverse(scale));
  for (int i = 0; i < kVecs; ++i) {
    alignas(64) float q[kWidth];
    const Vec whole =
        min(max(round_to_int(x.v[i] * factor), broadcast(-127.0f)), broadcast(127.0f));
    store(q, whole);
    for (int k = 0; k < kWidth; ++k) {
      out[2 + i * kWidth + k] = static_cast<uint8_t>(static_cast<int8_t>(q[k]));
    }
  }
}

// A block that is NaN everywhere.
template <BlockFormat kFormat>
void put_nan(uint8_t* out) {
  constexpr uint16_t kNan = 0x7e00;
  __builtin_memset(out, 0, static_cast<uint64_t>(traits_of(kFormat).bytes));
  __builtin_memcpy(out, &kNan, 2);
  if (has_minima(kFormat)) __builtin_memcpy(out + 2, &kNan, 2);
}

template <BlockFormat kFormat, typename T>
void run(const QuantiseWeightParams& params, const Parallel& parallel) {
  constexpr int64_t kCostOfNumber =
      8;  // of quantising one number, in bytes that could be read meanwhile
  const int64_t grain = parallel.bytes_per_range / (kCostOfNumber * params.columns) + 1;
  parallel_for(parallel, params.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* weight = static_cast<const T*>(params.weight) + row * params.weight_stride;
      uint8_t* out = params.blocks + row * params.blocks_stride;
      for (int64_t k = 0; k < params.columns; k += kBlockColumns) {
        Block x;
        Vec poison = zero();
        for (int i = 0; i < kVecs; ++i) {
          x.v[i] = load(weight + k + i * kWidth);
          poison = fma(x.v[i], zero(), poison);
        }
        // A number beyond float16's largest would make the scale or the minimum infinite.
        const bool usable = finite(EECORE_CAPABILITY::sum(poison)) && largest(x) <= kLargestHalf &&
                            largest(negated(x)) <= kLargestHalf;
        usable ? quantise<kFormat>(x, out) : put_nan<kFormat>(out);
        out += traits_of(kFormat).bytes;
      }
    }
  });
}

template <BlockFormat kFormat>
void run_of_dtype(const QuantiseWeightParams& params, const Parallel& parallel) {
  if (params.dtype == DType::kFloat32) return run<kFormat, float>(params, parallel);
  run<kFormat, BFloat16>(params, parallel);
}

}  // namespace

void run_quantise_weight(const QuantiseWeightParams& params, const Parallel& parallel) {
  switch (params.format) {
    case BlockFormat::kQ4_1:
      return run_of_dtype<BlockFormat::kQ4_1>(params, parallel);
    case BlockFormat::kQ5_1:
      return run_of_dtype<BlockFormat::kQ5_1>(params, parallel);
    default:
      return run_of_dtype<BlockFormat::kQ8_0>(params, parallel);
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
