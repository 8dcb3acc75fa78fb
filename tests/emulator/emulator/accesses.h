// Counts the 16-byte reads of launches from watched memory while a test asks for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace emulator {

struct LaunchConfig;

extern bool counts_accesses;

void count_global(const void* address, size_t bytes);

#define EMULATOR_INLINE inline __attribute__((always_inline))

EMULATOR_INLINE void touch_global(const void* address, size_t bytes) {
  if (counts_accesses) count_global(address, bytes);
}

// Called by launch() at its beginning.
void begin_counted_launch(const LaunchConfig& config);

// Counts launches from here on; no memory is watched. Off: drops the counts.
void count_accesses(bool on);
// Watches memory under a name: the bytes that each launch reads of it, and the distinct ones.
void watch(const std::string& name, const void* begin, size_t bytes);
// A JSON list of the launches since counting began.
std::string counted_launches();

}  // namespace emulator
