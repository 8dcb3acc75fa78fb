// kv_fill: norm, K/V projection, k-norm, rotary and cache write of every layer that a row skipped.
#include "backend.h"
#include "cache_format.h"
#include "index_checks.h"
#include "packed_check.h"
#include "rope_arguments.h"

namespace eecore {
namespace {

void kv_fill(const Tensor& hidden, const Tensor& exit_layer,
             const std::optional<Tensor>& norm_weight, const Tensor& kv_weight,
             const std::optional<Tensor>& kv_bias, const std::optional<Tensor>& kv_scale,
             const std::optional<Tensor>& k_norm_weight, const std::optional<Tensor>& positions,
             const std::optional<Tensor>& cos_sin, Tensor k_cache, Tensor v_cache,
             const Tensor& slot_mapping, double eps, const std::optional<Tensor>& kv_table,
             const std::optional<Tensor>& key_scales, const std::optional<Tensor>& value_scales,
             const std::optional<Tensor>& layer_ropes, int64_t loop_slots,
             const std::optional<Tensor>& layer_numbers) {
  Checker check("kv_fill");
  check(hidden, "hidden", Accept::kModel, {"num_tokens", "hidden_size"}, 1);
  check(exit_layer, "exit_layer", Accept::kInt32, {"num_tokens"});
  check(norm_weight, "norm_weight", Accept::kModel, {"num_layers", "hidden_size"}, 1);
  check.written(k_cache, "k_cache", Accept::kCache,
                {"num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim"}, 1);
  check.written(v_cache, "v_cache", Accept::kCache,
                {"num_layers", "num_pages", "page_size", "num_kv_heads", "head_dim"}, 1);
  const int64_t head_dim = check["head_dim"], kv_size = 2 * check["num_kv_heads"] * head_dim;
  const WeightCoding coding = check_weight(check, {"kv_weight", "kv_scale", "kv_table"}, kv_weight,
                                           {"num_layers", kv_size, "hidden_size"}, kv_scale,
                                           kv_table, {"num_layers", kv_size});
  check(kv_bias, "kv_bias", Accept::kModel, {"num_layers", kv_size}, 1);
  const bool norms_all_k = k_norm_weight && k_norm_weight->dim() == 2 &&
                           k_norm_weight->size(1) == kv_size / 2 && kv_size / 2 != head_dim;
  check(k_norm_weight, "k_norm_weight", Accept::kModel,
        {"num_layers", norms_all_k ? Dim(kv_size / 2) : Dim("head_dim")}, 1);
  check(slot_mapping, "slot_mapping", Accept::kInt64, {"num_tokens"});
  check(positions, "positions", Accept::kInt64, {"num_tokens"});
  check(layer_numbers, "layer_numbers", Accept::kInt32, {"num_layers"});
  check.require(!layer_numbers || loop_slots == 0,
                "layer_numbers: expected None with loop_slots, got a tensor");
  check_ropes(check, cos_sin, layer_ropes);
  check.all_or_none({{"positions", positions}, {"cos_sin", cos_sin}});
  const int64_t rotary_dim = cos_sin.has_value() ? check["rotary_dim"] : 0;
  check.require(rotary_dim % 2 == 0 && rotary_dim <= head_dim,
                "cos_sin: expected an even rotary_dim of at most head_dim=", head_dim, ", got ",
                rotary_dim);
  check.require(check["hidden_size"] >= 1, "hidden: expected hidden_size >= 1, got 0");
  check.require(kv_size >= 2,
                "k_cache: expected at least one head of one element, got num_kv_heads=",
                check["num_kv_heads"], ", head_dim=", head_dim);
  check.require(eps >= 0, "eps: expected a number >= 0, got ", eps);

  const int64_t num_slots = check["num_pages"] * check["page_size"];
  const bool whole_pages =
      loop_slots == 0 || loop_slots % std::max<int64_t>(check["page_size"], 1) == 0;
  check.require(loop_slots >= 0 && loop_slots <= num_slots && whole_pages,
                "loop_slots: expected the slots of whole pages, at most those of k_cache, ",
                num_slots, ", got ", loop_slots);

  KvFillParams params{};
  params.loop_slots = loop_slots;
  params.num_slots = num_slots;
  params.cache_format = check_cache_format(check, k_cache, v_cache, key_scales, value_scales,
                                           {"num_layers", "num_kv_heads"});
  params.page_size = check["page_size"];
  params.k_cache_strides = check.cache_strides(k_cache, "k_cache");
  params.v_cache_strides = check.cache_strides(v_cache, "v_cache");
#ifndef EECORE_BACKEND_CUDA
  const int64_t num_tokens = check["num_tokens"];
  check_range(check, "exit_layer", data<const int32_t>(exit_layer), num_tokens, 0,
              int64_t{INT32_MAX} + 1);
  check_range(check, "slot_mapping", data<const int64_t>(slot_mapping), num_tokens, -1, num_slots);
  if (positions) {
    check_range(check, "positions", data<const int64_t>(*positions), num_tokens, 0,
                check["max_position"]);
  }
  check_rope_places(check, layer_ropes);
#endif
  params.hidden = data<const void>(hidden);
  params.exit_layer = data<const int32_t>(exit_layer);
  params.norm_weight = data_or_null<const void>(norm_weight);
  params.kv_weight = data<const void>(kv_weight);
  params.kv_scale = coding.scale;
  params.kv_table = coding.table;
  params.kv_bias = data_or_null<const void>(kv_bias);
  params.k_norm_weight = data_or_null<const void>(k_norm_weight);
  params.positions = data_or_null<const int64_t>(positions);
  params.cos_sin = data_or_null<const float>(cos_sin);
  params.layer_ropes = data_or_null<const int32_t>(layer_ropes);
  params.rope_stride = layer_ropes ? check["max_position"] * rotary_dim : 0;
  params.layer_numbers = data_or_null<const int32_t>(layer_numbers);
  params.norms_all_k = norms_all_k;
  params.k_cache = data<void>(k_cache);
  params.v_cache = data<void>(v_cache);
  params.slot_mapping = data<const int64_t>(slot_mapping);
  params.num_tokens = check["num_tokens"];
  params.num_layers = check["num_layers"];
  params.hidden_size = check["hidden_size"];
  params.num_kv_heads = check["num_kv_heads"];
  params.head_dim = head_dim;
  params.rotary_dim = rotary_dim;
  params.hidden_stride = hidden.stride(0);
  params.norm_layer_stride = norm_weight ? norm_weight->stride(0) : 0;
  params.weight_layer_stride = kv_table ? 0 : kv_weight.stride(0);
  params.weight_row_stride = kv_table ? 0 : kv_weight.stride(1);
  params.scale_layer_stride = kv_scale ? kv_scale->stride(0) : 0;
  params.table_layer_stride = kv_table ? kv_table->stride(0) : 0;
  params.bias_layer_stride = kv_bias ? kv_bias->stride(0) : 0;
  params.k_norm_layer_stride = k_norm_weight ? k_norm_weight->stride(0) : 0;
  params.k_cache_layer_stride = k_cache.stride(0);
  params.v_cache_layer_stride = v_cache.stride(0);
  params.eps = static_cast<float>(eps);
  params.dtype = check.dtype();
#ifdef EECORE_BACKEND_CUDA
  const Tensor memory =
      workspace(hidden, cuda::kv_fill_workspace(params, current_stream(hidden).device));
  params.workspace = data<void>(memory);
#endif
  EECORE_RUN(kv_fill, params, hidden);
}

EECORE_OP(kv_fill,
          "Tensor hidden, Tensor exit_layer, Tensor? norm_weight, Tensor kv_weight, "
          "Tensor? kv_bias, Tensor? kv_scale, Tensor? k_norm_weight, Tensor? positions, "
          "Tensor? cos_sin, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
          "float eps, Tensor? kv_table=None, Tensor? key_scales=None, Tensor? value_scales=None, "
          "Tensor? layer_ropes=None, int loop_slots=0, Tensor? layer_numbers=None")

}  // namespace
}  // namespace eecore
