#include "emulator/graph.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

struct EmulatedNode {
  cudaGraphNodeType type = cudaGraphNodeTypeKernel;
  std::set<const EmulatedNode*> behind;  // must have run
  std::function<void()> work;
};

struct EmulatedGraph {
  std::vector<std::unique_ptr<EmulatedNode>> nodes;
  std::vector<std::unique_ptr<EmulatedGraph>> bodies;
  std::vector<cudaGraph_t> body_of_node;  // what cudaConditionalNodeParams.phGraph_out points to
  bool is_body = false;
  int owners = 1;
  int open_captures = 0;  // streams that are being captured into it
};

struct EmulatedExec {
  cudaGraph_t graph;
};

struct EmulatedStream {
  cudaGraph_t graph = nullptr;  // into which it is being captured
  unsigned long long capture_id = 0;
  std::vector<cudaGraphNode_t> dependencies;
};

namespace {

struct Condition {
  cudaGraph_t graph = nullptr;  // in which its node is to be
  unsigned initial = 0, value = 0;
  bool has_node = false;
};

std::map<cudaGraphConditionalHandle, Condition> conditions;
std::mt19937_64 order;
std::string captured_names;
uint64_t launches = 0;

EmulatedStream* of(cudaStream_t stream) { return static_cast<EmulatedStream*>(stream); }

bool is_captured(cudaStream_t stream) { return stream != nullptr && of(stream)->graph != nullptr; }

bool has_open_body(const EmulatedGraph& graph) {
  return std::any_of(graph.bodies.begin(), graph.bodies.end(), [](const auto& body) {
    return body->open_captures > 0 || has_open_body(*body);
  });
}

// Runs every node after the nodes it depends on; among those that may run, chance decides.
void run(const EmulatedGraph& graph) {
  std::set<const EmulatedNode*> done;
  while (done.size() < graph.nodes.size()) {
    std::vector<const EmulatedNode*> ready;
    for (const auto& node : graph.nodes) {
      if (done.count(node.get()) == 0 &&
          std::all_of(node->behind.begin(), node->behind.end(),
                      [&](const EmulatedNode* other) { return done.count(other) > 0; })) {
        ready.push_back(node.get());
      }
    }
    const EmulatedNode* next = ready[order() % ready.size()];
    next->work();
    done.insert(next);
  }
}

}  // namespace

namespace emulator {

bool is_recorded(void* stream) { return is_captured(stream); }

bool follows_kernels(void* stream) {
  const auto& ahead = of(stream)->dependencies;
  return std::all_of(ahead.begin(), ahead.end(), [](const EmulatedNode* node) {
    return node->type == cudaGraphNodeTypeKernel;
  });
}

bool record(void* stream, const std::string& kernel, const std::function<void()>& work) {
  if (!is_captured(stream)) return false;
  captured_names += kernel + "\n";
  EmulatedStream& captured = *of(stream);
  auto node = std::make_unique<EmulatedNode>();
  node->behind.insert(captured.dependencies.begin(), captured.dependencies.end());
  node->work = work;
  captured.dependencies = {node.get()};
  captured.graph->nodes.push_back(std::move(node));
  return true;
}

std::string take_captured() { return std::exchange(captured_names, {}); }

void set_condition(unsigned long long handle, unsigned value) {
  conditions.at(handle).value = value;
}

}  // namespace emulator

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
  *stream = new EmulatedStream;
  return cudaSuccess;
}

cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete of(stream);
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph,
                                          const cudaGraphNode_t* dependencies,
                                          const cudaGraphEdgeData*, size_t num_dependencies,
                                          cudaStreamCaptureMode) {
  if (stream == nullptr || is_captured(stream) || graph == nullptr) return cudaErrorInvalidValue;
  static unsigned long long captures = 0;
  of(stream)->capture_id = ++captures;
  of(stream)->graph = graph;
  of(stream)->dependencies.assign(dependencies, dependencies + num_dependencies);
  ++graph->open_captures;
  return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = nullptr;
  if (!is_captured(stream)) return cudaErrorInvalidValue;
  const cudaGraph_t captured = of(stream)->graph;
  of(stream)->graph = nullptr;
  of(stream)->dependencies.clear();
  --captured->open_captures;
  // A GPU returns cudaErrorStreamCaptureUnjoined. The graph stays for captures of its bodies.
  if (has_open_body(*captured)) return cudaErrorInvalidValue;
  *graph = captured;
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* graph,
                                     const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* num_dependencies) {
  *status = is_captured(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  if (!is_captured(stream)) return cudaSuccess;
  *id = of(stream)->capture_id;
  *graph = of(stream)->graph;
  *dependencies = of(stream)->dependencies.data();
  *edges = nullptr;
  *num_dependencies = of(stream)->dependencies.size();
  return cudaSuccess;
}

cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle* handle, cudaGraph_t graph,
                                             unsigned initial, unsigned flags) {
  if (graph == nullptr || flags != cudaGraphCondAssignDefault) return cudaErrorInvalidValue;
  *handle = conditions.size() + 1;
  conditions[*handle].graph = graph;
  conditions[*handle].initial = initial;
  return cudaSuccess;
}

cudaError_t cudaGraphAddNode(cudaGraphNode_t* node, cudaGraph_t graph,
                             const cudaGraphNode_t* dependencies, const cudaGraphEdgeData*,
                             size_t num_dependencies, cudaGraphNodeParams* params) {
  const auto handle = params->conditional.handle;
  const auto known = conditions.find(handle);
  if (params->type != cudaGraphNodeTypeConditional || params->conditional.size != 1 ||
      params->conditional.type != cudaGraphCondTypeIf || known == conditions.end() ||
      known->second.graph != graph || known->second.has_node) {
    return cudaErrorInvalidValue;
  }
  known->second.has_node = true;
  captured_names += "if\n";
  graph->bodies.push_back(std::make_unique<EmulatedGraph>());
  EmulatedGraph* body = graph->bodies.back().get();
  body->is_body = true;
  body->body_of_node = {body};
  params->conditional.phGraph_out = body->body_of_node.data();
  graph->nodes.push_back(std::make_unique<EmulatedNode>());
  *node = graph->nodes.back().get();
  (*node)->type = params->type;
  (*node)->behind.insert(dependencies, dependencies + num_dependencies);
  (*node)->work = [handle, body] {
    if (conditions.at(handle).value != 0) run(*body);
  };
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t* exec, cudaGraph_t graph, unsigned long long) {
  if (graph == nullptr || graph->is_body) return cudaErrorInvalidValue;
  ++graph->owners;
  *exec = new EmulatedExec{graph};
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, cudaGraphNodeType* type) {
  *type = node->type;
  return cudaSuccess;
}

cudaError_t cudaGraphCreate(cudaGraph_t* graph, unsigned) {
  *graph = new EmulatedGraph;
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  if (graph != nullptr && --graph->owners == 0) delete graph;
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream) {
  if (is_captured(stream)) return cudaErrorInvalidValue;
  for (auto& [handle, condition] : conditions) condition.value = condition.initial;
  order.seed(emulator::seed() * 1000003 + launches++);
  run(*exec->graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec) {
  cudaGraphDestroy(exec->graph);
  delete exec;
  return cudaSuccess;
}
