// Work that a captured graph does only when a flag on the device says so: the body of an IF node.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "launch.h"

namespace eecore::cuda {

// Of an IF node that is to come in the graph that `stream` is captured into: what kernels launched
// before it set, and it asks. It must get a node. Throws if `stream` is not captured.
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
// One stream for all bodies: an allocator that keeps its blocks by stream, and a library that has a
// workspace for each, see one. So the capture ends here and goes on in the graph of the body, and
// behind the node when the body ends.
class ConditionalBody {
 public:
  // The body runs where (*flag != 0) == when at the time that the graph comes there; `flag` is on
  // the device. Throws, and leaves the capture as it was or given up, if `stream` is not captured.
  ConditionalBody(Stream stream, const uint8_t* flag, bool when);
  // The body runs where a kernel has set `condition` to 1: one that was captured behind
  // make_condition, in the graph that is captured now.
  ConditionalBody(Stream stream, cudaGraphConditionalHandle condition);
  // A body that end() has not closed is given up; the capture around it goes on.
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
  unsigned long long around_id_ = 0, capture_id_ = 0;  // of the captures around and of the body
  bool open_ = false;
};

// Loads what ConditionalBody launches, which a capture must not do.
void load_condition_kernel(int device);

}  // namespace eecore::cuda
