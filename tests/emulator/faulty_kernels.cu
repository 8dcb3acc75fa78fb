// Kernels with a planted fault each, and their sound twins: the emulator must find the one and pass
// the other.
#include <algorithm>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "captured_graph.h"
#include "conditional_body.h"
#include "eecore/element.cuh"
#include "eecore/reduce.cuh"
#include "launch.cuh"

namespace eecore::cuda::faults {

constexpr int kThreads = 64;

// Each thread takes its neighbour's number.
template <bool kFaulty>
__global__ void missing_barrier(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  numbers[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (!kFaulty) __syncthreads();
  out[threadIdx.x] = numbers[(threadIdx.x + 33) % kThreads];
}

// Threads count in shared memory, and one reads what others may not have counted yet.
template <bool kFaulty>
__global__ void missing_barrier_of_atomics(float* out) {
  EECORE_SHARED(int, count, 1);
  if (threadIdx.x == 0) count[0] = 0;
  __syncthreads();
  atomicAdd(count + 0, 1);
  atomicMax(count + 0, 1);
  if (!kFaulty) __syncthreads();
  out[threadIdx.x] = static_cast<float>(int{count[0]});
}

template <bool kFaulty>
__global__ void missing_syncwarp(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  numbers[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (!kFaulty) __syncwarp();
  out[threadIdx.x] = numbers[threadIdx.x ^ 1];
}

// The second round overwrites what a neighbour may still have to read.
template <bool kFaulty>
__global__ void missing_second_barrier(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  float sum = 0.0f;
  for (int round = 0; round < 2; ++round) {
    numbers[threadIdx.x] = static_cast<float>(round);
    __syncthreads();
    sum += numbers[(threadIdx.x + 33) % kThreads];
    if (!kFaulty) __syncthreads();
  }
  out[threadIdx.x] = sum;
}

// Copies by cp.async in two groups; the second has to be there too.
template <bool kFaulty>
__global__ void missing_wait_group(const float* from, float* out) {
  Shared<float> copied = dynamic_shared<float>();
  const int at = threadIdx.x * 4;
  cp_async16(copied + at, from + at);
  cp_async_commit();
  cp_async16(copied + 4 * kThreads + at, from + at);
  cp_async_commit();
  cp_async_wait<kFaulty ? 1 : 0>();
  __syncthreads();
  out[threadIdx.x] = copied[4 * kThreads + at];
}

template <bool kFaulty>
__global__ void shared_out_of_bounds(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  numbers[threadIdx.x + (kFaulty ? 1 : 0)] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = 1.0f;
}

template <bool kFaulty>
__global__ void read_before_written(float* out) {
  EECORE_SHARED(float, numbers, kThreads);
  if (!kFaulty || threadIdx.x != 5) numbers[threadIdx.x] = 1.0f;
  __syncthreads();
  out[threadIdx.x] = numbers[threadIdx.x];
}

template <bool kFaulty>
__global__ void divergent_barrier(float* out) {
  if (!kFaulty || threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = 1.0f;
}

template <bool kFaulty>
__global__ void divergent_shuffle(float* out) {
  float x = static_cast<float>(threadIdx.x);
  if (!kFaulty || threadIdx.x % 2 == 0) x = __shfl_xor_sync(kWholeWarp, x, 1);
  out[threadIdx.x] = x;
}

// The last thread of the last block to come wins: right only by luck.
template <bool kFaulty>
__global__ void order_dependent(float* out) {
  const int mine = static_cast<int>(blockIdx.x * kThreads + threadIdx.x);
  out[kFaulty ? 0 : mine] = static_cast<float>(mine);
}

template <bool kFaulty>
__global__ void unaligned_access(const float* from, float* out) {
  out[threadIdx.x] = load16(from + (kFaulty ? 1 : 0)).values[0];
}

template <bool kFaulty>
__global__ void global_out_of_bounds(float* out) {
  out[threadIdx.x + (kFaulty ? 8 : 0)] = 1.0f;
}

template <bool kFaulty>
__global__ void never_waits(float* out) {
  if (!kFaulty) wait_for_previous_kernel();
  out[threadIdx.x] = 1.0f;
}

// ---- Races in global memory: `data` is what a kernel ahead works with ----

__global__ void write_data(float* data) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  data[threadIdx.x] = static_cast<float>(threadIdx.x);
}

__global__ void read_data(const float* data, float* out) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  out[threadIdx.x] = data[threadIdx.x];
}

// In between: touches nothing of the others.
template <bool kFaulty>
__global__ void lets_next_overtake(float* out) {
  if (kFaulty) let_next_kernel_start();
  wait_for_previous_kernel();
  let_next_kernel_start();
  out[kThreads + threadIdx.x] = 1.0f;
}

template <bool kFaulty>
__global__ void early_read(const float* data, float* out) {
  if (!kFaulty) wait_for_previous_kernel();
  const float x = data[threadIdx.x];
  wait_for_previous_kernel();
  out[threadIdx.x] = x;
}

template <bool kFaulty>
__global__ void early_write(float* data) {
  if (!kFaulty) wait_for_previous_kernel();
  data[threadIdx.x] = 1.0f;
  wait_for_previous_kernel();
}

// A weight on its way through shared memory; of a kernel ahead, if that is faulty.
template <bool kFaulty>
__global__ void early_weight(const float* data, float* out) {
  Shared<float> copied = dynamic_shared<float>();
  const int at = threadIdx.x * 4;
  cp_async16(copied + at, data + at);
  cp_async_commit();
  wait_for_previous_kernel();
  cp_async_wait<0>();
  out[threadIdx.x] = copied[at];
}

// Reads before it waits what the kernel before the one ahead wrote: right where that one has waited
// before it lets others start.
template <bool kFaulty>
__global__ void overtakes(const float* data, float* out) {
  const float x = data[threadIdx.x];
  wait_for_previous_kernel();
  out[threadIdx.x] = x;
}

// One warp waits for the kernel ahead, the other for that warp.
template <bool kFaulty>
__global__ void waits_by_proxy(const float* data, float* out) {
  if (threadIdx.x < 32) wait_for_previous_kernel();
  if (!kFaulty) __syncthreads();
  out[threadIdx.x] = data[threadIdx.x];
}

// Each thread takes its neighbour's number, by global memory.
template <bool kFaulty>
__global__ void missing_barrier_of_block(float* out) {
  out[threadIdx.x] = static_cast<float>(threadIdx.x);
  if (!kFaulty) __syncthreads();
  out[kThreads + threadIdx.x] = out[(threadIdx.x + 33) % kThreads];
}

template <bool kFaulty>
__global__ void shared_place(float* out) {
  if (threadIdx.x == 0) out[kFaulty ? 0 : blockIdx.x] = static_cast<float>(blockIdx.x);
}

// The last of three blocks adds what all of them have left.
enum class Merge { kSound, kNoBarrier, kNoFence, kNoFenceBehind, kTooEarly };
template <Merge kMerge>
__device__ __forceinline__ void merge_in_last(float* data, float* out) {
  EECORE_SHARED(unsigned, count, 1);
  auto* arrivals = reinterpret_cast<unsigned*>(out + kThreads);
  const unsigned last = gridDim.x - 1;
  data[blockIdx.x * kThreads + threadIdx.x] = 1.0f;
  if (kMerge != Merge::kNoBarrier) __syncthreads();
  if (threadIdx.x == 0) {
    if (kMerge != Merge::kNoFence) __threadfence();
    count[0] = atomicInc(arrivals, last);
    if (kMerge != Merge::kNoFenceBehind) __threadfence();
  }
  __syncthreads();
  if (count[0] + (kMerge == Merge::kTooEarly ? 1 : 0) != last) return;
  float sum = 0.0f;
  for (unsigned i = 0; i < gridDim.x; ++i) sum += data[i * kThreads + threadIdx.x];
  out[threadIdx.x] = sum;
}

template <bool kFaulty>
__global__ void merge_without_barrier(float* data, float* out) {
  merge_in_last<kFaulty ? Merge::kNoBarrier : Merge::kSound>(data, out);
}
template <bool kFaulty>
__global__ void merge_without_fence(float* data, float* out) {
  merge_in_last<kFaulty ? Merge::kNoFence : Merge::kSound>(data, out);
}
template <bool kFaulty>
__global__ void merge_without_fence_behind(float* data, float* out) {
  merge_in_last<kFaulty ? Merge::kNoFenceBehind : Merge::kSound>(data, out);
}
template <bool kFaulty>
__global__ void merge_too_early(float* data, float* out) {
  merge_in_last<kFaulty ? Merge::kTooEarly : Merge::kSound>(data, out);
}

// A kernel behind others, each of which may start early; false if it is none of these.
template <bool kFaulty>
bool run_in_chain(const std::string& fault, float* data, float* out, Stream stream) {
  const LaunchShape shape{dim3(1), dim3(kThreads), 8 * kThreads * sizeof(float),
                          Launch::kAfterPrevious};
  const auto write = [&] { launch("write_data", write_data, shape, stream, data); };
  const auto pass = [&](auto kernel) { launch("lets_next_overtake", kernel, shape, stream, out); };
  if (fault == "early_read") {
    write();
    launch("early_read", early_read<kFaulty>, shape, stream, data, out);
  } else if (fault == "early_write") {
    launch("read_data", read_data, shape, stream, data, out);
    launch("early_write", early_write<kFaulty>, shape, stream, data);
  } else if (fault == "early_weight") {
    if (kFaulty) write();
    launch("early_weight", early_weight<kFaulty>, shape, stream, data, out);
  } else if (fault == "overtakes") {
    write();
    pass(lets_next_overtake<kFaulty>);
    launch("overtakes", overtakes<kFaulty>, shape, stream, data, out);
  } else if (fault == "waits_by_proxy") {
    write();
    launch("waits_by_proxy", waits_by_proxy<kFaulty>, shape, stream, data, out);
  } else {
    return false;
  }
  return true;
}

// ---- Faults of who launches ----

template <bool kFaulty>
__global__ void lowered_shared_limit(float* out) {
  out[threadIdx.x] = 1.0f;
}

template <bool kFaulty>
__global__ void loaded_in_capture(float* out) {
  out[threadIdx.x] = 1.0f;
}

template <bool kFaulty>
__global__ void early_behind_condition(float* out) {
  wait_for_previous_kernel();
  out[threadIdx.x] = 1.0f;
}

// Much shared memory, then less of it.
template <bool kFaulty>
void launch_with_less(float* out) {
  constexpr size_t kMuch = 64 * 1024, kLess = 56 * 1024;
  const auto kernel = lowered_shared_limit<kFaulty>;
  launch("lowered_shared_limit", kernel, {dim3(1), dim3(kThreads), kMuch}, {nullptr, 0}, out);
  if (kFaulty) {
    check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, kLess),
               "lowered_shared_limit");
  }
  launch("lowered_shared_limit", kernel, {dim3(1), dim3(kThreads), kLess}, {nullptr, 0}, out);
}

// work(stream) while the stream is captured, into a graph that is given up.
template <typename Work>
void in_capture(const Work& work) {
  cudaStream_t handle = nullptr;
  check_cuda(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking), "cudaStreamCreate");
  const std::unique_ptr<void, cudaError_t (*)(cudaStream_t)> owner(handle, cudaStreamDestroy);
  const CapturedGraph graph({handle, 0});
  work(Stream{handle, 0});
}

template <bool kFaulty>
void launch_first_in_capture(float* out) {
  const LaunchShape shape{dim3(1), dim3(kThreads)};
  const auto kernel = loaded_in_capture<kFaulty>;
  if (!kFaulty) launch("loaded_in_capture", kernel, shape, {nullptr, 0}, out);
  in_capture([&](Stream stream) { launch("loaded_in_capture", kernel, shape, stream, out); });
}

template <bool kFaulty>
void launch_behind_condition(float* out) {
  const LaunchShape shape{dim3(1), dim3(kThreads), 0, Launch::kAfterPrevious};
  const auto kernel = early_behind_condition<kFaulty>;
  launch("early_behind_condition", kernel, shape, {nullptr, 0}, out);
  const uint8_t flag = 0;
  in_capture([&](Stream stream) {
    ConditionalBody(stream, &flag, true).end();
    if (!kFaulty) return launch("early_behind_condition", kernel, shape, stream, out);
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    const cudaLaunchConfig_t config{shape.grid, shape.block, 0, stream.handle, &early, 1};
    check_cuda(cudaLaunchKernelEx(&config, kernel, out), "early_behind_condition");
  });
}

template <bool kFaulty>
void run(const std::string& fault, float* data, float* out) {
  const Stream stream{nullptr, 0};
  LaunchShape shape{dim3(1), dim3(kThreads)};
#define EECORE_FAULT(name, ...) \
  if (fault == #name) return launch(#name, name<kFaulty>, shape, stream, ##__VA_ARGS__);
  EECORE_FAULT(missing_barrier, out)
  EECORE_FAULT(missing_barrier_of_atomics, out)
  EECORE_FAULT(missing_syncwarp, out)
  EECORE_FAULT(missing_second_barrier, out)
  EECORE_FAULT(shared_out_of_bounds, out)
  EECORE_FAULT(read_before_written, out)
  EECORE_FAULT(divergent_barrier, out)
  EECORE_FAULT(divergent_shuffle, out)
  EECORE_FAULT(unaligned_access, static_cast<const float*>(data), out)
  EECORE_FAULT(global_out_of_bounds, out)
  EECORE_FAULT(missing_barrier_of_block, out)
  shape.shared_bytes = 16 * kThreads * sizeof(float);
  EECORE_FAULT(missing_wait_group, static_cast<const float*>(data), out)
  shape.order = Launch::kAfterPrevious;
  EECORE_FAULT(never_waits, out)
  shape = {dim3(3), dim3(kThreads)};
  EECORE_FAULT(order_dependent, out)
  EECORE_FAULT(shared_place, out)
  EECORE_FAULT(merge_without_barrier, data, out)
  EECORE_FAULT(merge_without_fence, data, out)
  EECORE_FAULT(merge_without_fence_behind, data, out)
  EECORE_FAULT(merge_too_early, data, out)
#undef EECORE_FAULT
  if (run_in_chain<kFaulty>(fault, data, out, stream)) return;
  if (fault == "lowered_shared_limit") return launch_with_less<kFaulty>(out);
  if (fault == "loaded_in_capture") return launch_first_in_capture<kFaulty>(out);
  if (fault == "early_behind_condition") return launch_behind_condition<kFaulty>(out);
  throw std::runtime_error("no such fault: " + fault);
}

}  // namespace eecore::cuda::faults

namespace {

// What went wrong in `run` goes to `message`. Returns whether anything did.
template <typename Run>
int reported(char* message, int message_size, const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    const int length = std::min<int>(message_size - 1, static_cast<int>(std::strlen(error.what())));
    std::memcpy(message, error.what(), length);
    message[length] = '\0';
    return 1;
  }
  return 0;
}

}  // namespace

// Runs a kernel on `data` (4 * 64 floats) into `out` (3 * 64 floats).
extern "C" __attribute__((visibility("default"))) int eecore_emulator_run_fault(
    const char* fault, int faulty, float* data, float* out, char* message, int message_size) {
  return reported(message, message_size, [&] {
    if (faulty != 0) {
      eecore::cuda::faults::run<true>(fault, data, out);
    } else {
      eecore::cuda::faults::run<false>(fault, data, out);
    }
  });
}
