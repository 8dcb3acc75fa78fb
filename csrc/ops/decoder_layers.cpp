// decoder_layers: consecutive layers of a decoder in one call.
#include <algorithm>

#include "activation_name.h"
#include "backend.h"
#include "cache_format.h"
#include "cpu/crew.h"
#include "index_checks.h"
#include "packed_check.h"
#include "position_buckets.h"
#include "rope_arguments.h"

namespace eecore {
namespace {

// A matrix of every layer: the arguments <name>_weight, <name>_bias, <name>_scale and <name>_table.
struct MatrixTensors {
  WeightNames names;
  const char* bias_name;
  const Tensor& weight;
  const std::optional<Tensor>&bias, &scale, &table;
};
#define EECORE_MATRIX(name) \
  MatrixTensors { \
    {#name "_weight", #name "_scale", #name "_table"}, #name "_bias", name##_weight, name##_bias, \
        name##_scale, name##_table \
  }

// Sizes are given by name, to be bound, or as numbers.
StackedLinear check_matrix(Checker& check, const MatrixTensors& matrix, Dim out_features,
                           Dim in_features) {
  const Tensor& weight = matrix.weight;
  StackedLinear stacked{};
  const WeightCoding coding =
      check_weight(check, matrix.names, weight, {"num_layers", out_features, in_features},
                   matrix.scale, matrix.table, {"num_layers", out_features});
  check(matrix.bias, matrix.bias_name, Accept::kModel, {"num_layers", out_features});
  stacked.weight = data<const void>(weight);
  stacked.bias = data_or_null<const void>(matrix.bias);
  stacked.scale = coding.scale;
  stacked.table = coding.table;
  if (coding.table != nullptr) {
    stacked.in_features = in_features.name ? check[in_features.name] : in_features.size;
    stacked.out_features = matrix.table->size(1);
    stacked.table_stride = matrix.table->stride(0);
    return stacked;
  }
  stacked.in_features = weight.size(2);
  stacked.out_features = weight.size(1);
  stacked.layer_stride = weight.stride(0);
  stacked.row_stride = weight.stride(1);
  if (stacked.scale != nullptr) {
    check.require(matrix.scale->is_contiguous(), matrix.names.scale,
                  ": expected a contiguous tensor, got layer stride ", matrix.scale->stride(0));
  }
  return stacked;
}

// Whether a norm's weights cover the features of all heads; else they cover one head, or are
// absent.
bool check_layers_norm(Checker& check, const std::optional<Tensor>& weight, const char* name,
                       int64_t all_features) {
  const bool is_of_all = weight && weight->dim() == 2 && weight->size(1) == all_features &&
                         all_features != check["head_dim"];
  check(weight, name, Accept::kModel,
        {"num_layers", is_of_all ? Dim(all_features) : Dim("head_dim")});
  return is_of_all;
}

// The widest window of the layers that attend: the number of keys that must exist. 0: all.
int64_t widest_window(const Checker& check, const DecoderLayersParams& params) {
  if (params.sliding_window == nullptr || !holds_values()) return 0;
  int64_t widest = 1;
  bool sees_all = false;
  for (int64_t layer = params.begin_layer; layer < params.end_layer; ++layer) {
    const int64_t window = params.sliding_window[layer];
    check.require(window >= 0, "sliding_window: expected 0 or more keys, got ", window,
                  " for layer ", layer);
    if (params.skip_attention != nullptr && params.skip_attention[layer]) continue;
    sees_all |= window == 0;
    widest = std::max(widest, window);
  }
  return sees_all ? 0 : widest;
}

// Bytes of weights that the call reads.
int64_t weight_bytes(const DecoderLayersParams& params) {
  const int64_t element_size = size_of(params.dtype);
  int64_t bytes = 0;
  for (const StackedLinear* linear :
       {&params.qkv, &params.o, &params.cross_q, &params.cross_o, &params.gate_up, &params.down}) {
    const bool is_quantised = linear->scale != nullptr || linear->table != nullptr;
    bytes += linear->in_features * linear->out_features * (is_quantised ? 1 : element_size);
  }
  return (params.end_layer - params.begin_layer) * bytes;
}

// The tensors of attention over an encoder's keys and values. All or none are given, except for
// biases, scales and tables.
struct CrossTensors {
  const std::optional<Tensor>&norm, &q_weight, &q_bias, &q_scale, &q_table;
  const std::optional<Tensor>&o_weight, &o_bias, &o_scale, &o_table;
  const std::optional<Tensor>&page_table, &seq_lens;
};

// Called when the params of the self attention are complete; the check has bound all sizes but one.
void set_cross_attention(Checker& check, const CrossTensors& cross, DecoderLayersParams& params) {
  const auto belongs = [&](const std::optional<Tensor>& tensor, const char* name, bool needed) {
    const bool wanted = cross.norm.has_value();
    check.require(wanted || !tensor, name, ": expected None without cross_norm, got a tensor");
    check.require(!wanted || !needed || tensor, name,
                  ": expected a tensor with cross_norm, got None");
  };
  belongs(cross.q_weight, "cross_q_weight", true);
  belongs(cross.q_bias, "cross_q_bias", false);
  belongs(cross.q_scale, "cross_q_scale", false);
  belongs(cross.q_table, "cross_q_table", false);
  belongs(cross.o_weight, "cross_o_weight", true);
  belongs(cross.o_bias, "cross_o_bias", false);
  belongs(cross.o_scale, "cross_o_scale", false);
  belongs(cross.o_table, "cross_o_table", false);
  belongs(cross.page_table, "cross_page_table", true);
  belongs(cross.seq_lens, "cross_seq_lens", true);
  if (!cross.norm) return;

  check(cross.norm, "cross_norm", Accept::kModel, {"num_layers", "hidden_size"});
  params.cross_q = check_matrix(check,
                                {{"cross_q_weight", "cross_q_scale", "cross_q_table"},
                                 "cross_q_bias",
                                 *cross.q_weight,
                                 cross.q_bias,
                                 cross.q_scale,
                                 cross.q_table},
                                "q_size", "hidden_size");
  params.cross_o = check_matrix(check,
                                {{"cross_o_weight", "cross_o_scale", "cross_o_table"},
                                 "cross_o_bias",
                                 *cross.o_weight,
                                 cross.o_bias,
                                 cross.o_scale,
                                 cross.o_table},
                                "hidden_size", "q_size");
  check(cross.page_table, "cross_page_table", Accept::kInt32, {"num_seqs", "max_cross_pages"}, 1);
  check(cross.seq_lens, "cross_seq_lens", Accept::kInt32, {"num_seqs"});
  params.cross_norm = data<const void>(*cross.norm);
  params.cross = params.attend;
  params.cross.page_table = data<const int32_t>(*cross.page_table);
  params.cross.seq_lens = data<const int32_t>(*cross.seq_lens);
  params.cross.page_table_stride = cross.page_table->stride(0);
  params.cross.max_pages_per_seq = check["max_cross_pages"];
  params.cross.causal = false;
  params.cross.soft_cap = 0;
}

void decoder_layers(
    const Tensor& hidden, const std::optional<Tensor>& attention_norm, const Tensor& qkv_weight,
    const std::optional<Tensor>& qkv_bias, const std::optional<Tensor>& qkv_scale,
    const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
    const Tensor& o_weight, const std::optional<Tensor>& o_bias,
    const std::optional<Tensor>& o_scale, const std::optional<Tensor>& mlp_norm,
    const Tensor& gate_up_weight, const std::optional<Tensor>& gate_up_bias,
    const std::optional<Tensor>& gate_up_scale, const Tensor& down_weight,
    const std::optional<Tensor>& down_bias, const std::optional<Tensor>& down_scale,
    const std::optional<Tensor>& attention_post_norm, const std::optional<Tensor>& mlp_post_norm,
    Tensor k_cache, Tensor v_cache, const Tensor& slot_mapping,
    const std::optional<Tensor>& positions, const std::optional<Tensor>& cos_sin,
    const Tensor& page_table, const Tensor& seq_lens, const Tensor& query_start_loc,
    const std::optional<Tensor>& sliding_window, const std::optional<Tensor>& skip_attention,
    const std::optional<Tensor>& skip_mlp, Tensor out, int64_t begin_layer, int64_t end_layer,
    double scale, double eps, int64_t fixed_split_size, const std::optional<Tensor>& cross_norm,
    const std::optional<Tensor>& cross_q_weight, const std::optional<Tensor>& cross_q_bias,
    const std::optional<Tensor>& cross_q_scale, const std::optional<Tensor>& cross_o_weight,
    const std::optional<Tensor>& cross_o_bias, const std::optional<Tensor>& cross_o_scale,
    const std::optional<Tensor>& cross_page_table, const std::optional<Tensor>& cross_seq_lens,
    const std::optional<Tensor>& position_bias, int64_t max_distance, const Text& activation,
    const std::optional<Tensor>& qkv_table, const std::optional<Tensor>& o_table,
    const std::optional<Tensor>& gate_up_table, const std::optional<Tensor>& down_table,
    const std::optional<Tensor>& cross_q_table, const std::optional<Tensor>& cross_o_table,
    const std::optional<Tensor>& key_scales, const std::optional<Tensor>& value_scales,
    const std::optional<Tensor>& layer_ropes, double residual_multiplier, double soft_cap,
    bool causal) {
  Checker check("decoder_layers");
  check(hidden, "hidden", Accept::kModel, {"num_tokens", "hidden_size"}, 1);
  for (const auto& [norm, name] : {std::pair(&attention_norm, "attention_norm"),
                                   {&mlp_norm, "mlp_norm"},
                                   {&attention_post_norm, "attention_post_norm"},
                                   {&mlp_post_norm, "mlp_post_norm"}}) {
    check(*norm, name, Accept::kModel, {"num_layers", "hidden_size"});
  }
  for (const auto& [cache, name] : {std::pair(&k_cache, "k_cache"), {&v_cache, "v_cache"}}) {
    check.written(*cache, name, Accept::kCache,
                  {"num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim"}, 1);
  }
  const int64_t num_kv_heads = check["num_kv_heads"], head_dim = check["head_dim"];
  DecoderLayersParams params{};
  params.o = check_matrix(check, EECORE_MATRIX(o), "hidden_size", "q_size");
  params.append.norms_all_q = check_layers_norm(check, q_norm, "q_norm", check["q_size"]);
  params.append.norms_all_k = check_layers_norm(check, k_norm, "k_norm", num_kv_heads * head_dim);
  const int64_t q_size = check["q_size"], qkv_size = q_size + 2 * num_kv_heads * head_dim;
  params.qkv = check_matrix(check, EECORE_MATRIX(qkv), qkv_size, "hidden_size");
  params.down = check_matrix(check, EECORE_MATRIX(down), "hidden_size", "inner_size");
  params.activation = activation_of(check, activation,
                                    {{"silu", Activation::kSilu},
                                     {"gelu_tanh", Activation::kGeluTanh},
                                     {"relu", Activation::kRelu}});
  const int64_t halves = params.activation == Activation::kRelu ? 1 : 2;
  params.gate_up =
      check_matrix(check, EECORE_MATRIX(gate_up), halves * check["inner_size"], "hidden_size");
  check(slot_mapping, "slot_mapping", Accept::kInt64, {"num_tokens"});
  const bool has_positions = check(positions, "positions", Accept::kInt64, {"num_tokens"});
  const bool has_cos_sin = check_ropes(check, cos_sin, layer_ropes);
  check(page_table, "page_table", Accept::kInt32, {"num_seqs", "max_pages_per_seq"}, 1);
  check(seq_lens, "seq_lens", Accept::kInt32, {"num_seqs"});
  check(query_start_loc, "query_start_loc", Accept::kInt32, {check["num_seqs"] + 1});
  check(sliding_window, "sliding_window", Accept::kInt32, {"num_layers"});
  check(skip_attention, "skip_attention", Accept::kBool, {"num_layers"});
  check(skip_mlp, "skip_mlp", Accept::kBool, {"num_layers"});
  check.written(out, "out", Accept::kModel, {"num_tokens", "hidden_size"}, 1, "hidden");

  const int64_t num_layers = check["num_layers"];
  check.require(!has_positions || has_cos_sin,
                "cos_sin: expected float32 [max_position, rotary_dim] with positions, got None");
  const int64_t rotary_dim = has_positions ? check["rotary_dim"] : 0;
  check.require(check["hidden_size"] >= 1, "hidden: expected hidden_size >= 1, got 0");
  check.require(check["inner_size"] >= 1, "down_weight: expected inner_size >= 1, got 0");
  check.require(head_dim > 0 && head_dim % 8 == 0 && head_dim <= kMaxAttentionHeadDim,
                "k_cache: expected head_dim a multiple of 8 in [8, ", kMaxAttentionHeadDim,
                "], got ", head_dim);
  check.require(num_kv_heads > 0 && q_size > 0 && q_size % (num_kv_heads * head_dim) == 0,
                "o_weight: expected q_size a multiple of num_kv_heads * head_dim=",
                num_kv_heads * head_dim, ", got ", q_size);
  check.require(check["page_size"] > 0, "k_cache: expected a positive page_size, got 0");
  check.require(rotary_dim % 2 == 0 && rotary_dim <= head_dim,
                "cos_sin: expected an even rotary_dim of at most head_dim=", head_dim, ", got ",
                rotary_dim);
  check.require(0 <= begin_layer && begin_layer <= end_layer && end_layer <= num_layers,
                "begin_layer, end_layer: expected 0 <= begin_layer <= end_layer <= num_layers=",
                num_layers, ", got ", begin_layer, " and ", end_layer);
  check.require(eps >= 0, "eps: expected a number >= 0, got ", eps);
  check.require(soft_cap >= 0, "soft_cap: expected a number >= 0, got ", soft_cap);
  check.require(soft_cap == 0 || !position_bias.has_value(),
                "soft_cap: expected 0 with position_bias, got ", soft_cap);
  check.require(fixed_split_size >= 0 && fixed_split_size <= INT32_MAX,
                "fixed_split_size: expected 0 or more keys, got ", fixed_split_size);

  params.hidden = data<const void>(hidden);
  params.attention_norm = data_or_null<const void>(attention_norm);
  params.q_norm = data_or_null<const void>(q_norm);
  params.k_norm = data_or_null<const void>(k_norm);
  params.mlp_norm = data_or_null<const void>(mlp_norm);
  params.attention_post_norm = data_or_null<const void>(attention_post_norm);
  params.mlp_post_norm = data_or_null<const void>(mlp_post_norm);
  params.layer_ropes = data_or_null<const int32_t>(layer_ropes);
  params.sliding_window = data_or_null<const int32_t>(sliding_window);
  params.skip_attention = data_or_null<const uint8_t>(skip_attention);
  params.skip_mlp = data_or_null<const uint8_t>(skip_mlp);
  params.out = data<void>(out);
  params.begin_layer = begin_layer;
  params.end_layer = end_layer;
  params.num_tokens = check["num_tokens"];
  params.hidden_size = check["hidden_size"];
  params.hidden_stride = hidden.stride(0);
  params.out_stride = out.stride(0);
  params.k_cache_layer_stride = k_cache.stride(0);
  params.v_cache_layer_stride = v_cache.stride(0);
  params.q_norm_size = q_norm ? q_norm->size(1) : 0;
  params.k_norm_size = k_norm ? k_norm->size(1) : 0;
  params.rope_stride = layer_ropes && has_positions ? check["max_position"] * rotary_dim : 0;
  params.residual_multiplier = static_cast<float>(residual_multiplier);
  params.eps = static_cast<float>(eps);
  params.dtype = check.dtype();

  AppendKvParams& append = params.append;
  append.k_cache = data<void>(k_cache);
  append.v_cache = data<void>(v_cache);
  append.slot_mapping = data<const int64_t>(slot_mapping);
  append.positions = data_or_null<const int64_t>(positions);
  append.cos_sin = data_or_null<const float>(cos_sin);
  append.num_tokens = params.num_tokens;
  append.num_q_heads = q_size / head_dim;
  append.num_kv_heads = num_kv_heads;
  append.head_dim = head_dim;
  append.rotary_dim = rotary_dim;
  append.page_size = check["page_size"];
  append.k_cache_strides = check.cache_strides(k_cache, "k_cache");
  append.v_cache_strides = check.cache_strides(v_cache, "v_cache");
  append.cache_format = check_cache_format(check, k_cache, v_cache, key_scales, value_scales,
                                           {"num_layers", "num_kv_heads"});
  append.eps = params.eps;
  append.dtype = params.dtype;

  PagedAttentionParams& attend = params.attend;
  attend.page_table = data<const int32_t>(page_table);
  attend.seq_lens = data<const int32_t>(seq_lens);
  attend.query_start_loc = data<const int32_t>(query_start_loc);
  attend.num_tokens = params.num_tokens;
  attend.num_seqs = check["num_seqs"];
  attend.num_q_heads = append.num_q_heads;
  attend.num_kv_heads = num_kv_heads;
  attend.head_dim = head_dim;
  attend.num_pages = check["num_pages"];
  attend.page_size = append.page_size;
  attend.page_table_stride = page_table.stride(0);
  attend.k_cache_strides = append.k_cache_strides;
  attend.v_cache_strides = append.v_cache_strides;
  attend.fixed_split_size = fixed_split_size;
  attend.max_pages_per_seq = check["max_pages_per_seq"];
  attend.scale = static_cast<float>(scale);
  attend.soft_cap = static_cast<float>(soft_cap);
  attend.causal = causal;
  attend.dtype = params.dtype;
  set_cross_attention(
      check,
      {cross_norm, cross_q_weight, cross_q_bias, cross_q_scale, cross_q_table, cross_o_weight,
       cross_o_bias, cross_o_scale, cross_o_table, cross_page_table, cross_seq_lens},
      params);
  set_position_bias(check, position_bias, max_distance, false, attend);
#ifndef EECORE_BACKEND_CUDA
  check_range(check, "slot_mapping", append.slot_mapping, params.num_tokens, -1,
              attend.num_pages * attend.page_size);
  if (has_positions) {
    check_range(check, "positions", append.positions, params.num_tokens, 0, check["max_position"]);
  }
  check_rope_places(check, layer_ropes);
  attend.sliding_window = widest_window(check, params);
  check_sequences(check, attend);
  if (params.cross_norm != nullptr) {
    check_sequences(check, params.cross, "cross_page_table", "cross_seq_lens");
  }

  if (Tape* tape = Tape::recording())
    return tape->add("decoder_layers", &cpu::run_decoder_layers, params);
  // As many threads as have enough bytes to read to be worth waking.
  cpu::Parallel pool = torch_parallel();
  const int64_t most = std::max<int64_t>(weight_bytes(params) / pool.bytes_per_range, 1);
  pool.num_threads = static_cast<int>(std::min<int64_t>(pool.num_threads, most));
  cpu::with_crew(pool, [&](const cpu::Parallel& crew) { cpu::run_decoder_layers(params, crew); });
#endif
}

EECORE_OP(decoder_layers,
          "Tensor hidden, Tensor? attention_norm, Tensor qkv_weight, Tensor? qkv_bias, "
          "Tensor? qkv_scale, Tensor? q_norm, Tensor? k_norm, Tensor o_weight, Tensor? o_bias, "
          "Tensor? o_scale, Tensor? mlp_norm, Tensor gate_up_weight, Tensor? gate_up_bias, "
          "Tensor? gate_up_scale, Tensor down_weight, Tensor? down_bias, Tensor? down_scale, "
          "Tensor? attention_post_norm, Tensor? mlp_post_norm, "
          "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor? positions, "
          "Tensor? cos_sin, Tensor page_table, Tensor seq_lens, Tensor query_start_loc, "
          "Tensor? sliding_window, Tensor? skip_attention, Tensor? skip_mlp, Tensor(c!) out, "
          "int begin_layer, int end_layer, float scale, float eps, int fixed_split_size, "
          "Tensor? cross_norm=None, Tensor? cross_q_weight=None, Tensor? cross_q_bias=None, "
          "Tensor? cross_q_scale=None, Tensor? cross_o_weight=None, Tensor? cross_o_bias=None, "
          "Tensor? cross_o_scale=None, Tensor? cross_page_table=None, "
          "Tensor? cross_seq_lens=None, Tensor? position_bias=None, int max_distance=128, "
          "str activation='silu', Tensor? qkv_table=None, Tensor? o_table=None, "
          "Tensor? gate_up_table=None, Tensor? down_table=None, Tensor? cross_q_table=None, "
          "Tensor? cross_o_table=None, Tensor? key_scales=None, Tensor? value_scales=None, "
          "Tensor? layer_ropes=None, float residual_multiplier=1., float soft_cap=0., "
          "bool causal=True")

}  // namespace
}  // namespace eecore
