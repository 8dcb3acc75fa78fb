// Work that a captured graph does only if a flag on the device says so: the body of an IF node.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch.h"

namespace eecore::cuda {

// Makes the condition of a later IF node in the graph that `stream` is captured into; kernels
// launched before the node set it. A node must use it. Throws if `stream` is not captured.
cudaGraphConditionalHandle make_condition(Stream stream);

// Ends what `stream` has captured so far with an IF node; until end(), what is launched on it
// becomes the node's body. Bodies nest. (The conditional nodes of CUDA 12.4.)
//
//   launch accept_mask on stream                          // writes the flag
//   ConditionalBody deeper(stream, all_accepted, false);
//   launch the next layers on stream
//   deeper.end();
//   launch what follows in any case on stream
//
// All bodies use one stream, so that an allocator that keeps blocks by stream, and a library with a
// workspace per stream, see only one. The capture therefore ends here, continues in the graph of
// the body, and after the node when the body ends.
class ConditionalBody {
 public:
  // The body runs if (*flag != 0) == when at the time that the graph reaches it; `flag` is on the
  // device. Throws if `stream` is not captured; the capture is then unchanged or discarded.
  ConditionalBody(Stream stream, const uint8_t* flag, bool when);
  // The body runs if a kernel has set `condition` to 1; that kernel was captured after
  // make_condition, in the current graph.
  ConditionalBody(Stream stream, cudaGraphConditionalHandle condition);
  // Discards a body that end() has not closed; the capture around it continues.
  ~ConditionalBody();
  ConditionalBody(const ConditionalBody&) = delete;
  ConditionalBody& operator=(const ConditionalBody&) = delete;

  void end();

 private:
  void capture_if_node(cudaGraphConditionalHandle condition);
  bool is_captured() const;
  cudaError_t go_on_around();
  void close();

  Stream stream_;
  cudaGraph_t around_ = nullptr, body_ = nullptr;
  cudaGraphNode_t node_ = nullptr;
  unsigned long long around_id_ = 0, capture_id_ = 0;  // of the outer capture and of the body's
  bool open_ = false;
};

// Loads the kernel that ConditionalBody launches, which is not possible during a capture.
void load_condition_kernel(int device);

}  // namespace eecore::cuda
