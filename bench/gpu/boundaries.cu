// What the boundary between two kernels costs on this GPU, in ten seconds.
//
// Chains of dependent kernels (in order; programmatic, with the trigger after and ahead of the
// wait) in a graph and in the body of an IF node; what cudaGraphLaunch costs the host, idle and
// after a launch that still runs; grid barriers and flags in data of a persistent kernel; cluster
// barriers.
//
//   nvcc -O3 -std=c++17 -gencode arch=compute_90a,code=sm_90a bench/gpu/boundaries.cu -o boundaries
#include <cooperative_groups.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#define CHECK(x) \
  do { \
    cudaError_t e_ = (x); \
    if (e_ != cudaSuccess) { \
      printf("%s:%d %s: %s\n", __FILE__, __LINE__, #x, cudaGetErrorString(e_)); \
      exit(1); \
    } \
  } while (0)

constexpr int kSize = 576, kThreads = 256;
enum Order { kInOrder, kLate, kEarly };  // plain; trigger after the wait; trigger ahead of it
enum Work {
  kNothing,
  kNorm
};  // one load and a store; a row is read, its squares summed in the block, written

__device__ __forceinline__ void wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void trigger() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

__device__ __forceinline__ float work(int what, const float* in) {
  if (what == kNothing) return __ldcg(in);
  __shared__ float parts[8];
  float sum = 0.f;
  for (int i = threadIdx.x; i < kSize; i += kThreads) {
    float v = __ldcg(in + i);
    sum = fmaf(v, v, sum);
  }
  for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  __syncthreads();
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
  __syncthreads();
  sum = 0.f;
  for (int w = 0; w < 8; ++w) sum += parts[w];
  return 1.f / sqrtf(sum / kSize + 1e-5f);
}

__global__ void __launch_bounds__(kThreads) link(int order, int what, const float* in, float* out) {
  if (order == kEarly) trigger();
  if (order != kInOrder) wait();
  if (order == kLate) trigger();
  const float r = work(what, in);
  const int i = blockIdx.x * kThreads + threadIdx.x;
  if (i < kSize) out[i] = r;
}
__global__ void set(cudaGraphConditionalHandle h, unsigned v) { cudaGraphSetConditional(h, v); }

cudaStream_t stream;
float* rows[2];

void launch(Order order, Work what, int grid, int turn, bool first) {
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = kThreads, config.stream = stream;
  cudaLaunchAttribute a{};
  a.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a.val.programmaticStreamSerializationAllowed = 1;
  if (order != kInOrder && !first) config.attrs = &a, config.numAttrs = 1;
  CHECK(cudaLaunchKernelEx(&config, link, (int)order, (int)what, (const float*)rows[turn % 2],
                           rows[(turn + 1) % 2]));
}

// A graph of `outside` kernels, then an IF node with `inside` kernels in its body (none: no node).
cudaGraphExec_t make(Order order, Work what, int grid, int outside, int inside, bool taken) {
  cudaGraph_t graph, got;
  CHECK(cudaGraphCreate(&graph, 0));
  CHECK(cudaStreamBeginCaptureToGraph(stream, graph, nullptr, nullptr, 0,
                                      cudaStreamCaptureModeRelaxed));
  for (int i = 0; i < outside; ++i) launch(order, what, grid, i, i == 0);
  if (inside > 0) {
    cudaGraphConditionalHandle h;
    CHECK(cudaGraphConditionalHandleCreate(&h, graph, 0, cudaGraphCondAssignDefault));
    set<<<1, 1, 0, stream>>>(h, taken);
    cudaStreamCaptureStatus s;
    cudaGraph_t g;
    const cudaGraphNode_t* deps;
    const cudaGraphEdgeData* edges;
    size_t n;
    CHECK(cudaStreamGetCaptureInfo(stream, &s, nullptr, &g, &deps, &edges, &n));
    cudaGraphNodeParams p{};
    p.type = cudaGraphNodeTypeConditional, p.conditional.handle = h,
    p.conditional.type = cudaGraphCondTypeIf, p.conditional.size = 1;
    cudaGraphNode_t node;
    CHECK(cudaGraphAddNode(&node, g, deps, edges, n, &p));
    CHECK(cudaStreamEndCapture(stream, &got));
    CHECK(cudaStreamBeginCaptureToGraph(stream, p.conditional.phGraph_out[0], nullptr, nullptr, 0,
                                        cudaStreamCaptureModeRelaxed));
    for (int i = 0; i < inside; ++i) launch(order, what, grid, i, i == 0);
    CHECK(cudaStreamEndCapture(stream, &got));
    CHECK(cudaStreamBeginCaptureToGraph(stream, graph, &node, nullptr, 1,
                                        cudaStreamCaptureModeRelaxed));
    launch(order, what, grid, 0, true);
  }
  CHECK(cudaStreamEndCapture(stream, &got));
  cudaGraphExec_t exec;
  CHECK(cudaGraphInstantiate(&exec, graph, 0));
  return exec;
}

double gpu_us(const std::function<void()>& run, int times) {
  cudaEvent_t a, b;
  CHECK(cudaEventCreate(&a));
  CHECK(cudaEventCreate(&b));
  std::vector<float> ms;
  for (int round = 0; round < 9; ++round) {
    CHECK(cudaEventRecord(a, stream));
    for (int i = 0; i < times; ++i) run();
    CHECK(cudaEventRecord(b, stream));
    CHECK(cudaEventSynchronize(b));
    float t;
    CHECK(cudaEventElapsedTime(&t, a, b));
    ms.push_back(t);
  }
  std::sort(ms.begin(), ms.end());
  return ms[ms.size() / 2] * 1e3 / times;
}
using Clock = std::chrono::steady_clock;
double since(Clock::time_point t) {
  return std::chrono::duration<double, std::micro>(Clock::now() - t).count();
}

// ---- Persistent: every block has a stage's row; stages are ordered by a barrier of the grid, or
// by flags in data ----
__device__ __forceinline__ void grid_barrier(unsigned* counter, unsigned target) {
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
    unsigned seen;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
    while (seen < target);
  }
  __syncthreads();
}
__global__ void __launch_bounds__(kThreads)
    stages_by_barrier(int what, int stages, unsigned* counter, float* a, float* b) {
  for (int s = 0; s < stages; ++s) {
    const float r = work(what, s % 2 ? b : a);
    const int i = blockIdx.x * kThreads + threadIdx.x;
    if (i < kSize) (s % 2 ? a : b)[i] = r;
    grid_barrier(counter, (s + 1) * gridDim.x);
  }
}
// A number and its stage in one word of 8 bytes, which is written and read whole: no barrier, no
// fence. Two buffers: a block that writes stage s + 2 has read all of stage s + 1, which each wrote
// after its reads of s.
__global__ void __launch_bounds__(kThreads)
    stages_by_flags(int stages, unsigned first, unsigned long long* words) {
  __shared__ float parts[8];
  for (int s = 0; s < stages; ++s) {
    const volatile unsigned long long* in = words + (s % 2) * kSize;
    float sum = 0.f;
    for (int i = threadIdx.x; i < kSize; i += kThreads) {
      unsigned long long w;
      do w = in[i];
      while ((int)((unsigned)(w >> 32) - (first + s)) <
             0);  // newer: a block that writes nothing may lag
      const float v = __uint_as_float((unsigned)w);
      sum = fmaf(v, v, sum);
    }
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0.f;
    for (int w = 0; w < 8; ++w) sum += parts[w];
    const float r = 1.f / sqrtf(sum / kSize + 1e-5f);
    const int per = (kSize + gridDim.x - 1) / gridDim.x, i = blockIdx.x * per + threadIdx.x;
    if (threadIdx.x < per && i < kSize) {
      volatile unsigned long long* out = words + ((s + 1) % 2) * kSize;
      out[i] = (unsigned long long)(first + s + 1) << 32 | __float_as_uint(r);
    }
  }
}
__global__ void fill(unsigned long long* words, unsigned first) {
  for (int i = threadIdx.x; i < 2 * kSize; i += blockDim.x)
    words[i] = (unsigned long long)(i < kSize ? first : 0) << 32 | __float_as_uint(1.f);
}
__global__ void __launch_bounds__(kThreads) stages_in_cluster(int stages, float* out) {
  namespace cg = cooperative_groups;
  cg::cluster_group cluster = cg::this_cluster();
  __shared__ float mine[2][kThreads];
  float v = threadIdx.x;
  for (int s = 0; s < stages; ++s) {
    mine[s % 2][threadIdx.x] = v;
    cluster.sync();
    const float* other =
        cluster.map_shared_rank(mine[s % 2], (cluster.block_rank() + 1) % cluster.num_blocks());
    v = other[threadIdx.x] * 0.5f;
  }
  cluster.sync();
  out[blockIdx.x * kThreads + threadIdx.x] = v;
}

int main() {
  cudaDeviceProp prop;
  CHECK(cudaGetDeviceProperties(&prop, 0));
  printf("%s, %d multiprocessors\n", prop.name, prop.multiProcessorCount);
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (float*& r : rows) {
    CHECK(cudaMalloc(&r, 1 << 20));
    CHECK(cudaMemset(r, 1, 1 << 20));
  }
  link<<<1, kThreads, 0, stream>>>(kInOrder, kNorm, rows[0], rows[1]);
  CHECK(cudaStreamSynchronize(stream));
  const char* orders[] = {"in order", "trigger after the wait", "trigger ahead of the wait"};
  const char* works[] = {"a load and a store", "a row normed"};
  const int n = 200;
  printf("-- us a kernel, chains of %d\n", n);
  for (int what = 0; what < 2; ++what)
    for (int grid : {1, 60, 132, 264})
      for (int o = 0; o < 3; ++o) {
        cudaGraphExec_t plain = make((Order)o, (Work)what, grid, n, 0, false);
        cudaGraphExec_t body = make((Order)o, (Work)what, grid, 1, n, true);
        const double p = gpu_us([&] { CHECK(cudaGraphLaunch(plain, stream)); }, 5) / n;
        const double b = gpu_us([&] { CHECK(cudaGraphLaunch(body, stream)); }, 5) / n;
        printf("%-20s %3d blocks, %-26s graph %.2f   body of an IF node %.2f\n", works[what], grid,
               orders[o], p, b);
        CHECK(cudaGraphExecDestroy(plain));
        CHECK(cudaGraphExecDestroy(body));
      }
  printf("-- us a graph of 79 kernels, then 75 (SmolLM2's halves), 60 blocks, late trigger\n");
  {
    cudaGraphExec_t all = make(kLate, kNorm, 60, 154, 0, false),
                    taken = make(kLate, kNorm, 60, 79, 75, true),
                    passed = make(kLate, kNorm, 60, 79, 75, false);
    printf("one graph %.1f, body taken %.1f, passed over %.1f\n",
           gpu_us([&] { cudaGraphLaunch(all, stream); }, 10),
           gpu_us([&] { cudaGraphLaunch(taken, stream); }, 10),
           gpu_us([&] { cudaGraphLaunch(passed, stream); }, 10));
    printf(
        "-- us of the host in cudaGraphLaunch: idle, and after a launch that still runs (median of "
        "50)\n");
    for (auto& [name, exec] : {std::pair<const char*, cudaGraphExec_t>{"one graph", all},
                               {"body taken", taken},
                               {"passed over", passed}}) {
      std::vector<double> idle, busy, whole;
      for (int i = 0; i < 50; ++i) {
        CHECK(cudaStreamSynchronize(stream));
        auto t = Clock::now();
        CHECK(cudaGraphLaunch(exec, stream));
        idle.push_back(since(t));
        t = Clock::now();
        CHECK(cudaGraphLaunch(exec, stream));
        busy.push_back(since(t));
        CHECK(cudaStreamSynchronize(stream));
        whole.push_back(since(t));
      }
      for (auto* v : {&idle, &busy, &whole}) std::sort(v->begin(), v->end());
      printf("%-12s idle %.1f   after a running one %.1f (both done %.1f later)\n", name, idle[25],
             busy[25], whole[25]);
    }
  }
  printf("-- us a stage of a persistent kernel\n");
  unsigned* counter;
  unsigned long long* words;
  CHECK(cudaMalloc(&counter, 4));
  CHECK(cudaMalloc(&words, 2 * kSize * 8));
  for (int grid : {66, 132})
    for (int what = 0; what < 2; ++what) {
      int stages = 1000;
      void* args[] = {&what, &stages, &counter, &rows[0], &rows[1]};
      const double t = gpu_us(
          [&] {
            CHECK(cudaMemsetAsync(counter, 0, 4, stream));
            CHECK(cudaLaunchCooperativeKernel((void*)stages_by_barrier, dim3(grid), dim3(kThreads),
                                              args, 0, stream));
          },
          1);
      printf("barrier of the grid, %3d blocks, %-20s %.2f\n", grid, works[what], t / stages);
    }
  for (int grid : {36, 66, 132}) {
    int stages = 1000;
    unsigned first = 1;
    const double t = gpu_us(
        [&] {
          fill<<<1, 256, 0, stream>>>(words, first);
          void* args[] = {&stages, &first, &words};
          CHECK(cudaLaunchCooperativeKernel((void*)stages_by_flags, dim3(grid), dim3(kThreads),
                                            args, 0, stream));
          first += stages + 1;
        },
        1);
    printf("flags in data, %3d blocks, a row normed      %.2f\n", grid, t / stages);
  }
  CHECK(cudaFuncSetAttribute(stages_in_cluster, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  for (int size : {2, 8, 16}) {
    cudaLaunchConfig_t config{};
    config.gridDim = size, config.blockDim = kThreads, config.stream = stream;
    cudaLaunchAttribute a{};
    a.id = cudaLaunchAttributeClusterDimension, a.val.clusterDim.x = size,
    a.val.clusterDim.y = a.val.clusterDim.z = 1;
    config.attrs = &a, config.numAttrs = 1;
    printf(
        "cluster of %2d, barrier and DSMEM            %.2f\n", size,
        gpu_us([&] { CHECK(cudaLaunchKernelEx(&config, stages_in_cluster, 1000, rows[0])); }, 1) /
            1000);
  }
  CHECK(cudaDeviceSynchronize());
  return 0;
}
