// Work that a captured graph does only when a flag on the device says so: the body of an IF node.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch.h"

namespace eecore::cuda {

// Ends what `stream` has captured so far with an IF node; until end(), what is launched on
// body_stream() becomes its body. Bodies nest. (CUDA 12.4's conditional nodes, through the stream
// capture of a CUDA 13 runtime.)
//
//   launch accept_mask on stream                          // writes the flag
//   ConditionalBody deeper(stream, all_accepted, false);
//   launch the next layers on deeper.body_stream()
//   deeper.end();
//   launch what follows in any case on stream
class ConditionalBody {
 public:
  // The body runs where (*flag != 0) == when at the time that the graph comes there; `flag` is on
  // the device. Throws, and leaves the capture as it was or invalid, if `stream` is not captured.
  ConditionalBody(Stream stream, const uint8_t* flag, bool when);
  // A capture that end() has not closed is given up, and its body with it.
  ~ConditionalBody();
  ConditionalBody(const ConditionalBody&) = delete;
  ConditionalBody& operator=(const ConditionalBody&) = delete;

  Stream body_stream() const { return {body_, device_}; }
  void end();

 private:
  cudaGraph_t capture_if_node(Stream stream, const uint8_t* flag, bool when);

  int device_;
  cudaStream_t body_ = nullptr;
  bool open_ = false;
};

}  // namespace eecore::cuda
