// decoder_layers on the CPU: the kernels of the single ops, one after the other, layer by layer.
// Intermediate results stay in one buffer, and `out` holds the residual stream.
#include "scratch.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// Advances by `elements` of type T in a tensor that may be absent.
template <typename T>
const T* at(const void* tensor, int64_t elements) {
  return tensor ? static_cast<const T*>(tensor) + elements : nullptr;
}

// A layer's part of a cache; stride: in elements, from one layer to the next.
template <typename T>
void* layer_cache(const DecoderLayersParams& params, void* cache, int64_t stride, int64_t layer) {
  const CacheFormat& format = params.append.cache_format;
  const int64_t size = format.is_float8 ? 1 : format.is_bfloat16 ? 2 : int64_t{sizeof(T)};
  return static_cast<char*>(cache) + layer * stride * size;
}

CacheFormat layer_format(const DecoderLayersParams& params, int64_t layer) {
  CacheFormat format = params.append.cache_format;
  const int64_t scales = layer * params.append.num_kv_heads;
  format.key_scales = at<float>(format.key_scales, scales);
  format.value_scales = at<float>(format.value_scales, scales);
  return format;
}

// Intermediate results of a layer. Queries, keys and values are adjacent.
template <typename T>
struct Buffers {
  T* qkv;       // [num_tokens, q_size + 2 * kv_size]; in cross attention [num_tokens, q_size]
  T* attended;  // [num_tokens, q_size]
  T* inner;     // [num_tokens, inner_size]
  T* given;     // [num_tokens, hidden_size], the output of a sublayer that is normed; else null
};

// The residual stream that a sublayer reads: `hidden` of the call, or its `out`.
struct Rows {
  const void* data;  // [num_tokens, hidden_size]
  int64_t stride;
};

// One layer's part of a stacked linear layer.
template <typename T>
SkinnyLinearParams linear_of(const DecoderLayersParams& params, const StackedLinear& linear,
                             int64_t layer) {
  SkinnyLinearParams call{};
  call.weight = linear.scale
                    ? at<int8_t>(linear.weight, layer * linear.layer_stride)
                    : static_cast<const void*>(at<T>(linear.weight, layer * linear.layer_stride));
  call.weight_scale = at<float>(linear.scale, layer * linear.out_features);
  call.weight_table = at<int64_t>(linear.table, layer * linear.table_stride);
  call.bias = at<T>(linear.bias, layer * linear.out_features);
  call.num_tokens = params.num_tokens;
  call.in_features = linear.in_features;
  call.out_features = linear.out_features;
  call.weight_stride = linear.row_stride;
  call.eps = params.eps;
  call.dtype = params.dtype;
  return call;
}

// projected = linear(norm(rows)), its rows contiguous; norm: [num_layers, hidden_size], or null.
template <typename T>
void project(const DecoderLayersParams& params, const StackedLinear& linear, int64_t layer,
             const void* norm, Rows rows, Activation activation, T* projected,
             const Parallel& parallel) {
  SkinnyLinearParams call = linear_of<T>(params, linear, layer);
  call.x = rows.data;
  call.x_stride = rows.stride;
  call.norm_weight = at<T>(norm, layer * params.hidden_size);
  call.activation = activation;
  call.out = projected;
  call.out_stride = call.out_features;
  EECORE_CAPABILITY::run_skinny_linear(call, parallel);
}

// out = rows + multiplier * norm(given); norm: [num_layers, hidden_size], rows may be out.
template <typename T>
void add_normed(const DecoderLayersParams& params, int64_t layer, const void* norm, const T* given,
                Rows rows, const Parallel& parallel) {
  AddNormedParams call{};
  call.x = given;
  call.norm_weight = at<T>(norm, layer * params.hidden_size);
  call.residual = rows.data;
  call.out = params.out;
  call.num_tokens = params.num_tokens;
  call.hidden_size = call.x_stride = params.hidden_size;
  call.residual_stride = rows.stride;
  call.out_stride = params.out_stride;
  call.eps = params.eps;
  call.multiplier = params.residual_multiplier;
  call.dtype = params.dtype;
  EECORE_CAPABILITY::run_add_normed(call, parallel);
}

// out = rows + multiplier * linear(x), or of norm(linear(x)); x: [num_tokens, in_features], rows
// may be out.
template <typename T>
void add_to_rows(const DecoderLayersParams& params, const StackedLinear& linear, int64_t layer,
                 const T* x, const void* norm, const Buffers<T>& buffers, Rows rows,
                 const Parallel& parallel) {
  SkinnyLinearParams call = linear_of<T>(params, linear, layer);
  call.x = x;
  call.x_stride = call.in_features;
  if (norm != nullptr) {
    call.out = buffers.given;
    call.out_stride = params.hidden_size;
    EECORE_CAPABILITY::run_skinny_linear(call, parallel);
    return add_normed(params, layer, norm, buffers.given, rows, parallel);
  }
  call.multiplier = params.residual_multiplier;
  call.residual = rows.data;
  call.residual_stride = rows.stride;
  call.out = params.out;
  call.out_stride = params.out_stride;
  EECORE_CAPABILITY::run_skinny_linear(call, parallel);
}

// Writes buffers.attended for the queries at the front of buffers.qkv, whose rows are q_stride
// apart.
template <typename T>
void attend(const DecoderLayersParams& params, PagedAttentionParams call, int64_t layer,
            const Buffers<T>& buffers, int64_t q_stride, const Parallel& parallel) {
  call.q = buffers.qkv;
  call.k_cache = layer_cache<T>(params, params.append.k_cache, params.k_cache_layer_stride, layer);
  call.v_cache = layer_cache<T>(params, params.append.v_cache, params.v_cache_layer_stride, layer);
  call.cache_format = layer_format(params, layer);
  call.out = buffers.attended;
  call.q_token_stride = q_stride;
  call.out_token_stride = call.num_q_heads * call.head_dim;
  call.q_head_stride = call.out_head_stride = call.head_dim;
  EECORE_CAPABILITY::run_paged_attention(call, parallel);
}

// out = rows + attention(norm(rows)), or + the norm of that; rows may be out.
template <typename T>
void run_self_attention(const DecoderLayersParams& params, int64_t layer, const Buffers<T>& buffers,
                        Rows rows, const Parallel& parallel) {
  project(params, params.qkv, layer, params.attention_norm, rows, Activation::kNone, buffers.qkv,
          parallel);

  AppendKvParams append = params.append;
  const int64_t head_dim = append.head_dim;
  append.q = buffers.qkv;
  append.k = buffers.qkv + append.num_q_heads * head_dim;
  append.v = buffers.qkv + (append.num_q_heads + append.num_kv_heads) * head_dim;
  append.q_norm_weight = at<T>(params.q_norm, layer * params.q_norm_size);
  append.k_norm_weight = at<T>(params.k_norm, layer * params.k_norm_size);
  if (params.layer_ropes != nullptr) {
    append.q_cos_sin = append.cos_sin + params.layer_ropes[2 * layer] * params.rope_stride;
    append.cos_sin += params.layer_ropes[2 * layer + 1] * params.rope_stride;
  }
  append.k_cache = layer_cache<T>(params, append.k_cache, params.k_cache_layer_stride, layer);
  append.v_cache = layer_cache<T>(params, append.v_cache, params.v_cache_layer_stride, layer);
  append.cache_format = layer_format(params, layer);
  append.q_token_stride = append.k_token_stride = append.v_token_stride = params.qkv.out_features;
  append.q_head_stride = append.k_head_stride = append.v_head_stride = head_dim;
  EECORE_CAPABILITY::run_append_kv(append, parallel);

  PagedAttentionParams call = params.attend;
  call.sliding_window = params.sliding_window ? params.sliding_window[layer] : 0;
  attend(params, call, layer, buffers, params.qkv.out_features, parallel);
  add_to_rows(params, params.o, layer, buffers.attended, params.attention_post_norm, buffers, rows,
              parallel);
}

// out = rows + attention(norm(rows)) over the encoder's keys and values; rows may be out.
template <typename T>
void run_cross_attention(const DecoderLayersParams& params, int64_t layer,
                         const Buffers<T>& buffers, Rows rows, const Parallel& parallel) {
  project(params, params.cross_q, layer, params.cross_norm, rows, Activation::kNone, buffers.qkv,
          parallel);
  attend(params, params.cross, layer, buffers, params.cross_q.out_features, parallel);
  add_to_rows(params, params.cross_o, layer, buffers.attended, nullptr, buffers, rows, parallel);
}

// buffers.inner = activation(gate) * up of norm(rows).
template <typename T>
void run_gate_up(const DecoderLayersParams& params, int64_t layer, const Buffers<T>& buffers,
                 Rows rows, const Parallel& parallel) {
  const SkinnyLinearParams gate_up = linear_of<T>(params, params.gate_up, layer);
  SkinnyGatedLinearParams gated{};
  gated.x = rows.data;
  gated.x_stride = rows.stride;
  gated.norm_weight = at<T>(params.mlp_norm, layer * params.hidden_size);
  gated.weight = gate_up.weight;
  gated.weight_scale = gate_up.weight_scale;
  gated.weight_table = gate_up.weight_table;
  gated.bias = gate_up.bias;
  gated.out = buffers.inner;
  gated.num_tokens = params.num_tokens;
  gated.in_features = gate_up.in_features;
  gated.inner_size = params.down.in_features;
  gated.weight_stride = gate_up.weight_stride;
  gated.out_stride = gated.inner_size;
  gated.eps = params.eps;
  gated.activation = params.activation;
  gated.dtype = params.dtype;
  EECORE_CAPABILITY::run_skinny_gated_linear(gated, parallel);
}

// out = rows + mlp(norm(rows)), or + the norm of that; rows may be out.
template <typename T>
void run_mlp(const DecoderLayersParams& params, int64_t layer, const Buffers<T>& buffers, Rows rows,
             const Parallel& parallel) {
  if (params.activation == Activation::kRelu) {
    project(params, params.gate_up, layer, params.mlp_norm, rows, Activation::kRelu, buffers.inner,
            parallel);
  } else {
    run_gate_up(params, layer, buffers, rows, parallel);
  }
  add_to_rows(params, params.down, layer, buffers.inner, params.mlp_post_norm, buffers, rows,
              parallel);
}

template <typename T>
void run(const DecoderLayersParams& params, const Parallel& parallel) {
  constexpr int64_t kAlignment = 64 / sizeof(T);
  const auto size_of = [&](int64_t columns) {
    return ceil_div(params.num_tokens * columns, kAlignment) * kAlignment;
  };
  const int64_t qkv_size = size_of(params.qkv.out_features);
  const int64_t attended_size = size_of(params.o.in_features);
  const int64_t inner_size = size_of(params.down.in_features);
  const bool norms_given = params.attention_post_norm != nullptr || params.mlp_post_norm != nullptr;
  const int64_t given_size = norms_given ? size_of(params.hidden_size) : 0;
  const Scratch<T> memory(qkv_size + attended_size + inner_size + given_size);
  T* const attended = memory.data() + qkv_size;
  T* const inner = attended + attended_size;
  const Buffers<T> buffers{memory.data(), attended, inner,
                           norms_given ? inner + inner_size : nullptr};

  // The states are read from `hidden` until a sublayer has written `out`.
  Rows rows{params.hidden, params.hidden_stride};
  const Rows written{params.out, params.out_stride};
  const auto skips = [](const uint8_t* skipped, int64_t layer) {
    return skipped != nullptr && skipped[layer] != 0;
  };
  for (int64_t layer = params.begin_layer; layer < params.end_layer; ++layer) {
    if (!skips(params.skip_attention, layer)) {
      run_self_attention<T>(params, layer, buffers, rows, parallel);
      rows = written;
      if (params.cross_norm != nullptr) {
        run_cross_attention<T>(params, layer, buffers, rows, parallel);
      }
    }
    if (!skips(params.skip_mlp, layer)) {
      run_mlp<T>(params, layer, buffers, rows, parallel);
      rows = written;
    }
  }
  if (rows.data == params.out) return;
  for (int64_t token = 0; token < params.num_tokens; ++token) {
    copy_bytes(static_cast<T*>(params.out) + token * params.out_stride,
               static_cast<const T*>(rows.data) + token * rows.stride,
               static_cast<uint64_t>(params.hidden_size) * sizeof(T));
  }
}

}  // namespace

void run_decoder_layers(const DecoderLayersParams& params, const Parallel& parallel) {
  if (params.num_tokens == 0) return;
  if (params.dtype == DType::kFloat32) {
    run<float>(params, parallel);
  } else {
    run<uint16_t>(params, parallel);
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
