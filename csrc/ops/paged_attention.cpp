// paged_attention: ragged queries against a paged KV cache.
#include "backend.h"
#include "cache_format.h"
#include "index_checks.h"
#include "position_buckets.h"

namespace eecore {
namespace {

void paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                     const Tensor& page_table, const Tensor& seq_lens,
                     const Tensor& query_start_loc, Tensor out, double scale, bool causal,
                     int64_t sliding_window, int64_t fixed_split_size,
                     const std::optional<Tensor>& position_bias, int64_t max_distance,
                     bool bidirectional, const std::optional<Tensor>& arrivals,
                     const std::optional<Tensor>& key_scales,
                     const std::optional<Tensor>& value_scales, double soft_cap,
                     bool constant_places) {
  Checker check("paged_attention");
  check(q, "q", Accept::kModel, {"num_tokens", "num_q_heads", "head_dim"}, 1);
  for (const auto& [cache, name] : {std::pair(&k_cache, "k_cache"), {&v_cache, "v_cache"}}) {
    check.apart(*cache, name, Accept::kCache,
                {"num_pages", "page_size", "num_kv_heads", "head_dim"}, 1);
  }
  check(page_table, "page_table", Accept::kInt32, {"num_seqs", "max_pages_per_seq"}, 1);
  check(seq_lens, "seq_lens", Accept::kInt32, {"num_seqs"});
  check(query_start_loc, "query_start_loc", Accept::kInt32, {check["num_seqs"] + 1});
  check.written(out, "out", Accept::kModel, {"num_tokens", "num_q_heads", "head_dim"}, 1);
  check.written(arrivals, "arrivals", Accept::kInt32, {"num_arrivals"});
  const int64_t head_dim = check["head_dim"];
  check.require(head_dim > 0 && head_dim % 8 == 0 && head_dim <= kMaxAttentionHeadDim,
                "q: expected head_dim a multiple of 8 in [8, ", kMaxAttentionHeadDim, "], got ",
                head_dim);
  const int64_t num_q_heads = check["num_q_heads"], num_kv_heads = check["num_kv_heads"];
  check.require(num_kv_heads > 0 && num_q_heads % num_kv_heads == 0,
                "q: expected num_q_heads a multiple of num_kv_heads=", num_kv_heads, ", got ",
                num_q_heads);
  check.require(check["page_size"] > 0, "k_cache: expected a positive page_size, got 0");
  check.require(sliding_window >= 0, "sliding_window: expected 0 or more keys, got ",
                sliding_window);
  check.require(fixed_split_size >= 0 && fixed_split_size <= INT32_MAX,
                "fixed_split_size: expected 0 or more keys, got ", fixed_split_size);
  check.require(soft_cap >= 0, "soft_cap: expected a number >= 0, got ", soft_cap);
  check.require(soft_cap == 0 || !position_bias.has_value(),
                "soft_cap: expected 0 with position_bias, got ", soft_cap);

  PagedAttentionParams params{};
  params.cache_format =
      check_cache_format(check, k_cache, v_cache, key_scales, value_scales, {"num_kv_heads"});
  params.q = data<const void>(q);
  params.k_cache = data<const void>(k_cache);
  params.v_cache = data<const void>(v_cache);
  params.page_table = data<const int32_t>(page_table);
  params.seq_lens = data<const int32_t>(seq_lens);
  params.query_start_loc = data<const int32_t>(query_start_loc);
  params.out = data<void>(out);
  params.arrivals = data_or_null<int32_t>(arrivals);
  params.num_arrivals = arrivals ? arrivals->size(0) : 0;
  params.num_tokens = check["num_tokens"];
  params.num_seqs = check["num_seqs"];
  params.num_q_heads = num_q_heads;
  params.num_kv_heads = num_kv_heads;
  params.head_dim = head_dim;
  params.num_pages = check["num_pages"];
  params.page_size = check["page_size"];
  params.page_table_stride = page_table.stride(0);
  params.q_token_stride = q.stride(0);
  params.q_head_stride = q.stride(1);
  params.out_token_stride = out.stride(0);
  params.out_head_stride = out.stride(1);
  params.k_cache_strides = check.cache_strides(k_cache, "k_cache");
  params.v_cache_strides = check.cache_strides(v_cache, "v_cache");
  // A window of all the keys that there is room for has no effect.
  const int64_t most_keys = check["max_pages_per_seq"] * check["page_size"];
  params.sliding_window = sliding_window < most_keys ? sliding_window : 0;
  params.fixed_split_size = fixed_split_size;
  params.max_pages_per_seq = check["max_pages_per_seq"];
  params.scale = static_cast<float>(scale);
  params.soft_cap = static_cast<float>(soft_cap);
  params.causal = causal;
  params.constant_places = constant_places;
  params.dtype = check.dtype();
  set_position_bias(check, position_bias, max_distance, bidirectional, params);
#ifdef EECORE_BACKEND_CUDA
  Tensor scratch;
  const int64_t scratch_bytes = cuda::paged_attention_workspace(params, current_stream(q).device);
  if (scratch_bytes > 0) {
    scratch = workspace(q, scratch_bytes);
    params.workspace = data<void>(scratch);
  }
#else
  check_sequences(check, params);
#endif
  EECORE_RUN(paged_attention, params, q);
}

EECORE_OP(paged_attention,
          "Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, "
          "Tensor query_start_loc, Tensor(a!) out, float scale, bool causal, int sliding_window, "
          "int fixed_split_size, Tensor? position_bias=None, int max_distance=128, "
          "bool bidirectional=False, Tensor(b!)? arrivals=None, Tensor? key_scales=None, "
          "Tensor? value_scales=None, float soft_cap=0., bool constant_places=False")

}  // namespace
}  // namespace eecore
