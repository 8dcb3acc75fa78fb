// short_conv: a gated convolution over the last positions, whose inputs lie in pages.
#include "backend.h"
#include "index_checks.h"

namespace eecore {
namespace {

constexpr int64_t kMaxTaps = 8;

void short_conv(const Tensor& bcx, Tensor state, const Tensor& slot_mapping,
                const std::optional<Tensor>& weight, const std::optional<Tensor>& page_table,
                const std::optional<Tensor>& seq_lens, const std::optional<Tensor>& query_start_loc,
                const std::optional<Tensor>& exit_layer, int64_t layer, std::optional<Tensor> out) {
  Checker check("short_conv");
  check.written(out, "out", Accept::kModel, {"num_tokens", "hidden_size"}, 1);
  check(weight, "weight", Accept::kModel, {"num_taps", "hidden_size"});
  if (!out) check.bind("hidden_size", state.dim() == 3 ? state.size(2) : 0);
  check(bcx, "bcx", Accept::kModel, {"num_tokens", 3 * check["hidden_size"]}, 1);
  check.written(state, "state", Accept::kCache, {"num_pages", "page_size", "hidden_size"});
  check(slot_mapping, "slot_mapping", Accept::kInt64, {"num_tokens"});
  check(page_table, "page_table", Accept::kInt32, {"num_seqs", "max_pages_per_seq"}, 1);
  check(seq_lens, "seq_lens", Accept::kInt32, {"num_seqs"});
  const bool convolves = check.all_or_none({{"out", out},
                                            {"weight", weight},
                                            {"page_table", page_table},
                                            {"seq_lens", seq_lens},
                                            {"query_start_loc", query_start_loc}});
  if (convolves) {
    check(query_start_loc, "query_start_loc", Accept::kInt32, {check["num_seqs"] + 1});
    check.require(check["num_taps"] >= 1 && check["num_taps"] <= kMaxTaps, "weight: expected 1 to ",
                  kMaxTaps, " taps, got ", check["num_taps"]);
  }
  check(exit_layer, "exit_layer", Accept::kInt32, {"num_tokens"});
  check.require(convolves != exit_layer.has_value(), "exit_layer: expected ",
                convolves ? "None with a weight, got a tensor" : "a tensor without out, got None");
  check.require(check["hidden_size"] >= 1, "state: expected hidden_size >= 1, got 0");
  const ScalarType type = state.scalar_type();
  check.require(type != ScalarType::Float8_e4m3fn,
                "state: expected the model's dtype or bfloat16, got ", dtype_name(type));
  const int64_t num_slots = check["num_pages"] * check["page_size"];
  check.require(num_slots <= INT32_MAX, "state: expected at most ", INT32_MAX, " slots, got ",
                num_slots);

  ShortConvParams params{};
  params.bcx = data<const void>(bcx);
  params.state = data<void>(state);
  params.slot_mapping = data<const int64_t>(slot_mapping);
  params.weight = data_or_null<const void>(weight);
  params.page_table = data_or_null<const int32_t>(page_table);
  params.seq_lens = data_or_null<const int32_t>(seq_lens);
  params.query_start_loc = data_or_null<const int32_t>(query_start_loc);
  params.exit_layer = data_or_null<const int32_t>(exit_layer);
  params.out = data_or_null(out);
  params.num_tokens = check["num_tokens"];
  params.num_seqs = convolves ? check["num_seqs"] : 0;
  params.hidden_size = check["hidden_size"];
  params.num_taps = convolves ? check["num_taps"] : 0;
  params.page_size = check["page_size"];
  params.page_table_stride = convolves ? page_table->stride(0) : 0;
  params.bcx_stride = bcx.stride(0);
  params.out_stride = convolves ? out->stride(0) : 0;
  params.layer = layer;
  params.narrow_state = type == ScalarType::BFloat16 && check.dtype() == DType::kFloat32;
  params.dtype = check.dtype();
#ifndef EECORE_BACKEND_CUDA
  check_range(check, "slot_mapping", params.slot_mapping, params.num_tokens, -1, num_slots);
  if (convolves) {
    PagedAttentionParams pages{};
    pages.page_table = params.page_table;
    pages.seq_lens = params.seq_lens;
    pages.query_start_loc = params.query_start_loc;
    pages.num_tokens = params.num_tokens;
    pages.num_seqs = params.num_seqs;
    pages.num_pages = check["num_pages"];
    pages.page_size = params.page_size;
    pages.page_table_stride = params.page_table_stride;
    pages.max_pages_per_seq = check["max_pages_per_seq"];
    pages.sliding_window = params.num_taps;
    check_sequences(check, pages);
  }
#endif
  EECORE_RUN(short_conv, params, bcx);
}

EECORE_OP(short_conv,
          "Tensor bcx, Tensor(a!) state, Tensor slot_mapping, Tensor? weight, "
          "Tensor? page_table, Tensor? seq_lens, Tensor? query_start_loc, Tensor? exit_layer, "
          "int layer, Tensor(b!)? out")

}  // namespace
}  // namespace eecore
