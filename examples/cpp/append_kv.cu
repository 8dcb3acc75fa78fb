// A CUDA engine that compiles a kernel of eecore in a file of its own, with its own launch and
// stream: keys and values of new tokens, rotary embedding on the way, into a paged cache whose
// heads come before its slots. Held against the CPU kernel, which takes the same params.
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "eecore/append_kv.cuh"
#include "eecore/cpu.h"

namespace {

constexpr int64_t kTokens = 5, kKvHeads = 4, kHeadDim = 64, kPages = 3, kPageSize = 16;

void require(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}

template <typename T>
T* on_device(const std::vector<T>& values) {
  T* copy = nullptr;
  require(cudaMalloc(&copy, values.size() * sizeof(T)));
  require(cudaMemcpy(copy, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return copy;
}

std::vector<float> random_floats(int64_t count) {
  static std::mt19937 bits{1};
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(bits);
  return values;
}

// Lanes of a warp share a head; warps take the heads of a token.
void append_kv(const eecore::AppendKvParams& params, cudaStream_t stream) {
  using namespace eecore::cuda;
  const HeadItems items = HeadItems::of<float>(params.head_dim, params.rotary_dim);
  const dim3 block(32, kAppendKvThreads / 32);
  const int64_t heads = params.num_q_heads + 2 * params.num_kv_heads;
  const dim3 grid(static_cast<unsigned>(params.num_tokens),
                  static_cast<unsigned>((heads + block.y - 1) / block.y));
  append_kv_kernel<float, 1><<<grid, block, 0, stream>>>(params, items);
  require(cudaGetLastError());
}

}  // namespace

int main() {
  const auto k = random_floats(kTokens * kKvHeads * kHeadDim), v = random_floats(k.size());
  const auto cos_sin = random_floats(100 * kHeadDim);
  const std::vector<int64_t> slots{17, 3, -1, 47, 20}, positions{0, 99, 5, 7, 31};
  std::vector<float> k_cache(kPages * kKvHeads * kPageSize * kHeadDim), v_cache(k_cache.size());

  eecore::AppendKvParams params{};
  params.k = k.data();
  params.v = v.data();
  params.k_cache = k_cache.data();
  params.v_cache = v_cache.data();
  params.slot_mapping = slots.data();
  params.positions = positions.data();
  params.cos_sin = cos_sin.data();
  params.num_tokens = kTokens;
  params.num_kv_heads = kKvHeads;
  params.head_dim = params.rotary_dim = kHeadDim;
  params.page_size = kPageSize;
  params.k_token_stride = params.v_token_stride = kKvHeads * kHeadDim;
  params.k_head_stride = params.v_head_stride = kHeadDim;
  params.k_cache_strides = {kKvHeads * kPageSize * kHeadDim, kHeadDim, kPageSize * kHeadDim};
  params.v_cache_strides = params.k_cache_strides;
  params.dtype = eecore::DType::kFloat32;

  eecore::AppendKvParams there = params;
  there.k = on_device(k);
  there.v = on_device(v);
  there.k_cache = on_device(k_cache);
  there.v_cache = on_device(v_cache);
  there.slot_mapping = on_device(slots);
  there.positions = on_device(positions);
  there.cos_sin = on_device(cos_sin);
  append_kv(there, nullptr);
  eecore::cpu::run_append_kv(params, eecore::cpu::kOneThread);

  float largest = 0.0f;
  std::vector<float> got(k_cache.size());
  for (auto [cache, expected] : {std::pair(there.k_cache, &k_cache), {there.v_cache, &v_cache}}) {
    require(cudaMemcpy(got.data(), cache, got.size() * sizeof(float), cudaMemcpyDeviceToHost));
    for (size_t i = 0; i < got.size(); ++i) {
      largest = std::fmax(largest, std::fabs(got[i] - (*expected)[i]));
    }
  }
  std::printf("append_kv: largest difference %.2g\n", largest);
  return largest < 1e-5f ? 0 : 1;
}
