// Host twins of the functions of eecore/ptx.cuh.
#pragma once

#include <emulator/device.h>
#include <emulator/shared.h>

#include <cmath>
#include <cstring>

namespace eecore::cuda {

// ---- Conversions ----

inline float bits_to_float(uint32_t bits) { return __uint_as_float(bits); }
inline uint32_t float_to_bits(float x) { return __float_as_uint(x); }

inline float half_to_float(Float16 x) {
  _Float16 half;
  std::memcpy(&half, &x.bits, sizeof half);
  return static_cast<float>(half);
}

inline Float16 float_to_half(float x) {
  const auto half = static_cast<_Float16>(x);
  Float16 out;
  std::memcpy(&out.bits, &half, sizeof half);
  return out;
}

inline BFloat16 float_to_bfloat16(float x) {
  if (std::isnan(x)) return {0x7fff};
  const uint32_t bits = float_to_bits(x);
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <typename T>
uint32_t pack_pair(float first, float second);
template <>
inline uint32_t pack_pair<BFloat16>(float first, float second) {
  return float_to_bfloat16(first).bits | uint32_t{float_to_bfloat16(second).bits} << 16;
}
template <>
inline uint32_t pack_pair<Float16>(float first, float second) {
  return float_to_half(first).bits | uint32_t{float_to_half(second).bits} << 16;
}

inline uint32_t float8_pair_to_halves(uint32_t pair) {
  uint32_t halves = 0;
  for (int i = 0; i < 2; ++i) {
    const int byte = static_cast<int>(pair >> 8 * i & 0xff), exponent = byte >> 3 & 15;
    const int mantissa = byte & 7;
    float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
    if ((byte & 0x7f) == 0x7f) value = NAN;
    halves |= uint32_t{float_to_half((byte & 0x80) != 0 ? -value : value).bits} << 16 * i;
  }
  return halves;
}

inline float exp2_fast(float x) { return std::exp2(x); }

inline uint32_t permute_bytes(uint32_t first, uint32_t second, uint32_t selector) {
  const uint64_t both = first | uint64_t{second} << 32;
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t digit = selector >> 4 * i & 0xf;
    if (digit > 7) ::emulator::fail("permutes bytes with a selector of digits other than 0 to 7");
    out |= static_cast<uint32_t>(both >> 8 * digit & 0xff) << 8 * i;
  }
  return out;
}

template <typename T>
float half_of(uint32_t pair, int which) {
  const auto bits = static_cast<uint16_t>(pair >> 16 * which);
  if constexpr (std::is_same_v<T, Float16>) {
    return half_to_float(Float16{bits});
  } else {
    return bits_to_float(uint32_t{bits} << 16);
  }
}

template <typename T>
uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  float sums[2];
  for (int i = 0; i < 2; ++i) {
    sums[i] = std::fma(half_of<T>(a, i), half_of<T>(b, i), half_of<T>(c, i));
  }
  return pack_pair<T>(sums[0], sums[1]);
}

// ---- 16-byte accesses ----

inline void check_alignment(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) {
    ::emulator::fail(
        "makes a 16-byte access to global memory at an address that is not a multiple of 16");
  }
}

template <typename T>
EMULATOR_INLINE Pack<T> load16(const T* from) {
  check_alignment(from);
  ::emulator::touch_global(from, 16);
  return *reinterpret_cast<const Pack<T>*>(from);
}

template <typename T>
EMULATOR_INLINE Pack<T> load16_once(const T* from) {
  return load16(from);
}

template <typename T>
EMULATOR_INLINE void store16(T* to, const Pack<T>& pack) {
  check_alignment(to);
  *reinterpret_cast<Pack<T>*>(to) = pack;
}

template <typename T>
EMULATOR_INLINE auto shared_load16(const ::emulator::Shared<T>& from) {
  Pack<std::remove_const_t<T>> pack;
  std::memcpy(&pack, ::emulator::read_shared(from.checked(16, 16), 16), 16);
  return pack;
}

template <typename T>
EMULATOR_INLINE void shared_store16(const ::emulator::Shared<T>& to, const Pack<T>& pack) {
  std::memcpy(::emulator::write_shared(to.checked(16, 16), 16), &pack, 16);
}

inline float load_or(const float* from, float otherwise) {
  return from == nullptr ? otherwise : *from;
}

inline void prefetch_l2(const void*) {}

// ---- Asynchronous copies ----

template <typename T>
EMULATOR_INLINE void cp_async16(const ::emulator::Shared<T>& to, const T* from, int bytes = 16) {
  if (bytes < 0 || bytes > 16)
    ::emulator::fail("starts a cp.async of " + std::to_string(bytes) + " bytes");
  check_alignment(from);
  if (bytes > 0) ::emulator::touch_global(from, bytes);
  ::emulator::start_copy(to.checked(16, 16), from, bytes, 16 - bytes);
}

template <typename T>
EMULATOR_INLINE void cp_async16_cached(const ::emulator::Shared<T>& to, const T* from,
                                       int bytes = 16) {
  cp_async16(to, from, bytes);
}

inline void cp_async_commit() { ::emulator::close_copy_group(); }

template <int kPending>
void cp_async_wait() {
  ::emulator::wait_for_copies(kPending);
}

// ---- Matrices of 16-bit elements ----

// Element `column` of row `row` of matrix i, from the addresses that the lanes gave.
template <typename T>
EMULATOR_INLINE void load_matrices(uint32_t (&out)[4], const ::emulator::Shared<T>& row,
                                   bool transposed, const std::source_location& site) {
  static_assert(sizeof(T) == 2);
  const uint32_t mine = row.checked(16, 16);
  const ::emulator::Gathered<uint32_t> all(0xffffffffu, "ldmatrix", mine, site);
  const int group = ::emulator::lane() / 4, pair = ::emulator::lane() % 4;
  for (int matrix = 0; matrix < 4; ++matrix) {
    uint16_t elements[2];
    for (int i = 0; i < 2; ++i) {
      const int at_row = transposed ? 2 * pair + i : group;
      const int at_column = transposed ? group : 2 * pair + i;
      const uint32_t offset = all.of[8 * matrix + at_row];
      std::memcpy(&elements[i], ::emulator::read_shared(offset + 2 * at_column, 2), 2);
    }
    out[matrix] = elements[0] | uint32_t{elements[1]} << 16;
  }
}

template <typename T>
EMULATOR_INLINE void ldmatrix_x4(
    uint32_t (&out)[4], const ::emulator::Shared<T>& row,
    const std::source_location& site = std::source_location::current()) {
  load_matrices(out, row, false, site);
}

template <typename T>
EMULATOR_INLINE void ldmatrix_x4_transposed(
    uint32_t (&out)[4], const ::emulator::Shared<T>& row,
    const std::source_location& site = std::source_location::current()) {
  load_matrices(out, row, true, site);
}

template <typename T>
void mma_m16n8k16(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                  const std::source_location& site = std::source_location::current()) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
  struct Fragments {
    uint32_t a[4], b[2];
  } mine;
  std::memcpy(mine.a, a, sizeof a);
  std::memcpy(mine.b, b, sizeof b);
  const ::emulator::Gathered<Fragments> all(0xffffffffu, "mma", mine, site);
  const int group = ::emulator::lane() / 4, pair = ::emulator::lane() % 4;
  float total[4] = {sums[0], sums[1], sums[2], sums[3]};
  for (int k = 0; k < 16; ++k) {
    const int holder = k % 8 / 2, high = k / 8, half = k % 2;
    const Fragments& of_a = all.of[4 * group + holder];
    for (int i = 0; i < 4; ++i) {
      const Fragments& of_b = all.of[4 * (2 * pair + i % 2) + holder];
      const float from_a = half_of<T>(of_a.a[2 * high + i / 2], half);
      total[i] += from_a * half_of<T>(of_b.b[high], half);
    }
  }
  for (int i = 0; i < 4; ++i) sums[i] = total[i];
}

// ---- Programmatic dependent launch ----

inline void wait_for_previous_kernel() { ::emulator::waited_for_previous_kernel(); }
inline void wait_for_previous_kernel(bool waits) {
  if (waits) wait_for_previous_kernel();
}
inline void let_next_kernel_start() {
  if (::emulator::checks_races) ::emulator::let_next_kernel_start();
}

}  // namespace eecore::cuda
