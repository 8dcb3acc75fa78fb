// Shared<T> of the emulator: a pointer into the running block's shared memory whose every access is
// checked. See eecore/shared.cuh for what it stands for.
#pragma once

#include <emulator/accesses.h>
#include <emulator/machine.h>
#include <emulator/races.h>

#include <cstring>
#include <type_traits>

namespace emulator {

template <typename T>
class Shared {
  using Value = std::remove_const_t<T>;

 public:
  // An element: reads and writes go through the checks.
  class Element {
   public:
    explicit Element(uint32_t offset) : offset_(offset) {}
    Element(const Element&) = default;
    EMULATOR_INLINE operator Value() const {  // NOLINT: stands for the element
      Value value;
      std::memcpy(&value, read_shared(offset_, sizeof(T)), sizeof(T));
      return value;
    }
    EMULATOR_INLINE const Element& operator=(const Value& value) const {
      static_assert(!std::is_const_v<T>, "the element is read only");
      std::memcpy(write_shared(offset_, sizeof(T)), &value, sizeof(T));
      return *this;
    }
    EMULATOR_INLINE const Element& operator=(const Element& other) const {
      return *this = Value(other);
    }
    EMULATOR_INLINE const Element& operator+=(const Value& value) const {
      return *this = Value(*this) + value;
    }
    EMULATOR_INLINE const Element& operator-=(const Value& value) const {
      return *this = Value(*this) - value;
    }
    EMULATOR_INLINE const Element& operator*=(const Value& value) const {
      return *this = Value(*this) * value;
    }

   private:
    uint32_t offset_;
  };

  Shared() = default;
  Shared(uint32_t offset, uint32_t begin, uint32_t end)
      : offset_(offset), begin_(begin), end_(end) {}
  template <typename U>
    requires std::is_same_v<T, const U>
  Shared(const Shared<U>& other)  // NOLINT: as pointers convert
      : offset_(other.offset()), begin_(other.begin()), end_(other.end()) {}

  template <typename Int>
  Element operator[](Int index) const {
    return Element((*this + index).checked(sizeof(T), alignof(T)));
  }
  Element operator*() const { return (*this)[0]; }
  template <typename Int>
  Shared operator+(Int count) const {
    return {static_cast<uint32_t>(offset_ + static_cast<int64_t>(count) * int64_t{sizeof(T)}),
            begin_, end_};
  }
  template <typename Int>
  Shared operator-(Int count) const {
    return *this + -static_cast<int64_t>(count);
  }
  template <typename Int>
  Shared& operator+=(Int count) {
    return *this = *this + count;
  }

  // The offset, when `bytes` from there on lie in the array and are aligned.
  EMULATOR_UNSEEN uint32_t checked(size_t bytes, size_t alignment) const {
    if (offset_ < begin_ || offset_ + bytes > end_) {
      fail("is out of bounds: byte " + std::to_string(int64_t{offset_} - begin_) +
           " of a shared array of " + std::to_string(end_ - begin_) + " bytes");
    }
    if (offset_ % alignment != 0) {
      fail("touches " + std::to_string(bytes) + " bytes of shared memory at byte " +
           std::to_string(offset_ - begin_) + ", which is not a multiple of " +
           std::to_string(alignment));
    }
    return offset_;
  }

  uint32_t offset() const { return offset_; }
  uint32_t begin() const { return begin_; }
  uint32_t end() const { return end_; }

 private:
  uint32_t offset_ = 0, begin_ = 0, end_ = 0;
};

template <typename T>
Shared<T> static_array(const void* key, size_t size) {
  const uint32_t begin = static_shared(key, size * sizeof(T));
  return {begin, begin, static_cast<uint32_t>(begin + size * sizeof(T))};
}

// Returns the value before.
template <typename T, typename Change>
T exchange(const Shared<T>& address, Change change) {
  static_assert(std::is_integral_v<T> && sizeof(T) == 4, "what shared memory has an atomic of");
  unsigned char* const at = change_shared(address.checked(sizeof(T), alignof(T)), sizeof(T));
  T before;
  std::memcpy(&before, at, sizeof(T));
  const T after = change(before);
  std::memcpy(at, &after, sizeof(T));
  return before;
}

}  // namespace emulator

// ---- Atomics on shared memory ----

template <typename T>
T atomicAdd(const ::emulator::Shared<T>& address, std::type_identity_t<T> value) {
  return ::emulator::exchange(address, [value](T x) { return static_cast<T>(x + value); });
}
template <typename T>
T atomicOr(const ::emulator::Shared<T>& address, std::type_identity_t<T> value) {
  return ::emulator::exchange(address, [value](T x) { return x | value; });
}
template <typename T>
T atomicMax(const ::emulator::Shared<T>& address, std::type_identity_t<T> value) {
  return ::emulator::exchange(address, [value](T x) { return x < value ? value : x; });
}
template <typename T>
T atomicMin(const ::emulator::Shared<T>& address, std::type_identity_t<T> value) {
  return ::emulator::exchange(address, [value](T x) { return value < x ? value : x; });
}

namespace eecore::cuda {

template <typename T>
using Shared = ::emulator::Shared<T>;

template <typename T>
Shared<T> dynamic_shared(int byte_offset = 0) {
  const uint32_t begin = ::emulator::dynamic_shared_begin();
  return {begin + static_cast<uint32_t>(byte_offset), begin, ::emulator::dynamic_shared_end()};
}

template <typename T>
Shared<T> swizzled_shared(int byte_offset = 0) {
  return dynamic_shared<T>(byte_offset);
}

template <typename U, typename T>
Shared<U> shared_as(const Shared<T>& pointer) {
  return {pointer.offset(), pointer.begin(), pointer.end()};
}

}  // namespace eecore::cuda

#define EECORE_SHARED(type, name, size) \
  static const char name##_key = 0; \
  const ::eecore::cuda::Shared<type> name = ::emulator::static_array<type>(&name##_key, size)
