// Element types of tensors as plain structs, and their conversions to and from float.
#pragma once

#include <cstdint>
#include <type_traits>

#include "eecore/ptx.cuh"

namespace eecore::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(BFloat16 x) {
  return bits_to_float(uint32_t{x.bits} << 16);
}
__device__ __forceinline__ float to_float(Float16 x) { return half_to_float(x); }

__device__ __forceinline__ uint32_t element_bits(float x) { return float_to_bits(x); }
template <typename T>
__device__ __forceinline__ uint32_t element_bits(T x) {
  return x.bits;
}

// Rounds to nearest even.
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  return float_to_bfloat16(x);
}
template <>
__device__ __forceinline__ Float16 from_float<Float16>(float x) {
  return float_to_half(x);
}

// x, rounded to the type T of a tensor.
template <typename T>
__device__ __forceinline__ float rounded(float x) {
  return to_float(from_float<T>(x));
}

// Two 16-bit elements, with 0 in place of infinities and NaN.
template <typename T>
__device__ __forceinline__ uint32_t finite_pair(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<T, BFloat16> ? 0x7f80u : 0x7c00u;
  uint32_t kept = (pair & kExponent) != kExponent ? 0xffffu : 0u;
  if ((pair >> 16 & kExponent) != kExponent) kept |= 0xffff0000u;
  return pair & kept;
}

// For two 16-bit elements: 1 in place of NaN or an infinity of this sign, 0 in place of all else.
template <typename T, bool kNegative>
__device__ __forceinline__ uint32_t infinite_pair(uint32_t pair) {
  constexpr bool kBrain = std::is_same_v<T, BFloat16>;
  constexpr uint32_t kInfinity = kBrain ? 0x7f80u : 0x7c00u, kOne = kBrain ? 0x3f80u : 0x3c00u;
  const auto is_one = [](uint32_t element) {
    return element == (kInfinity | (kNegative ? 0x8000u : 0u)) || (element & 0x7fffu) > kInfinity;
  };
  return (is_one(pair & 0xffffu) ? kOne : 0u) | (is_one(pair >> 16) ? kOne << 16 : 0u);
}

// Whether x is neither infinite nor NaN.
__device__ __forceinline__ bool is_finite(float x) { return x - x == 0.0f; }

// 16 bytes of elements, the widest access of one thread.
template <typename T>
struct alignas(16) Pack {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

template <typename T>
__device__ __forceinline__ void to_floats(const Pack<T>& pack, float (&out)[Pack<T>::kSize]) {
#pragma unroll
  for (int i = 0; i < Pack<T>::kSize; ++i) out[i] = to_float(pack.values[i]);
}

template <typename T>
__device__ __forceinline__ Pack<T> from_floats(const float (&in)[Pack<T>::kSize]) {
  Pack<T> pack;
#pragma unroll
  for (int i = 0; i < Pack<T>::kSize; ++i) pack.values[i] = from_float<T>(in[i]);
  return pack;
}

// 16 bytes as they are loaded. They stay whole where branches meet of which only one has loaded
// them: taking them apart into elements there would wait for the load.
using Words = Pack<uint32_t>;

template <typename T>
__device__ __forceinline__ Pack<T> elements_of(const Words& words) {
  return reinterpret_cast<const Pack<T>&>(words);
}

// The words at `from`, of which only the first `count` elements exist; the rest are zero. `aligned`
// says that `from` and its row stride allow 16-byte accesses.
template <typename T>
__device__ __forceinline__ Words load_words(const T* from, int64_t count, bool aligned) {
  if (aligned && count >= Pack<T>::kSize) return load16(reinterpret_cast<const uint32_t*>(from));
  constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
  Words words;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    words.values[i] = 0;
#pragma unroll
    for (int j = 0; j < kPerWord; ++j) {
      const int at = i * kPerWord + j;
      if (at < count) words.values[i] |= element_bits(from[at]) << (32 / kPerWord * j);
    }
  }
  return words;
}

// The same, as elements.
template <typename T>
__device__ __forceinline__ Pack<T> load_pack(const T* from, int64_t count, bool aligned) {
  return elements_of<T>(load_words(from, count, aligned));
}

template <typename T>
__device__ __forceinline__ void store_pack(T* to, const Pack<T>& pack, int64_t count,
                                           bool aligned) {
  if (aligned && count >= Pack<T>::kSize) {
    store16(to, pack);
    return;
  }
#pragma unroll
  for (int i = 0; i < Pack<T>::kSize; ++i) {
    if (i < count) to[i] = pack.values[i];
  }
}

}  // namespace eecore::cuda
