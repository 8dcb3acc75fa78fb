// float8 (e4m3, without infinities) to and from a cache: sign, four bits of exponent with a bias of
// 7, three of mantissa. The bits are computed by hand, so that every GPU architecture and the CPU
// have the same numbers.
#pragma once

#include <cstring>

#include "eecore/element.cuh"

namespace eecore::cuda {

// Rounds to nearest even; what is too large becomes the largest number, 448, and NaN stays NaN.
// Numbers below 2^-6 are multiples of 2^-9: adding 2^14 to a float puts them in its last bits.
__device__ __forceinline__ Float8 float_to_float8(float x) {
  constexpr float kLargest = 448.0f, kSmallestNormal = 0.015625f, kGrid = 16384.0f;
  constexpr uint32_t kBias = 120u << 3, kNaN = 0x7fu;
  const float magnitude = fminf(fabsf(x), kLargest);
  const uint32_t bits = float_to_bits(magnitude);
  const uint32_t rounded = ((bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20) - kBias;
  const uint32_t on_grid = float_to_bits(magnitude + kGrid) - float_to_bits(kGrid);
  const uint32_t code = magnitude < kSmallestNormal ? on_grid : rounded;
  return {static_cast<uint8_t>(x != x ? kNaN : code | (float_to_bits(x) >> 24 & 0x80u))};
}

template <>
__device__ __forceinline__ Float8 from_float<Float8>(float x) {
  return float_to_float8(x);
}

// Two float8 in the low byte of each half as a pair of T, a 16-bit type: with the exponent's bits
// in place, a number is off by a power of two, denormal or not.
template <typename T>
__device__ __forceinline__ uint32_t widen_halves(uint32_t halves) {
  constexpr bool kBrain = std::is_same_v<T, BFloat16>;
  constexpr uint32_t kPower = kBrain ? 0x7b807b80u : 0x5c005c00u;  // 2^120, 2^8
  constexpr uint32_t kMinusZero = 0x80008000u;
  const uint32_t magnitude = halves & 0x007f007fu, sign = (halves & 0x00800080u) << 8;
  const uint32_t is_nan = (magnitude + 0x00010001u) & 0x00800080u;
  const uint32_t exponents = is_nan * (kBrain ? 0xffu : 0xf8u);  // all ones where it is NaN
  return fma_pair<T>(magnitude << (kBrain ? 4 : 7), kPower, kMinusZero) | exponents | sign;
}

__device__ __forceinline__ float widen_float8(uint32_t byte) {
  const uint32_t magnitude = byte & 0x7fu, sign = (byte & 0x80u) << 24;
  const float value = bits_to_float(magnitude << 20) * bits_to_float(0x7b800000u);  // 2^120
  return bits_to_float((magnitude == 0x7fu ? 0x7fc00000u : float_to_bits(value)) | sign);
}

// 16 float8 as packs of T.
template <typename T>
struct WidePacks {
  static constexpr int kCount = static_cast<int>(sizeof(T));
  Pack<T> packs[kCount];
};

template <typename T>
__device__ __forceinline__ WidePacks<T> widen_pack(const Pack<Float8>& pack) {
  uint32_t bytes[4];
  memcpy(bytes, &pack, sizeof(bytes));
  WidePacks<T> wide;
  if constexpr (sizeof(T) == 2) {
    uint32_t pairs[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      pairs[2 * i] = widen_halves<T>(permute_bytes(bytes[i], 0, 0x4140));
      pairs[2 * i + 1] = widen_halves<T>(permute_bytes(bytes[i], 0, 0x4342));
    }
    memcpy(&wide, pairs, sizeof(pairs));
  } else {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      wide.packs[i / 4].values[i % 4] = widen_float8(bytes[i / 4] >> i % 4 * 8 & 0xffu);
    }
  }
  return wide;
}

// 8 float8, the first in the low byte, as 16-bit T, by the instruction of sm_89.
template <typename T>
__device__ __forceinline__ Words widen_eight(uint64_t bytes) {
  Words wide;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = static_cast<uint32_t>(bytes >> 16 * i);
    const uint32_t halves = float8_pair_to_halves(pair);
    if constexpr (std::is_same_v<T, Float16>) {
      wide.values[i] = halves;
    } else {
      const auto half = [&](int shift) { return Float16{static_cast<uint16_t>(halves >> shift)}; };
      wide.values[i] = pack_pair<T>(half_to_float(half(0)), half_to_float(half(16)));
    }
  }
  return wide;
}

// The factor that a head's numbers are multiplied by when stored: 1 / scale.
__device__ __forceinline__ float float8_factor(const float* scales, int64_t head) {
  return scales == nullptr ? 1.0f : 1.0f / scales[head];
}

// Stores the first `count` of kSize numbers times a factor; `aligned`: at a multiple of 4 bytes.
template <int kSize>
__device__ __forceinline__ void store_float8(Float8* to, const float (&x)[kSize], float factor,
                                             int count, bool aligned) {
  static_assert(kSize % 4 == 0);
#pragma unroll
  for (int i = 0; i < kSize; i += 4) {
    uint32_t word = 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Float8 element = float_to_float8(__fmul_rn(x[i + j], factor));
      word |= uint32_t{element.bits} << 8 * j;
      if ((!aligned || i + 4 > count) && i + j < count) to[i + j] = element;
    }
    if (aligned && i + 4 <= count) *reinterpret_cast<uint32_t*>(to + i) = word;
  }
}

}  // namespace eecore::cuda
