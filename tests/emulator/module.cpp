// What the emulated build of the CUDA ops needs beside their sources.
#include <cstdint>
#include <string>

#include "emulator/machine.h"

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
