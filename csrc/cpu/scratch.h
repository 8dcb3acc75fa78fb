// Memory of one kernel call, or of a thread, aligned for vectors and uninitialised.
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

// A T that a thread makes on first use and keeps for its later calls: threads may have small
// stacks.
template <typename T>
T& kept_by_thread() {
  thread_local const Scratch<T> kept(1);
  return kept[0];
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
