// Memory of one kernel call, aligned for vectors and not initialised.
#pragma once

#include <new>

#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {

template <typename T>
class Scratch {
 public:
  explicit Scratch(int64_t count)
      : data_(static_cast<T*>(
            ::operator new(static_cast<uint64_t>(count) * sizeof(T), std::align_val_t{64}))) {}
  ~Scratch() { ::operator delete(static_cast<void*>(data_), std::align_val_t{64}); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_;
};

}  // namespace eecore::cpu::EECORE_CAPABILITY
