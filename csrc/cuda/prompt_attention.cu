// The launches of paged_attention_prompt_kernel.
#include <algorithm>

#include "dispatch.h"
#include "eecore/prompt_attention.cuh"
#include "launch.cuh"
#include "prompt_attention.h"
#include "tensor_map.cuh"

namespace eecore::cuda {
namespace {

// The boxes that the kernel copies of a cache of 16-bit elements.
CUtensorMap map_of(const PagedAttentionParams& params, const void* cache,
                   const CacheStrides& given) {
  const CacheStrides strides = whole_strides(params, given);
  const auto size = [](int64_t count) { return static_cast<uint64_t>(count); };
  const auto bytes = [](int64_t stride) { return static_cast<uint64_t>(stride) * 2; };
  const int64_t keys = std::min<int64_t>(params.page_size, kPromptKeys);
  return tensor_map<4>(cache, 2,
                       {{size(params.head_dim), size(params.num_kv_heads), size(params.page_size),
                         size(params.num_pages)},
                        {bytes(strides.head), bytes(strides.slot), bytes(strides.page)},
                        {64, 1, static_cast<uint32_t>(keys), 1}});
}

template <typename T>
void run(const PagedAttentionParams& params, const AttentionPlan& plan, Stream stream) {
  const CUtensorMap keys = map_of(params, params.k_cache, params.k_cache_strides);
  const CUtensorMap values = map_of(params, params.v_cache, params.v_cache_strides);
  dispatch_at_least<64, 128>(params.head_dim, "paged_attention", "head_dim", [&](auto head_dim) {
    launch("paged_attention", paged_attention_prompt_kernel<T, head_dim()>,
           {dim3(static_cast<unsigned>(plan.num_tiles * params.num_kv_heads)), dim3(kPromptThreads),
            static_cast<size_t>(PromptSizes<head_dim()>::kBytes), Launch::kAfterPrevious},
           stream, params, plan, keys, values);
  });
}

}  // namespace

void run_prompt_attention(const PagedAttentionParams& params, const AttentionPlan& plan,
                          Stream stream) {
  const bool is_brain = params.dtype == DType::kBFloat16;
  return is_brain ? run<BFloat16>(params, plan, stream) : run<Float16>(params, plan, stream);
}

}  // namespace eecore::cuda
