// Division by numbers that are known at launch: a multiplication and a shift, where a GPU would
// otherwise take some twenty dependent instructions.
#pragma once

#include <cstdint>

namespace eecore::cuda {

// Divides numbers from 0 to 2^31 - 1. (Granlund and Montgomery 1994, figure 4.1; the sum fits in 32
// bits, because the numbers are not negative.)
struct Divisor {
  uint32_t multiplier;
  int32_t shift;
  int32_t value;

  // For a divisor from 1 to 2^31 - 1.
  __host__ __device__ static Divisor of(int64_t value) {
    Divisor made{0, 0, static_cast<int32_t>(value)};
    while (int64_t{1} << made.shift < value) ++made.shift;
    const uint64_t above = (uint64_t{1} << made.shift) - static_cast<uint64_t>(value);
    made.multiplier = static_cast<uint32_t>((above << 32) / static_cast<uint64_t>(value) + 1);
    return made;
  }

  __host__ __device__ int quotient(int number) const {
    const auto n = static_cast<uint32_t>(number);
    const auto high = static_cast<uint32_t>(uint64_t{n} * multiplier >> 32);
    return static_cast<int>((high + n) >> shift);
  }
  __host__ __device__ int remainder(int number) const { return number - quotient(number) * value; }
  // The quotient, rounded up; number + value stays below 2^31.
  __host__ __device__ int rounded_up(int number) const { return quotient(number + value - 1); }
};

// number / divisor where that is less than 256, for a divisor that is not known at launch: without
// a reciprocal.
__host__ __device__ inline int small_quotient(int number, int divisor) {
  int quotient = 0;
#pragma unroll
  for (int bit = 7; bit >= 0; --bit) {
    if (number >> bit < divisor) continue;
    number -= divisor << bit;
    quotient += 1 << bit;
  }
  return quotient;
}

}  // namespace eecore::cuda
