// What the emulated build of the CUDA ops needs beside their sources.
#include <algorithm>
#include <cstdint>
#include <string>

#include "emulator/accesses.h"
#include "emulator/machine.h"
#include "emulator/races.h"

namespace {
void* current_stream = nullptr;  // null runs at once
}  // namespace

// torch's current stream.
extern "C" __attribute__((visibility("default"))) int32_t
aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = current_stream;
  return 0;
}

extern "C" __attribute__((visibility("default"))) void eecore_emulator_use_stream(void* stream) {
  current_stream = stream;
}

extern "C" __attribute__((visibility("default"))) uint64_t eecore_emulator_early_copies() {
  return emulator::early_copies();
}

extern "C" __attribute__((visibility("default"))) void eecore_emulator_keep_names() {
  emulator::keep_names();
}

extern "C" __attribute__((visibility("default"))) const char* eecore_emulator_kept_names() {
  static std::string names;
  names = emulator::kept_names();
  return names.c_str();
}

extern "C" __attribute__((visibility("default"))) void eecore_emulator_set_seed(uint64_t seed) {
  emulator::set_seed(seed);
}

extern "C" __attribute__((visibility("default"))) void eecore_emulator_count_accesses(int on) {
  emulator::count_accesses(on != 0);
}

extern "C" __attribute__((visibility("default"))) void eecore_emulator_check_races(int on) {
  emulator::check_races(on != 0);
}

extern "C" __attribute__((visibility("default"))) void eecore_emulator_launch_foreign() {
  emulator::launch_foreign();
}

extern "C" __attribute__((visibility("default"))) uint64_t eecore_emulator_num_checked() {
  return emulator::num_checked();
}

extern "C" __attribute__((visibility("default"))) void eecore_emulator_watch(const char* name,
                                                                             const void* begin,
                                                                             uint64_t bytes) {
  emulator::watch(name, begin, bytes);
}

// The length of the list; as much of it as fits goes to `out`.
extern "C" __attribute__((visibility("default"))) uint64_t
eecore_emulator_counted_launches(char* out, uint64_t size) {
  const std::string text = emulator::counted_launches();
  if (size > 0) out[text.copy(out, std::min<uint64_t>(text.size(), size - 1))] = 0;
  return text.size();
}
