// wgmma: products of four warps that are under way until their threads wait for them. They read
// registers and shared memory, and land, at the wait or at any moment before it. And registers that
// warpgroups give to each other.
#pragma once

#include <emulator/machine.h>

#include <limits>

namespace emulator {

// Registers of a thread that products work with, and who may touch them when.
class WgmmaRegisters {
 public:
  WgmmaRegisters() = default;
  WgmmaRegisters(const WgmmaRegisters&) = delete;
  WgmmaRegisters& operator=(const WgmmaRegisters&) = delete;
  ~WgmmaRegisters();  // they may not go while a product is under way

  // An access by the thread: products that are under way forbid it, of parts of A a write alone.
  void touch(bool is_write);
  // A product starts: the last access has to lie before a fence.
  void begin_product(bool is_sum);
  void end_product() { --under_way_; }

 private:
  int under_way_ = 0;
  bool is_sum_ = false;
  uint32_t touched_after_ = 0;  // fences of the thread
};

// An array of them; its elements check each access.
template <typename T, int kSize>
class CheckedRegisters : public WgmmaRegisters {
 public:
  class Element {
   public:
    Element(WgmmaRegisters& owner, T& value) : owner_(owner), value_(value) {}
    operator T() const {  // NOLINT: stands for the element
      owner_.touch(false);
      return value_;
    }
    const Element& operator=(T value) const {
      owner_.touch(true);
      value_ = value;
      return *this;
    }
    const Element& operator=(const Element& other) const { return *this = T(other); }

   private:
    WgmmaRegisters& owner_;
    T& value_;
  };

  CheckedRegisters() {
    for (T& value : values_)
      value = std::numeric_limits<T>::has_quiet_NaN ? std::numeric_limits<T>::quiet_NaN()
                                                    : std::numeric_limits<T>::max();
  }
  Element operator[](int i) { return {*this, values_[i]}; }
  T* values() { return values_; }  // of products, unchecked

 private:
  T values_[kSize];
};

// A product that a thread has a part in.
struct WgmmaProduct {
  WgmmaRegisters* sum_registers;
  float* sums;  // four of each 8 columns
  int num_tiles;
  bool adds;                       // to what the sums are
  WgmmaRegisters* part_registers;  // null if a is in shared memory
  const uint32_t* part;
  uint64_t a, b;                               // descriptors
  bool is_transposed;                          // b
  float (*element)(uint32_t pair, int which);  // as a float
};
void start_product(const WgmmaProduct& product, const std::source_location& site);
void fence_wgmma(const std::source_location& site);
void commit_products(const std::source_location& site);
void wait_for_products(int pending_groups, const std::source_location& site);

// setmaxnreg, to `count` registers of each thread of a warpgroup. Each begins with as many as a
// block that has the multiprocessor to itself can have.
void move_registers(int count, bool takes, const std::source_location& site);

// The address of a byte of shared memory in descriptors.
uint32_t wgmma_address(uint32_t offset);

// Called by run_block: at a block's start, and at its end, for what went wrong between warps.
void begin_warpgroups(int num_threads);
std::string end_warpgroups();

}  // namespace emulator
