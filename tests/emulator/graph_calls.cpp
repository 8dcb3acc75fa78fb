// For the tests, through ctypes: captures on emulated streams, and conditional bodies in them.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "captured_graph.h"
#include "conditional_body.h"
#include "emulator/graph.h"
#include "emulator/machine.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

using eecore::cuda::CapturedGraph;
using eecore::cuda::ConditionalBody;

// Runs `work`; what it throws goes to `message`. Returns whether it threw.
template <typename Work>
int guarded(char* message, int message_size, const Work& work) {
  try {
    work();
    return 0;
  } catch (const std::exception& error) {
    const int length = std::min<int>(message_size - 1, static_cast<int>(std::strlen(error.what())));
    std::memcpy(message, error.what(), length);
    message[length] = '\0';
    return 1;
  }
}

}  // namespace

EXPORTED void* eecore_emulator_new_stream() {
  cudaStream_t stream = nullptr;
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  return stream;
}

EXPORTED void eecore_emulator_delete_stream(void* stream) { cudaStreamDestroy(stream); }

EXPORTED void* eecore_emulator_new_graph(void* stream, char* message, int message_size) {
  CapturedGraph* graph = nullptr;
  guarded(message, message_size, [&] { graph = new CapturedGraph({stream, 0}); });
  return graph;
}

EXPORTED int eecore_emulator_end_graph(void* graph, char* message, int message_size) {
  return guarded(message, message_size, [&] { static_cast<CapturedGraph*>(graph)->end(); });
}

EXPORTED int eecore_emulator_launch_graph(void* graph, void* stream, char* message,
                                          int message_size) {
  return guarded(message, message_size,
                 [&] { static_cast<CapturedGraph*>(graph)->launch({stream, 0}); });
}

EXPORTED void eecore_emulator_delete_graph(void* graph) {
  delete static_cast<CapturedGraph*>(graph);
}

EXPORTED void* eecore_emulator_new_body(void* stream, const uint8_t* flag, int when, char* message,
                                        int message_size) {
  ConditionalBody* body = nullptr;
  guarded(message, message_size, [&] { body = new ConditionalBody({stream, 0}, flag, when != 0); });
  return body;
}

EXPORTED void* eecore_emulator_new_body_of(void* stream, unsigned long long condition,
                                           char* message, int message_size) {
  ConditionalBody* body = nullptr;
  guarded(message, message_size, [&] { body = new ConditionalBody({stream, 0}, condition); });
  return body;
}

EXPORTED unsigned long long eecore_emulator_make_condition(void* stream, char* message,
                                                           int message_size) {
  unsigned long long condition = 0;
  guarded(message, message_size, [&] { condition = eecore::cuda::make_condition({stream, 0}); });
  return condition;
}

// What was captured since the last call, one kernel a line; as much as there is room for.
EXPORTED void eecore_emulator_take_captured(char* text, int size) {
  const std::string names = emulator::take_captured();
  text[names.copy(text, size - 1)] = '\0';
}

EXPORTED int eecore_emulator_end_body(void* body, char* message, int message_size) {
  return guarded(message, message_size, [&] { static_cast<ConditionalBody*>(body)->end(); });
}

EXPORTED void eecore_emulator_delete_body(void* body) {
  delete static_cast<ConditionalBody*>(body);
}
