// What a stream is asked to do, captured once and launched many times.
#pragma once

#include <cuda_runtime.h>

#include "launch.h"

namespace eecore::cuda {

// The capture begins with the object. Between its launches nothing of what the captured work reads
// and writes may be freed; what it allocates meanwhile is for the caller to keep.
class CapturedGraph {
 public:
  // Throws if `stream` is being captured already, or is the default stream.
  explicit CapturedGraph(Stream stream);
  // A capture that end() has not closed is given up.
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
