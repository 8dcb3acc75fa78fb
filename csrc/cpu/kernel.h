// Included by every CPU kernel file. EECORE_CAPABILITY is the namespace that this translation unit
// is compiled for: portable, avx2, avx512 or avx512_bf16; of avx_vnni and its model there are only
// the products of vnni_products.h. Everything that a kernel file defines or
// instantiates must be in that namespace or be static: the linker would merge an inline function
// shared between capabilities into any one of its copies, possibly the AVX-512 one. For the same
// reason kernel files use no standard containers or algorithms.
#pragma once

#include "run.h"

#ifndef EECORE_CAPABILITY
#error "csrc/cpu kernels are compiled once per capability, see CMakeLists.txt"
#endif

namespace eecore::cpu::EECORE_CAPABILITY {

// Calls body(begin, end) on ranges that cover [0, n), on several threads if there is more than one
// grain of work.
template <typename Body>
void parallel_for(const Parallel& parallel, int64_t n, int64_t grain, const Body& body) {
  if (n <= grain || parallel.num_threads <= 1) {
    if (n > 0) body(int64_t{0}, n);
    return;
  }
  parallel.run(
      parallel.pool, 0, n, grain,
      [](int64_t begin, int64_t end, void* context) {
        (*static_cast<const Body*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }
// The sum of numbers that come from tensors: it wraps around on overflow.
inline int64_t wrapping_add(int64_t a, int64_t b) {
  return static_cast<int64_t>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
}
// Copies a row that may have no elements: such a row needs no memory, but memcpy requires valid
// pointers.
inline void copy_bytes(void* to, const void* from, int64_t bytes) {
  if (bytes > 0) __builtin_memcpy(to, from, static_cast<uint64_t>(bytes));
}
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace eecore::cpu::EECORE_CAPABILITY
