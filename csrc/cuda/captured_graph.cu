#include "captured_graph.h"
#include "eecore/cuda_check.h"
#include "launch.cuh"

namespace eecore::cuda {

CapturedGraph::CapturedGraph(Stream stream) : captured_(stream) {
  DeviceGuard guard(stream.device);
  // Relaxed: the caching allocator of a framework may ask the driver for memory meanwhile.
  check_cuda(cudaStreamBeginCapture(static_cast<cudaStream_t>(stream.handle),
                                    cudaStreamCaptureModeRelaxed),
             "cudaStreamBeginCapture");
  open_ = true;
}

CapturedGraph::~CapturedGraph() {
  if (open_) {
    cudaGraph_t unused = nullptr;
    cudaStreamEndCapture(static_cast<cudaStream_t>(captured_.handle), &unused);
    if (unused != nullptr) cudaGraphDestroy(unused);
  }
  if (ready_ != nullptr) cudaGraphExecDestroy(ready_);
}

void CapturedGraph::end() {
  if (!open_) {
    throw std::runtime_error("a captured graph: expected an open capture, got its second end");
  }
  open_ = false;
  DeviceGuard guard(captured_.device);
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(static_cast<cudaStream_t>(captured_.handle), &graph),
             "cudaStreamEndCapture");
  const cudaError_t status = cudaGraphInstantiate(&ready_, graph, 0);
  cudaGraphDestroy(graph);
  check_cuda(status, "cudaGraphInstantiate");
}

void CapturedGraph::launch(Stream stream) const {
  if (ready_ == nullptr) {
    throw std::runtime_error(
        "a captured graph: expected one whose capture has ended, got one that "
        "is open or has failed");
  }
  DeviceGuard guard(stream.device);
  check_cuda(cudaGraphLaunch(ready_, static_cast<cudaStream_t>(stream.handle)), "cudaGraphLaunch");
}

}  // namespace eecore::cuda
