// paged_attention: ragged queries against a paged KV cache.
#include <algorithm>

#include "backend.h"

namespace eecore {
namespace {

constexpr int64_t kMaxHeadDim = 256;

#ifndef EECORE_BACKEND_CUDA
// Every length, and every page-table entry that a query's keys need, must be usable, or nothing is
// written.
void check_indices(const Checker& check, const PagedAttentionParams& params, int64_t max_pages) {
  const auto require = [&](bool ok, int64_t got, int64_t seq, const auto&... expected) {
    check.require(ok, expected..., ", got ", got, " for sequence ", seq);
  };
  const int32_t* starts = params.query_start_loc;
  require(starts[0] == 0, starts[0], 0, "query_start_loc: expected to start at 0");
  const int64_t capacity = max_pages * params.page_size;
  for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
    const int64_t num_queries = int64_t{starts[seq + 1]} - starts[seq];
    require(num_queries >= 0, starts[seq + 1], seq, "query_start_loc: expected ascending values");
    const int64_t length = params.seq_lens[seq];
    require(length >= 0 && length <= capacity, length, seq,
            "seq_lens: expected values in [0, max_pages_per_seq * page_size=", capacity, "]");
    if (num_queries == 0 || length == 0) continue;
    const int64_t first_seen =
        params.sliding_window > 0 ? length - num_queries + 1 - params.sliding_window : 0;
    const int32_t* entries = params.page_table + seq * params.page_table_stride;
    for (int64_t page = std::max<int64_t>(first_seen, 0) / params.page_size;
         page * params.page_size < length; ++page) {
      require(entries[page] >= 0 && entries[page] < params.num_pages, entries[page], seq,
              "page_table: expected entries in [0, num_pages=", params.num_pages, ") in column ",
              page);
    }
  }
  require(starts[params.num_seqs] == params.num_tokens, starts[params.num_seqs],
          params.num_seqs - 1,
          "query_start_loc: expected to end at num_tokens=", params.num_tokens);
}

// Work in (row, key) pairs of one sequence and kv head, of its largest tile, and of the call.
struct Work {
  int64_t total = 0, largest_tile = 0, largest_tile_rows = 1, longest = 0;
};

Work measure_work(const PagedAttentionParams& params) {
  Work work;
  const int64_t group_size = params.num_q_heads / params.num_kv_heads;
  for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
    const int64_t num_queries = params.query_start_loc[seq + 1] - params.query_start_loc[seq];
    const int64_t length = params.seq_lens[seq];
    if (num_queries == 0) continue;
    int64_t keys = length;
    if (params.sliding_window > 0) keys = std::min(keys, params.sliding_window + num_queries);
    const int64_t rows = num_queries * group_size;
    const int64_t tile_rows = std::min(rows, params.tile_rows);
    work.total += rows * keys * params.num_kv_heads;
    work.longest = std::max(work.longest, length);
    if (tile_rows * keys > work.largest_tile) {
      work.largest_tile = tile_rows * keys;
      work.largest_tile_rows = tile_rows;
    }
  }
  return work;
}

// Sizes of a work item, and whether sequences are split among several. Keys are split before heads,
// because all heads of a slot lie side by side in memory. A fixed split size is kept as it is, so
// that only who computes a split depends on the call.
void plan(PagedAttentionParams& params, int64_t available_threads) {
  constexpr int64_t kTileFloats = 64 * 128;            // as many as the kernel's scratch holds
  constexpr int64_t kMultipliesPerThread = 1 << 16;    // worth waking a thread for
  constexpr int64_t kItemsPerThread = 4;               // so that the last ones even out
  constexpr int64_t kMinSplit = 256, kSplitStep = 64;  // keys
  constexpr int64_t kMaxPartials = 64 << 20;           // floats
  const int64_t width = (params.head_dim + 31) / 32 * 32;
  params.partial_size = width + 2;
  params.tile_rows = std::min<int64_t>(64, kTileFloats / width);
  const Work work = measure_work(params);
  params.num_threads = std::clamp<int64_t>(work.total * params.head_dim / kMultipliesPerThread, 1,
                                           available_threads);

  const int64_t rows = work.largest_tile_rows;
  const int64_t wanted = std::max<int64_t>(work.total / (params.num_threads * kItemsPerThread), 1);
  const int64_t most_heads = std::min(params.num_kv_heads, params.tile_rows / rows);
  bool split = params.num_threads > 1 && work.largest_tile * most_heads > 2 * wanted;
  params.split_size = params.fixed_split_size;
  if (params.split_size == 0) {
    const int64_t keys = wanted / (rows * most_heads) / kSplitStep * kSplitStep;
    params.split_size = split ? std::max(keys, kMinSplit) : INT32_MAX;
  }
  params.max_splits = (work.longest + params.split_size - 1) / params.split_size;
  split =
      split && params.num_tokens * params.num_q_heads * params.max_splits * params.partial_size <=
                   kMaxPartials;
  params.tile_heads = most_heads;
  if (split) {
    const int64_t keys = std::min(params.split_size, work.longest);
    params.tile_heads = std::clamp<int64_t>(wanted / (rows * keys), 1, most_heads);
  } else {
    params.max_splits = 0;
  }
}
#endif

void paged_attention(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                     const Tensor& page_table, const Tensor& seq_lens,
                     const Tensor& query_start_loc, Tensor out, double scale, bool causal,
                     int64_t sliding_window, int64_t fixed_split_size) {
  Checker check("paged_attention");
  check(q, "q", Accept::kModel, {"num_tokens", "num_q_heads", "head_dim"}, 1);
  for (const auto& [cache, name] : {std::pair(&k_cache, "k_cache"), {&v_cache, "v_cache"}}) {
    check(*cache, name, Accept::kModel, {"num_pages", "page_size", "num_kv_heads", "head_dim"}, 2);
  }
  check(page_table, "page_table", Accept::kInt32, {"num_seqs", "max_pages_per_seq"}, 1);
  check(seq_lens, "seq_lens", Accept::kInt32, {"num_seqs"});
  check(query_start_loc, "query_start_loc", Accept::kInt32, {check["num_seqs"] + 1});
  check(out, "out", Accept::kModel, {"num_tokens", "num_q_heads", "head_dim"}, 1);
  const auto require_size = [&](bool ok, const char* expected, int64_t got) {
    if (!ok) check.fail(std::string(expected) + ", got " + std::to_string(got));
  };
  const int64_t head_dim = check["head_dim"];
  require_size(head_dim > 0 && head_dim % 8 == 0 && head_dim <= kMaxHeadDim,
               "q: expected head_dim a multiple of 8 in [8, 256]", head_dim);
  const int64_t num_q_heads = check["num_q_heads"], num_kv_heads = check["num_kv_heads"];
  require_size(num_kv_heads > 0 && num_q_heads % num_kv_heads == 0,
               "q: expected num_q_heads a multiple of num_kv_heads", num_q_heads);
  require_size(check["page_size"] > 0, "k_cache: expected a positive page_size",
               check["page_size"]);
  require_size(sliding_window >= 0, "sliding_window: expected 0 or more keys", sliding_window);
  require_size(fixed_split_size >= 0 && fixed_split_size <= INT32_MAX,
               "fixed_split_size: expected 0 or more keys", fixed_split_size);

  PagedAttentionParams params{};
  params.q = data<const void>(q);
  params.k_cache = data<const void>(k_cache);
  params.v_cache = data<const void>(v_cache);
  params.page_table = data<const int32_t>(page_table);
  params.seq_lens = data<const int32_t>(seq_lens);
  params.query_start_loc = data<const int32_t>(query_start_loc);
  params.out = data<void>(out);
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
  params.k_page_stride = k_cache.stride(0);
  params.k_slot_stride = k_cache.stride(1);
  params.v_page_stride = v_cache.stride(0);
  params.v_slot_stride = v_cache.stride(1);
  params.sliding_window = sliding_window;
  params.fixed_split_size = fixed_split_size;
  params.scale = static_cast<float>(scale);
  params.causal = causal;
  params.dtype = check.dtype();
#ifndef EECORE_BACKEND_CUDA
  check_indices(check, params, check["max_pages_per_seq"]);
  if (params.num_tokens == 0 || num_q_heads == 0) return;
  plan(params, static_cast<int64_t>(torch::stable::get_num_threads()));
  std::optional<Tensor> partials;
  if (params.max_splits > 0) {
    partials = torch::stable::new_empty(
        q, {params.num_tokens, num_q_heads, params.max_splits, params.partial_size},
        ScalarType::Float);
    params.partials = data<float>(*partials);
  }
#endif
  EECORE_RUN(paged_attention, params, q);
}

EECORE_IMPL(paged_attention, paged_attention)

}  // namespace
}  // namespace eecore
