// Counts the accesses of launches while a test asks for it: bytes of watched memory, 32-byte
// sectors of a warp's accesses to global memory, banks of accesses to shared memory, and the bytes
// in flight by cp.async when threads wait for them.
//
// The threads of a warp are fibers, so that simultaneous accesses have to be put together: the n-th
// access of each lane at one place of the compiled code is taken for one instruction. Where lanes
// reach a place differently often that is wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace emulator {

struct LaunchConfig;

extern bool counts_accesses;

// The call that returns to the running kernel is the place.
void count_global(const void* address, size_t bytes);
void count_shared(uint32_t offset, size_t bytes);

// The running thread's cp.asyncs: bytes started, a wait, bytes landed by then.
void count_copy(size_t bytes);
void count_wait();
void count_landed(size_t bytes);

#define EMULATOR_INLINE inline __attribute__((always_inline))

EMULATOR_INLINE void touch_global(const void* address, size_t bytes) {
  if (counts_accesses) count_global(address, bytes);
}
EMULATOR_INLINE void touch_shared(uint32_t offset, size_t bytes) {
  if (counts_accesses) count_shared(offset, bytes);
}

// Parts of launch(), called one after the other.
void begin_counted_launch(const LaunchConfig& config);
void end_counted_block();
void end_counted_launch();

// Counts launches from here on; no memory is watched. Off: drops the counts.
void count_accesses(bool on);
// Watches memory under a name: the bytes that each launch reads of it, and the distinct ones.
void watch(const std::string& name, const void* begin, size_t bytes);
// A JSON list of the launches since counting began.
std::string counted_launches();

}  // namespace emulator
