#include <algorithm>
#include <mutex>
#include <vector>

#include "capture_calls.h"
#include "conditional_body.h"
#include "eecore/cuda_check.h"
#include "eecore/set_condition.cuh"
#include "launch.cuh"

namespace eecore::cuda {
namespace {

cudaStream_t handle_of(Stream stream) { return static_cast<cudaStream_t>(stream.handle); }

Capture capture_of(Stream stream) {
  Capture capture;
  check_cuda(get_capture(handle_of(stream), &capture), "cudaStreamGetCaptureInfo");
  if (capture.status != cudaStreamCaptureStatusActive) {
    throw std::runtime_error(
        std::string("a conditional body: expected a stream that is being captured, got one that ") +
        (capture.status == cudaStreamCaptureStatusNone ? "is not"
                                                       : "was until its capture failed"));
  }
  return capture;
}

// Relaxed: the caching allocator of a framework may ask the driver for memory meanwhile.
cudaError_t capture_into(Stream stream, cudaGraph_t graph, const cudaGraphNode_t* after) {
  return cudaStreamBeginCaptureToGraph(handle_of(stream), graph, after, nullptr,
                                       after == nullptr ? 0 : 1, cudaStreamCaptureModeRelaxed);
}

// Captures a kernel that sets a condition from a flag.
cudaGraphConditionalHandle condition_of(Stream stream, const uint8_t* flag, bool when) {
  const cudaGraphConditionalHandle condition = make_condition(stream);
  launch("set_condition", set_condition_kernel, {dim3(1), dim3(1)}, stream, condition, flag, when);
  return condition;
}

// The open bodies. After an inner body ends, the outer capture has a new id, which the outer body
// gets through this list.
std::vector<ConditionalBody*> open_bodies;
std::mutex open_bodies_mutex;

}  // namespace

void load_condition_kernel(int device) {
  DeviceGuard guard(device);
  cudaFuncAttributes unused{};
  check_cuda(cudaFuncGetAttributes(&unused, reinterpret_cast<const void*>(set_condition_kernel)),
             "cudaFuncGetAttributes of set_condition");
}

cudaGraphConditionalHandle make_condition(Stream stream) {
  DeviceGuard guard(stream.device);
  cudaGraphConditionalHandle condition{};
  check_cuda(cudaGraphConditionalHandleCreate(&condition, capture_of(stream).graph, 0,
                                              cudaGraphCondAssignDefault),
             "cudaGraphConditionalHandleCreate");
  return condition;
}

ConditionalBody::ConditionalBody(Stream stream, const uint8_t* flag, bool when)
    : ConditionalBody(stream, condition_of(stream, flag, when)) {}

ConditionalBody::ConditionalBody(Stream stream, cudaGraphConditionalHandle condition)
    : stream_(stream) {
  DeviceGuard guard(stream.device);
  capture_if_node(condition);
  around_id_ = capture_of(stream).id;
  check_cuda(cudaStreamEndCapture(handle_of(stream), &around_),
             "cudaStreamEndCapture before a conditional body");
  check_cuda(capture_into(stream, body_, nullptr), "cudaStreamBeginCaptureToGraph");
  capture_id_ = capture_of(stream).id;
  open_ = true;
  const std::lock_guard lock(open_bodies_mutex);
  open_bodies.push_back(this);
}

ConditionalBody::~ConditionalBody() {
  if (!open_) return;
  close();
  if (is_captured()) go_on_around();
}

void ConditionalBody::close() {
  open_ = false;
  const std::lock_guard lock(open_bodies_mutex);
  open_bodies.erase(std::find(open_bodies.begin(), open_bodies.end(), this));
}

void ConditionalBody::end() {
  if (!open_)
    throw std::runtime_error("a conditional body: expected one that is open, got a second end()");
  close();
  DeviceGuard guard(stream_.device);
  if (!is_captured()) {
    throw std::runtime_error(
        "a conditional body: expected the bodies inside to have ended, and an open capture, got "
        "another capture of the stream or none");
  }
  check_cuda(go_on_around(), "the end of a conditional body");
}

// Whether the stream is still captured into this body.
bool ConditionalBody::is_captured() const {
  Capture capture;
  return get_capture(handle_of(stream_), &capture) == cudaSuccess &&
         capture.status != cudaStreamCaptureStatusNone && capture.id == capture_id_;
}

// Ends the body's capture, and captures the stream after the node.
cudaError_t ConditionalBody::go_on_around() {
  cudaGraph_t body = nullptr;
  cudaError_t status = cudaStreamEndCapture(handle_of(stream_), &body);
  if (status == cudaSuccess) status = capture_into(stream_, around_, &node_);
  Capture capture;
  if (status == cudaSuccess) status = get_capture(handle_of(stream_), &capture);
  if (status != cudaSuccess) return status;
  const std::lock_guard lock(open_bodies_mutex);
  for (ConditionalBody* other : open_bodies) {
    if (other->capture_id_ == around_id_) other->capture_id_ = capture.id;
  }
  return status;
}

// Adds the node after the work captured so far.
void ConditionalBody::capture_if_node(cudaGraphConditionalHandle condition) {
  cudaGraphNodeParams params{};
  params.type = cudaGraphNodeTypeConditional;
  params.conditional.handle = condition;
  params.conditional.type = cudaGraphCondTypeIf;
  params.conditional.size = 1;
  check_cuda(add_node(capture_of(stream_), &params, &node_), "cudaGraphAddNode of a condition");
  body_ = params.conditional.phGraph_out[0];
}

}  // namespace eecore::cuda
