// The differences between the two builds of csrc/ops: the same tensor boundary is compiled into
// eecore._C for the CPU and into eecore._cuda for CUDA.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "check.h"
#include "text.h"

#ifdef EECORE_BACKEND_CUDA
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <stdexcept>
#include <string>

#include "cuda/launch.h"
#ifndef EECORE_DISPATCH_KEY
#define EECORE_DISPATCH_KEY CUDA
#endif
#define EECORE_RUN(op, params, tensor) \
  ::eecore::cuda::run_##op(params, ::eecore::current_stream(tensor))
#else
#include "eecore/cpu.h"
#include "tape.h"
#define EECORE_DISPATCH_KEY CPU
#define EECORE_RUN(op, params, tensor) \
  ::eecore::run_or_record(#op, &::eecore::cpu::run_##op, params)
#endif

// The ops are torch.ops.eecore.*; a build for tests registers them under another name.
#ifndef EECORE_NAMESPACE
#define EECORE_NAMESPACE eecore
#endif

// Registers an op, whose tensor boundary is the function of the same name: the schema, with
// `arguments` and without results, and the function for this build's backend.
#define EECORE_OP(op, arguments) EECORE_OP_IN(EECORE_NAMESPACE, EECORE_DISPATCH_KEY, op, arguments)
#define EECORE_OP_IN(space, key, op, arguments) \
  EECORE_SCHEMA(space, #op "(" arguments ") -> ()") \
  STABLE_TORCH_LIBRARY_IMPL(space, key, module) { module.impl(#op, TORCH_BOX(&op)); }
#if defined(EECORE_BACKEND_CUDA) && !defined(EECORE_EMULATED)
#define EECORE_SCHEMA(space, schema)  // registered by eecore._C
#else
#define EECORE_SCHEMA(space, schema) \
  STABLE_TORCH_LIBRARY_FRAGMENT(space, module) { module.def(schema); }
#endif

namespace eecore {

#ifdef EECORE_BACKEND_CUDA
// The stream that torch uses on the device of `tensor`.
inline cuda::Stream current_stream(const Tensor& tensor) {
  const int device = std::max<int>(tensor.get_device_index(), 0);  // -1: emulated, on the CPU
  void* stream = nullptr;
  if (aoti_torch_get_current_cuda_stream(device, &stream) != 0) {
    throw std::runtime_error("torch has no current CUDA stream on cuda:" + std::to_string(device));
  }
  return {stream, device};
}

// Memory for one call, on the device of `like`; uninitialised.
inline Tensor workspace(const Tensor& like, int64_t bytes) {
  return torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
}
#else
// torch's thread pool, as a plain function that csrc/cpu can call.
inline cpu::Parallel torch_parallel() {
  // A sleeping thread takes about 50 us to wake; meanwhile the running one reads a megabyte.
  constexpr int64_t kBytesPerRange = 1 << 20;
  return {static_cast<int>(torch::stable::get_num_threads()), kBytesPerRange,
          [](void*, int64_t begin, int64_t end, int64_t grain, cpu::RangeFn body, void* context) {
            torch::stable::parallel_for(begin, end, grain,
                                        [&](int64_t from, int64_t to) { body(from, to, context); });
          },
          nullptr};
}

template <typename Params>
void run_or_record(const char* op, Kernel<Params> kernel, const Params& params) {
  if (Tape* tape = Tape::recording()) return tape->add(op, kernel, params);
  kernel(params, torch_parallel());
}
#endif

}  // namespace eecore
