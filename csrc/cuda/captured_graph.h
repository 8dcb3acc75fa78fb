// The work of a stream, captured once and launched many times.
#pragma once

#include <cuda_runtime.h>

#include "launch.h"

namespace eecore::cuda {

// The capture begins with the object. While the graph may be launched, the memory that its work
// reads and writes must not be freed; the caller keeps what is allocated during the capture.
class CapturedGraph {
 public:
  // Throws if `stream` is already being captured, or is the default stream.
  explicit CapturedGraph(Stream stream);
  // Discards a capture that end() has not closed.
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  // Closes the capture and makes it ready to launch.
  void end();
  // Returns at once; launches of one graph on one stream run one after the other.
  void launch(Stream stream) const;

 private:
  Stream captured_;
  bool open_ = false;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t ready_ = nullptr;
};

}  // namespace eecore::cuda
