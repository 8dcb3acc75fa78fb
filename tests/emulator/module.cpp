// What the emulated build of the CUDA ops needs beside their sources.
#include <cstdint>

#include "emulator/machine.h"

// torch's current stream: the emulator has one.
extern "C" __attribute__((visibility("default"))) int32_t
aoti_torch_get_current_cuda_stream(int32_t, void** stream) {
  *stream = nullptr;
  return 0;
}

extern "C" __attribute__((visibility("default"))) void eecore_emulator_set_seed(uint64_t seed) {
  emulator::set_seed(seed);
}
