// Converts whole numbers of one byte to elements of a 16-bit type, exactly, two at a time.
//
// The numbers become the lowest bits of a power of two so large that these bits are its ones; then
// that power is subtracted. Conversions of single bytes would take four times as long.
#pragma once

#include <type_traits>

#include "eecore/ptx.cuh"

namespace eecore::cuda {

// Bytes 2 * pair and 2 * pair + 1 of four, placed below the exponent of a power of two.
template <typename T>
__device__ __forceinline__ uint32_t below_exponent(uint32_t bytes, int pair) {
  constexpr uint32_t kPower = std::is_same_v<T, BFloat16> ? 0x43434343u : 0x64646464u;
  return permute_bytes(bytes, kPower, pair == 0 ? 0x4140u : 0x4342u);
}

template <typename T>
constexpr uint32_t kPairOfOnes = std::is_same_v<T, BFloat16> ? 0x3f803f80u : 0x3c003c00u;

// Signed bytes.
template <typename T>
__device__ __forceinline__ uint32_t whole_pair(uint32_t bytes, int pair) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const uint32_t spread = below_exponent<T>(bytes, pair);
    // 128 and seven bits, from which 256 is subtracted where the byte is negative: there is no
    // eighth bit.
    return fma_pair<T>(spread & 0xff7fff7fu, kPairOfOnes<T>, (spread & 0xff80ff80u) | 0x80008000u);
  } else {
    constexpr uint32_t kMinus1152 = 0xe480e480u;
    // 1024 and a byte that is 128 too large.
    const uint32_t spread = below_exponent<T>(bytes ^ 0x80808080u, pair);
    return fma_pair<T>(spread, kPairOfOnes<T>, kMinus1152);
  }
}

// Bytes of 0 to 127, minus an offset of 0 to 127.
template <typename T>
__device__ __forceinline__ uint32_t small_pair(uint32_t bytes, int pair, uint32_t offset) {
  // -128 or -1024, whose lowest bits are also ones.
  constexpr uint32_t kMinusPower = std::is_same_v<T, BFloat16> ? 0xc300u : 0xe400u;
  return fma_pair<T>(below_exponent<T>(bytes, pair), kPairOfOnes<T>,
                     (kMinusPower | offset) * 0x10001u);
}

}  // namespace eecore::cuda
