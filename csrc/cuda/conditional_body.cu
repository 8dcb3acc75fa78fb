#include "conditional_body.h"
#include "eecore/cuda_check.h"
#include "eecore/set_condition.cuh"
#include "launch.cuh"

namespace eecore::cuda {
namespace {

// The graph that a stream is captured into, and the nodes that its next one will depend on.
struct Capture {
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* dependencies = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t num_dependencies = 0;
};

Capture capture_of(Stream stream) {
  Capture capture;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamGetCaptureInfo(static_cast<cudaStream_t>(stream.handle), &status, nullptr,
                                      &capture.graph, &capture.dependencies, &capture.edges,
                                      &capture.num_dependencies),
             "cudaStreamGetCaptureInfo");
  if (status != cudaStreamCaptureStatusActive) {
    throw std::runtime_error(
        std::string("a conditional body: expected a stream that is being captured, got one that ") +
        (status == cudaStreamCaptureStatusNone ? "is not" : "was until its capture failed"));
  }
  return capture;
}

}  // namespace

ConditionalBody::ConditionalBody(Stream stream, const uint8_t* flag, bool when)
    : device_(stream.device) {
  DeviceGuard guard(device_);
  const cudaGraph_t body = capture_if_node(stream, flag, when);
  check_cuda(cudaStreamCreateWithFlags(&body_, cudaStreamNonBlocking), "cudaStreamCreate");
  // Relaxed: the caching allocator of a framework may ask the driver for memory meanwhile.
  const cudaError_t begun =
      cudaStreamBeginCaptureToGraph(body_, body, nullptr, nullptr, 0, cudaStreamCaptureModeRelaxed);
  if (begun != cudaSuccess) cudaStreamDestroy(body_);
  check_cuda(begun, "cudaStreamBeginCaptureToGraph");
  open_ = true;
}

ConditionalBody::~ConditionalBody() {
  if (open_) {
    cudaGraph_t unused = nullptr;
    cudaStreamEndCapture(body_, &unused);
  }
  if (body_ != nullptr) cudaStreamDestroy(body_);
}

void ConditionalBody::end() {
  if (!open_)
    throw std::runtime_error("a conditional body: expected one that is open, got its second end");
  open_ = false;
  DeviceGuard guard(device_);
  cudaGraph_t body = nullptr;
  check_cuda(cudaStreamEndCapture(body_, &body), "cudaStreamEndCapture of a conditional body");
}

// Captures the kernel that sets the condition and the node behind it; returns the node's body.
cudaGraph_t ConditionalBody::capture_if_node(Stream stream, const uint8_t* flag, bool when) {
  cudaGraphConditionalHandle handle{};
  check_cuda(cudaGraphConditionalHandleCreate(&handle, capture_of(stream).graph, 0,
                                              cudaGraphCondAssignDefault),
             "cudaGraphConditionalHandleCreate");
  launch("set_condition", set_condition_kernel, {dim3(1), dim3(1)}, stream, handle, flag, when);

  const Capture behind = capture_of(stream);
  cudaGraphNodeParams params{};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = handle;
  params.conditional.type = cudaGraphCondTypeIf;
  params.conditional.size = 1;
  cudaGraphNode_t node = nullptr;
  check_cuda(cudaGraphAddNode(&node, behind.graph, behind.dependencies, behind.edges,
                              behind.num_dependencies, &params),
             "cudaGraphAddNode of a condition");
  check_cuda(cudaStreamUpdateCaptureDependencies(static_cast<cudaStream_t>(stream.handle), &node,
                                                 nullptr, 1, cudaStreamSetCaptureDependencies),
             "cudaStreamUpdateCaptureDependencies");
  return params.conditional.phGraph_out[0];
}

}  // namespace eecore::cuda
