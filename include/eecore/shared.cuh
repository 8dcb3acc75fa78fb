// Shared memory of a block. Kernels access it only through Shared<T>, a plain pointer on the GPU;
// in the tests' emulator it is a checked pointer that knows what has been written.
//
//   EECORE_SHARED(float, sums, 32);                      // static: Shared<float> sums
//   Shared<T> tile = dynamic_shared<T>();                // dynamic: all of it
//   Shared<float> partial = dynamic_shared<float>(1024); // from byte 1024 on
#pragma once

#include <cstdint>

#ifdef EECORE_EMULATED
#include <emulator/shared.h>
#else

namespace eecore::cuda {

template <typename T>
using Shared = T*;

// Dynamic shared memory of the launch from a byte offset on; the offset keeps T's alignment.
template <typename T>
__device__ __forceinline__ Shared<T> dynamic_shared(int byte_offset = 0) {
  extern __shared__ __align__(128) unsigned char eecore_dynamic_shared[];
  return reinterpret_cast<T*>(eecore_dynamic_shared + byte_offset);
}

// The same from a multiple of 1024 on, as swizzled matrices need. (Static arrays come before it.)
template <typename T>
__device__ __forceinline__ Shared<T> swizzled_shared(int byte_offset = 0) {
  extern __shared__ __align__(1024) unsigned char eecore_swizzled_shared[];
  return reinterpret_cast<T*>(eecore_swizzled_shared + byte_offset);
}

// The same memory, read as another type.
template <typename U, typename T>
__device__ __forceinline__ Shared<U> shared_as(T* pointer) {
  return reinterpret_cast<U*>(pointer);
}

}  // namespace eecore::cuda

#define EECORE_SHARED(type, name, size) \
  __shared__ __align__(16) type name##_storage[size]; \
  ::eecore::cuda::Shared<type> name = name##_storage

#endif  // EECORE_EMULATED
