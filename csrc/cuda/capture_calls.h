// The calls about stream capture whose signatures CUDA 13 changed; since CUDA 12.4 they are
// available under names with a version.
#pragma once

#include <cuda_runtime_api.h>

namespace eecore::cuda {

// The capture of a stream, and the nodes that the next node will depend on.
struct Capture {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;  // unique to this capture
  cudaGraph_t graph = nullptr;
  const cudaGraphNode_t* dependencies = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t num_dependencies = 0;
};

inline cudaError_t get_capture(cudaStream_t stream, Capture* capture) {
#if CUDART_VERSION >= 13000
  return cudaStreamGetCaptureInfo(stream, &capture->status, &capture->id, &capture->graph,
                                  &capture->dependencies, &capture->edges,
                                  &capture->num_dependencies);
#else
  return cudaStreamGetCaptureInfo_v3(stream, &capture->status, &capture->id, &capture->graph,
                                     &capture->dependencies, &capture->edges,
                                     &capture->num_dependencies);
#endif
}

// Adds a node after those that `capture` depends on.
inline cudaError_t add_node(const Capture& capture, cudaGraphNodeParams* params,
                            cudaGraphNode_t* node) {
#if CUDART_VERSION >= 13000
  return cudaGraphAddNode(node, capture.graph, capture.dependencies, capture.edges,
                          capture.num_dependencies, params);
#else
  return cudaGraphAddNode_v2(node, capture.graph, capture.dependencies, capture.edges,
                             capture.num_dependencies, params);
#endif
}

}  // namespace eecore::cuda
