// append_kv on the CPU: each head is copied to a float32 row in cache, normed and rotated there,
// and rounded once when it is written. Threads share the tokens.
#include "float8.h"
#include "head_row.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// The operations on a head. Null weight: no norm; null cos_sin: no rotary.
template <typename T>
struct HeadChange {
  const T* weight;       // [head_dim]
  const float* cos_sin;  // [rotary_dim]
  float scale;           // 1 / rms over all heads; below 0: the head's own
};

// Norms and rotates a head in float32.
template <typename T>
void transform_row(const AppendKvParams& params, const T* in, const HeadChange<T>& change,
                   float* row) {
  const int64_t n = params.head_dim;
  load_row(in, n, row);
  if (change.weight != nullptr) {
    const float scale = change.scale < 0.0f ? inverse_rms(row, n, params.eps) : change.scale;
    scale_head(row, change.weight, n, scale);
  }
  if (change.cos_sin != nullptr) rotate_row(row, change.cos_sin, params.rotary_dim / 2);
}

// Copies one head from `in` to `out`, which may be the same place. Without norm and rotary the bits
// are copied.
template <typename T>
void transform_head(const AppendKvParams& params, const T* in, const HeadChange<T>& change,
                    const float*, T* out) {
  if (change.weight == nullptr && change.cos_sin == nullptr) {
    if (in != out) copy_bytes(out, in, params.head_dim * sizeof(T));
    return;
  }
  alignas(64) float row[kMaxHeadDim];
  transform_row(params, in, change, row);
  store_row(row, params.head_dim, out);
}

// The same from float32 to bfloat16.
inline void transform_head(const AppendKvParams& params, const float* in,
                           const HeadChange<float>& change, const float*, BFloat16* out) {
  alignas(64) float row[kMaxHeadDim];
  transform_row(params, in, change, row);
  store_row(row, params.head_dim, out);
}

// The same to float8, relative to a scale.
template <typename T>
void transform_head(const AppendKvParams& params, const T* in, const HeadChange<T>& change,
                    const float* scale, Float8* out) {
  alignas(64) float row[kMaxHeadDim];
  transform_row(params, in, change, row);
  store_scaled_row(row, params.head_dim, scale, out);
}

// The operations on a token's first head, at `heads`. If `norms_all`, all heads are normed at once,
// and the weights of the next heads follow the first one's.
template <typename T>
HeadChange<T> change_of(const AppendKvParams& params, const T* heads, int64_t num_heads,
                        int64_t head_stride, const void* weight, bool norms_all,
                        const float* cos_sin) {
  HeadChange<T> change{static_cast<const T*>(weight), cos_sin, -1.0f};
  if (norms_all) {
    change.scale = inverse_rms_of_heads(heads, num_heads, head_stride, params.head_dim, params.eps);
  }
  return change;
}

// C: the element type of the caches.
template <typename T, typename C>
void append_tokens(const AppendKvParams& params, int64_t begin, int64_t end) {
  T* q = static_cast<T*>(params.q);
  const T* k = static_cast<const T*>(params.k);
  const T* v = static_cast<const T*>(params.v);
  C* k_cache = static_cast<C*>(params.k_cache);
  C* v_cache = static_cast<C*>(params.v_cache);
  const float* const q_table = params.q_cos_sin ? params.q_cos_sin : params.cos_sin;
  const int64_t q_weight_step = params.norms_all_q ? params.head_dim : 0;
  const int64_t k_weight_step = params.norms_all_k ? params.head_dim : 0;
  for (int64_t token = begin; token < end; ++token) {
    const bool rotates = params.positions != nullptr;
    const int64_t angle = rotates ? params.positions[token] * params.rotary_dim : 0;
    if (params.num_q_heads > 0) {
      T* heads = q + token * params.q_token_stride;
      HeadChange<T> change = change_of<T>(params, heads, params.num_q_heads, params.q_head_stride,
                                          params.q_norm_weight, params.norms_all_q,
                                          rotates ? q_table + angle : nullptr);
      for (int64_t head = 0; head < params.num_q_heads; ++head) {
        T* row = heads + head * params.q_head_stride;
        transform_head(params, row, change, nullptr, row);
        if (change.weight) change.weight += q_weight_step;
      }
    }
    if (params.slot_mapping[token] < 0) continue;
    const CacheSlot slot = cache_slot(params.slot_mapping[token], params.page_size);
    const T* k_heads = k + token * params.k_token_stride;
    HeadChange<T> change = change_of<T>(params, k_heads, params.num_kv_heads, params.k_head_stride,
                                        params.k_norm_weight, params.norms_all_k,
                                        rotates ? params.cos_sin + angle : nullptr);
    for (int64_t head = 0; head < params.num_kv_heads; ++head) {
      const T* v_row = v + token * params.v_token_stride + head * params.v_head_stride;
      transform_head(params, k_heads + head * params.k_head_stride, change,
                     scale_of(params.cache_format.key_scales, head),
                     k_cache + cache_offset(params.k_cache_strides, slot, head));
      if (change.weight) change.weight += k_weight_step;
      transform_head(params, v_row, HeadChange<T>{},
                     scale_of(params.cache_format.value_scales, head),
                     v_cache + cache_offset(params.v_cache_strides, slot, head));
    }
  }
}

}  // namespace

void run_append_kv(const AppendKvParams& params, const Parallel& parallel) {
  constexpr int64_t kBytesPerElement = 64;  // bytes that could be read while one element is rotated
  const int64_t heads = params.num_q_heads + 2 * params.num_kv_heads;
  const int64_t grain =
      ceil_div(parallel.bytes_per_range, max_of(heads * params.head_dim, 1) * kBytesPerElement);
  parallel_for(parallel, params.num_tokens, grain, [&](int64_t begin, int64_t end) {
    dispatch_cache(params.dtype, params.cache_format,
                   [&]<typename T, typename C>() { append_tokens<T, C>(params, begin, end); });
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
