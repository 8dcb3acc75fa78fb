// The launches of paged_attention_prompt_kernel.
#include <algorithm>

#include "dispatch.h"
#include "eecore/prompt_attention.cuh"
#include "launch.cuh"
#include "prompt_attention.h"
#include "tensor_map.cuh"

namespace eecore::cuda {
namespace {

// The boxes that the kernel copies of a cache of C.
template <typename T, int kHeadDim, typename C>
CUtensorMap map_of(const PagedAttentionParams& params, const void* cache,
                   const CacheStrides& given) {
  constexpr bool kWidens = PromptSizes<T, kHeadDim, C>::kWidens;
  const CacheStrides strides = whole_strides(params, given);
  const auto size = [](int64_t count) { return static_cast<uint64_t>(count); };
  const auto bytes = [](int64_t stride) { return static_cast<uint64_t>(stride) * sizeof(C); };
  const int64_t keys = std::min<int64_t>(params.page_size, kPromptKeys);
  return tensor_map<4>(cache, sizeof(C),
                       {{size(params.head_dim), size(params.num_kv_heads), size(params.page_size),
                         size(params.num_pages)},
                        {bytes(strides.head), bytes(strides.slot), bytes(strides.page)},
                        {kWidens ? kHeadDim : 64, 1, static_cast<uint32_t>(keys), 1}},
                       !kWidens);
}

template <typename T, typename C>
void run(const PagedAttentionParams& params, const AttentionPlan& plan, Stream stream) {
  dispatch_at_least<64, 128>(params.head_dim, "paged_attention", "head_dim", [&](auto head_dim) {
    constexpr int kHeadDim = head_dim();
    launch("paged_attention", paged_attention_prompt_kernel<T, kHeadDim, C>,
           {dim3(static_cast<unsigned>(plan.num_tiles * params.num_kv_heads)), dim3(kPromptThreads),
            static_cast<size_t>(PromptSizes<T, kHeadDim, C>::kBytes), Launch::kAfterPrevious},
           stream, params, plan,
           map_of<T, kHeadDim, C>(params, params.k_cache, params.k_cache_strides),
           map_of<T, kHeadDim, C>(params, params.v_cache, params.v_cache_strides));
  });
}

template <typename T>
void run(const PagedAttentionParams& params, const AttentionPlan& plan, Stream stream) {
  const bool is_float8 = params.cache_format.is_float8;
  return is_float8 ? run<T, Float8>(params, plan, stream) : run<T, T>(params, plan, stream);
}

}  // namespace

void run_prompt_attention(const PagedAttentionParams& params, const AttentionPlan& plan,
                          Stream stream) {
  const bool is_brain = params.dtype == DType::kBFloat16;
  return is_brain ? run<BFloat16>(params, plan, stream) : run<Float16>(params, plan, stream);
}

}  // namespace eecore::cuda
