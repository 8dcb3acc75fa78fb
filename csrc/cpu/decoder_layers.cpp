// decoder_layers on the CPU: the kernels of the single ops one after the other, layer by layer.
// What passes between them stays in one buffer, and `out` holds the residual stream.
#include "scratch.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// `elements` of type T into a tensor that may be absent.
template <typename T>
const T* at(const void* tensor, int64_t elements) {
  return tensor ? static_cast<const T*>(tensor) + elements : nullptr;
}

// What passes between the kernels of a layer. Queries, keys and values lie side by side.
template <typename T>
struct Buffers {
  T* qkv;       // [num_tokens, q_size + 2 * kv_size]
  T* attended;  // [num_tokens, q_size]
  T* gated;     // [num_tokens, inner_size]
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
  call.bias = at<T>(linear.bias, layer * linear.out_features);
  call.num_tokens = params.num_tokens;
  call.in_features = linear.in_features;
  call.out_features = linear.out_features;
  call.weight_stride = linear.row_stride;
  call.eps = params.eps;
  call.dtype = params.dtype;
  return call;
}

// out = rows + attention(norm(rows)); rows: [num_tokens, hidden_size], may be out.
template <typename T>
void attend(const DecoderLayersParams& params, int64_t layer, const Buffers<T>& buffers,
            const void* rows, int64_t row_stride, const Parallel& parallel) {
  SkinnyLinearParams qkv = linear_of<T>(params, params.qkv, layer);
  qkv.x = rows;
  qkv.x_stride = row_stride;
  qkv.norm_weight = at<T>(params.attention_norm, layer * params.hidden_size);
  qkv.out = buffers.qkv;
  qkv.out_stride = qkv.out_features;
  EECORE_CAPABILITY::run_skinny_linear(qkv, parallel);

  AppendKvParams append = params.append;
  const int64_t head_dim = append.head_dim;
  append.q = buffers.qkv;
  append.k = buffers.qkv + append.num_q_heads * head_dim;
  append.v = buffers.qkv + (append.num_q_heads + append.num_kv_heads) * head_dim;
  append.q_norm_weight = at<T>(params.q_norm, layer * head_dim);
  append.k_norm_weight = at<T>(params.k_norm, layer * head_dim);
  append.k_cache = static_cast<T*>(append.k_cache) + layer * params.k_cache_layer_stride;
  append.v_cache = static_cast<T*>(append.v_cache) + layer * params.v_cache_layer_stride;
  append.q_token_stride = append.k_token_stride = append.v_token_stride = qkv.out_stride;
  append.q_head_stride = append.k_head_stride = append.v_head_stride = head_dim;
  EECORE_CAPABILITY::run_append_kv(append, parallel);

  PagedAttentionParams attend = params.attend;
  attend.q = buffers.qkv;
  attend.k_cache = append.k_cache;
  attend.v_cache = append.v_cache;
  attend.out = buffers.attended;
  attend.q_token_stride = qkv.out_stride;
  attend.out_token_stride = attend.num_q_heads * head_dim;
  attend.q_head_stride = attend.out_head_stride = head_dim;
  attend.sliding_window = params.sliding_window ? params.sliding_window[layer] : 0;
  EECORE_CAPABILITY::run_paged_attention(attend, parallel);

  SkinnyLinearParams o = linear_of<T>(params, params.o, layer);
  o.x = buffers.attended;
  o.x_stride = o.in_features;
  o.residual = rows;
  o.residual_stride = row_stride;
  o.out = params.out;
  o.out_stride = params.out_stride;
  EECORE_CAPABILITY::run_skinny_linear(o, parallel);
}

// out = rows + mlp(norm(rows)); rows: [num_tokens, hidden_size], may be out.
template <typename T>
void run_mlp(const DecoderLayersParams& params, int64_t layer, const Buffers<T>& buffers,
             const void* rows, int64_t row_stride, const Parallel& parallel) {
  const SkinnyLinearParams gate_up = linear_of<T>(params, params.gate_up, layer);
  SkinnyLinearParams down = linear_of<T>(params, params.down, layer);
  SkinnyGatedLinearParams gated{};
  gated.x = rows;
  gated.x_stride = row_stride;
  gated.norm_weight = at<T>(params.mlp_norm, layer * params.hidden_size);
  gated.weight = gate_up.weight;
  gated.weight_scale = gate_up.weight_scale;
  gated.bias = gate_up.bias;
  gated.out = buffers.gated;
  gated.num_tokens = params.num_tokens;
  gated.in_features = gate_up.in_features;
  gated.inner_size = down.in_features;
  gated.weight_stride = gate_up.weight_stride;
  gated.out_stride = down.in_features;
  gated.eps = params.eps;
  gated.dtype = params.dtype;
  EECORE_CAPABILITY::run_skinny_gated_linear(gated, parallel);

  down.x = buffers.gated;
  down.x_stride = down.in_features;
  down.residual = rows;
  down.residual_stride = row_stride;
  down.out = params.out;
  down.out_stride = params.out_stride;
  EECORE_CAPABILITY::run_skinny_linear(down, parallel);
}

template <typename T>
void run(const DecoderLayersParams& params, const Parallel& parallel) {
  constexpr int64_t kAlignment = 64 / sizeof(T);
  const auto size_of = [&](int64_t columns) {
    return ceil_div(params.num_tokens * columns, kAlignment) * kAlignment;
  };
  const int64_t qkv_size = size_of(params.qkv.out_features);
  const int64_t attended_size = size_of(params.o.in_features);
  const Scratch<T> memory(qkv_size + attended_size + size_of(params.down.in_features));
  const Buffers<T> buffers{memory.data(), memory.data() + qkv_size,
                           memory.data() + qkv_size + attended_size};

  // The states are read from `hidden` until a sublayer has written `out`.
  const void* rows = params.hidden;
  int64_t row_stride = params.hidden_stride;
  const auto skips = [](const uint8_t* skipped, int64_t layer) {
    return skipped != nullptr && skipped[layer] != 0;
  };
  for (int64_t layer = params.begin_layer; layer < params.end_layer; ++layer) {
    if (!skips(params.skip_attention, layer)) {
      attend<T>(params, layer, buffers, rows, row_stride, parallel);
      rows = params.out;
      row_stride = params.out_stride;
    }
    if (!skips(params.skip_mlp, layer)) {
      run_mlp<T>(params, layer, buffers, rows, row_stride, parallel);
      rows = params.out;
      row_stride = params.out_stride;
    }
  }
  if (rows == params.out) return;
  for (int64_t token = 0; token < params.num_tokens; ++token) {
    __builtin_memcpy(static_cast<T*>(params.out) + token * params.out_stride,
                     static_cast<const T*>(rows) + token * row_stride,
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
