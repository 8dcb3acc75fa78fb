// append_kv on the CPU: each head passes once through a float32 row in cache, where norm and rotary
// are applied, and is rounded once on its way out. Threads share the tokens.
#include "float8.h"
#include "head_row.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// A head of float32 through norm and rotary. Null weight: no norm; null cos_sin: no rotary.
template <typename T>
void transform_row(const AppendKvParams& params, const T* in, const T* weight, const float* cos_sin,
                   float* row) {
  load_row(in, params.head_dim, row);
  if (weight != nullptr) norm_row(row, weight, params.head_dim, params.eps);
  if (cos_sin != nullptr) rotate_row(row, cos_sin, params.rotary_dim / 2);
}

// One head from `in` to `out`, which may be the same place. Without norm and rotary the bits as
// they are.
template <typename T>
void transform_head(const AppendKvParams& params, const T* in, const T* weight,
                    const float* cos_sin, const float*, T* out) {
  if (weight == nullptr && cos_sin == nullptr) {
    if (in != out) copy_bytes(out, in, params.head_dim * sizeof(T));
    return;
  }
  alignas(64) float row[kMaxHeadDim];
  transform_row(params, in, weight, cos_sin, row);
  store_row(row, params.head_dim, out);
}

// The same of float32 into bfloat16.
inline void transform_head(const AppendKvParams& params, const float* in, const float* weight,
                           const float* cos_sin, const float*, BFloat16* out) {
  alignas(64) float row[kMaxHeadDim];
  transform_row(params, in, weight, cos_sin, row);
  store_row(row, params.head_dim, out);
}

// The same into float8, relative to a scale.
template <typename T>
void transform_head(const AppendKvParams& params, const T* in, const T* weight,
                    const float* cos_sin, const float* scale, Float8* out) {
  alignas(64) float row[kMaxHeadDim];
  transform_row(params, in, weight, cos_sin, row);
  store_scaled_row(row, params.head_dim, scale, out);
}

// C: what the caches hold.
template <typename T, typename C>
void append_tokens(const AppendKvParams& params, int64_t begin, int64_t end) {
  T* q = static_cast<T*>(params.q);
  const T* k = static_cast<const T*>(params.k);
  const T* v = static_cast<const T*>(params.v);
  C* k_cache = static_cast<C*>(params.k_cache);
  C* v_cache = static_cast<C*>(params.v_cache);
  const T* q_norm_weight = static_cast<const T*>(params.q_norm_weight);
  const T* k_norm_weight = static_cast<const T*>(params.k_norm_weight);
  for (int64_t token = begin; token < end; ++token) {
    const float* cos_sin = params.positions == nullptr
                               ? nullptr
                               : params.cos_sin + params.positions[token] * params.rotary_dim;
    for (int64_t head = 0; head < params.num_q_heads; ++head) {
      T* row = q + token * params.q_token_stride + head * params.q_head_stride;
      transform_head(params, row, q_norm_weight, cos_sin, nullptr, row);
    }
    if (params.slot_mapping[token] < 0) continue;
    const CacheSlot slot = cache_slot(params.slot_mapping[token], params.page_size);
    for (int64_t head = 0; head < params.num_kv_heads; ++head) {
      const T* k_row = k + token * params.k_token_stride + head * params.k_head_stride;
      const T* v_row = v + token * params.v_token_stride + head * params.v_head_stride;
      transform_head(params, k_row, k_norm_weight, cos_sin,
                     scale_of(params.cache_format.key_scales, head),
                     k_cache + cache_offset(params.k_cache_strides, slot, head));
      transform_head(params, v_row, static_cast<const T*>(nullptr), nullptr,
                     scale_of(params.cache_format.value_scales, head),
                     v_cache + cache_offset(params.v_cache_strides, slot, head));
    }
  }
}

}  // namespace

void run_append_kv(const AppendKvParams& params, const Parallel& parallel) {
  constexpr int64_t kBytesPerElement = 64;  // that could be read while one is rotated
  const int64_t heads = params.num_q_heads + 2 * params.num_kv_heads;
  const int64_t grain =
      ceil_div(parallel.bytes_per_range, max_of(heads * params.head_dim, 1) * kBytesPerElement);
  parallel_for(parallel, params.num_tokens, grain, [&](int64_t begin, int64_t end) {
    dispatch_cache(params.dtype, params.cache_format,
                   [&]<typename T, typename C>() { append_tokens<T, C>(params, begin, end); });
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
