#include "captured_graph.h"
#include "conditional_body.h"
#include "eecore/cuda_check.h"
#include "launch.cuh"

namespace eecore::cuda {

CapturedGraph::CapturedGraph(Stream stream) : captured_(stream) {
  DeviceGuard guard(stream.device);
  load_condition_kernel(stream.device);
  check_cuda(cudaGraphCreate(&graph_, 0), "cudaGraphCreate");
  // Relaxed: the caching allocator of a framework may ask the driver for memory meanwhile.
  const cudaError_t begun =
      cudaStreamBeginCaptureToGraph(static_cast<cudaStream_t>(stream.handle), graph_, nullptr,
                                    nullptr, 0, cudaStreamCaptureModeRelaxed);
  if (begun != cudaSuccess) cudaGraphDestroy(graph_);
  check_cuda(begun, "cudaStreamBeginCaptureToGraph");
  open_ = true;
}

CapturedGraph::~CapturedGraph() {
  if (open_) {
    cudaGraph_t unused = nullptr;  // this graph, or the graph of an open body in it
    cudaStreamEndCapture(static_cast<cudaStream_t>(captured_.handle), &unused);
  }
  if (ready_ != nullptr) cudaGraphExecDestroy(ready_);
  cudaGraphDestroy(graph_);
}

void CapturedGraph::end() {
  if (!open_) {
    throw std::runtime_error("a captured graph: expected an open capture, got a second end()");
  }
  open_ = false;
  DeviceGuard guard(captured_.device);
  cudaGraph_t graph = nullptr;
  check_cuda(cudaStreamEndCapture(static_cast<cudaStream_t>(captured_.handle), &graph),
             "cudaStreamEndCapture");
  if (graph != graph_) {
    throw std::runtime_error(
        "a captured graph: expected its conditional bodies to have ended, got an open one");
  }
  check_cuda(cudaGraphInstantiate(&ready_, graph_, 0), "cudaGraphInstantiate");
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
