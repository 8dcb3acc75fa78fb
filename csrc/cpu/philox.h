// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): four random
// words for each key and counter, without state.
#pragma once

#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {

struct RandomWords {
  uint32_t words[4];
};

inline RandomWords philox(uint64_t key, uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3) {
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xd2511f53u} * c0, b = uint64_t{0xcd9e8d57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9e3779b9u;
    k1 += 0xbb67ae85u;
  }
  return {{c0, c1, c2, c3}};
}

// The random words of a request at a position, for one purpose.
inline RandomWords random_words(int64_t seed, int64_t position, uint32_t purpose) {
  const uint64_t at = static_cast<uint64_t>(position);
  return philox(static_cast<uint64_t>(seed), static_cast<uint32_t>(at),
                static_cast<uint32_t>(at >> 32), purpose, 0);
}

// A number in [0, 1): with 53 bits, and with as many as float32 has.
inline double uniform_double(const RandomWords& random) {
  const uint64_t bits = uint64_t{random.words[0]} << 32 | random.words[1];
  return static_cast<double>(bits >> 11) * 0x1p-53;
}
inline float uniform_float(const RandomWords& random, int word) {
  return static_cast<float>(random.words[word] >> 8) * 0x1p-24f;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
