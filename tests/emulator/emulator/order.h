// The order of accesses in the running block: which of other threads' accesses have happened for a
// thread, by synchronisation.
//
// Time passes with every synchronisation of the block; a thread is its number, or one of the names
// below for several of them.
#pragma once

#include <emulator/machine.h>

#include <array>
#include <cstdint>
#include <string>

#pragma GCC visibility push(hidden)  // no other library's: calls of them are plain calls
namespace emulator {

constexpr uint16_t kNobody = 0xffff, kManyWarps = 0xfffe;
constexpr uint16_t kManyLanes = 0x8000;  // + the warp

// Whether what `thread` did at `time` has happened for the running thread.
bool happened(uint16_t thread, uint32_t time);

// A copy of what the running thread knows of its block.
struct Knowledge {
  int thread;
  uint32_t now, last_barrier, synced;
  std::array<uint32_t, 32> synced_lanes;  // of its warp
};
Knowledge knowledge();
bool happened_for(const Knowledge& known, uint16_t thread, uint32_t time);

// A name for the running thread and `thread`, which did the same at `time`: the running thread
// alone if that has happened, else both, as narrowly as one name can.
uint16_t joined(uint16_t thread, uint32_t time);

uint32_t now();
void pass_time();
std::string name_of(uint16_t thread);

// Whether the running thread, or a thread that it has synchronised with, has waited for the kernel
// ahead.
bool knows_of_previous_kernel();

// Whether a kernel is running, not its launcher.
bool is_in_kernel();

// Shared memory of the running block, and the stack of the running thread.
constexpr size_t kStackBytes = 256 * 1024;
struct OwnMemory {
  uintptr_t stack = 0, shared = 0;
  size_t shared_bytes = 0;
};
extern OwnMemory own_memory;
inline bool is_own_memory(const void* address) {
  const auto at = reinterpret_cast<uintptr_t>(address);
  return at - own_memory.stack < kStackBytes || at - own_memory.shared < own_memory.shared_bytes;
}

}  // namespace emulator
#pragma GCC visibility pop
