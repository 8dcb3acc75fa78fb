// kv_fill on CUDA: one kernel orders the rows and norms them for the layers that need them; a
// second one multiplies, finishes and writes the heads of all those layers. A third one finishes
// keys whose heads are normed all at once.
#include "eecore/kv_fill.cuh"
#include "eecore/kv_fill_pairs.cuh"
#include "skinny_launch.cuh"

namespace eecore::cuda {
namespace {

// Bytes of order and counts; the normed rows begin after them, at a whole cache line.
int64_t order_bytes(const KvFillParams& params) {
  return ceil_div((params.num_tokens + params.num_layers) * int64_t{sizeof(int32_t)}, 128) * 128;
}

// Bytes of projected keys whose heads are normed all at once.
int64_t keys_bytes(const KvFillParams& params) {
  if (!params.norms_all_k) return 0;
  return params.num_layers * params.num_tokens * params.num_kv_heads * params.head_dim *
         size_of(params.dtype);
}

RowForm row_form(const KvFillParams& params) {
  return {params.hidden_size, params.dtype, params.kv_scale, params.kv_table};
}

template <typename T>
KvFillRows rows_in_workspace(const KvFillParams& params) {
  KvFillRows rows{};
  rows.order = static_cast<int32_t*>(params.workspace);
  rows.counts = rows.order + params.num_tokens;
  rows.normed = static_cast<char*>(params.workspace) + order_bytes(params);
  rows.padded_size = row_form(params).padded_size();
  if (params.norms_all_k) {
    rows.keys = static_cast<char*>(rows.normed) +
                params.num_layers * params.num_tokens * row_form(params).padded_bytes();
  }
  rows.hidden_aligned = is_aligned(params.hidden, params.hidden_stride, sizeof(T));
  rows.norm_weight_aligned = is_aligned(params.norm_weight, params.norm_layer_stride, sizeof(T));
  return rows;
}

template <typename W>
SkinnyPlan fill_plan(const KvFillParams& params) {
  SkinnyPlan plan = make_plan<W>(params.kv_weight, params.weight_row_stride, params.hidden_size);
  plan.aligned = plan.aligned && params.weight_layer_stride * int64_t{sizeof(W)} % 16 == 0;
  return plan;
}

// With more slices a block would have fewer rows of the weight at a time, for each of which it
// reads all of x: a fill of a few layers would have work for more blocks, but a fill of many would
// take longer.
constexpr int kMaxFillSlices = 4;

// Fills a few rows of the weight at a time: with many rows of x twice as many, so that x is read
// half as often.
template <typename T, typename W, int kNTiles>
void fill_pairs(const KvFillParams& params, const KvFillRows& rows, Stream stream) {
  constexpr int kMTiles = kNTiles > 2 ? 2 : 1;
  SkinnyPlan plan = fill_plan<W>(params);
  const int64_t layer_rows = 2 * params.num_kv_heads * params.head_dim;
  set_slices(plan,
             std::min(choose_slices(layer_rows, plan.num_chunks, stream.device), kMaxFillSlices));
  plan.num_tiles = static_cast<int>(ceil_div(layer_rows, skinny_tile_rows(plan, kMTiles)));
  const int64_t exchange_bytes = skinny_exchange_floats(plan, kMTiles) * int64_t{sizeof(float)};
  const int64_t blocks =
      std::min(params.num_layers * plan.num_tiles, resident_skinny_blocks(kMTiles, stream.device));
  plan.num_blocks = Divisor::of(blocks);
  set_stages(plan, kMTiles, skinny_blocks_per_multiprocessor(kMTiles), blocks, exchange_bytes,
             stream.device);
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(ceil_div(params.num_tokens, 8 * kNTiles)));
  launch("kv_fill", kv_fill_pairs_kernel<T, kMTiles, kNTiles, W>,
         {grid, dim3(kSkinnyThreads),
          static_cast<size_t>(skinny_ring_bytes(plan, kMTiles) + exchange_bytes),
          Launch::kAfterPrevious},
         stream, params, rows, plan,
         HeadTiles::of(2 * params.num_kv_heads, params.head_dim,
                       params.positions == nullptr ? 0 : params.rotary_dim, params.page_size),
         Divisor::of(plan.num_tiles));
}

// How whole heads are cut, and the plan's slices for that.
HeadPlan head_plan(const KvFillParams& params, SkinnyPlan& plan) {
  HeadPlan cut{};
  cut.row_tiles = static_cast<int>(ceil_div(params.head_dim, 16));
  const int slices = std::clamp(kSkinnyWarps / cut.row_tiles, 1, plan.num_chunks);
  set_slices(plan, static_cast<int>(std::bit_floor(static_cast<unsigned>(slices))));
  cut.group_tiles = std::min(kSkinnyWarps / plan.num_slices, cut.row_tiles);
  cut.num_parts = Divisor::of(ceil_div(cut.row_tiles, cut.group_tiles));
  cut.num_heads = Divisor::of(2 * params.num_kv_heads);
  cut.column = 16 * cut.row_tiles + 4;  // the offset keeps the banks apart
  return cut;
}

template <typename T, typename W, int kNTiles>
void fill_heads(const KvFillParams& params, const KvFillRows& rows, Stream stream) {
  SkinnyPlan plan = fill_plan<W>(params);
  const HeadPlan cut = head_plan(params, plan);
  const int64_t products_bytes = head_floats(plan, cut, kNTiles) * int64_t{sizeof(float)};
  const int64_t blocks = std::min(params.num_layers * 2 * params.num_kv_heads,
                                  resident_skinny_blocks(1, stream.device));
  plan.num_blocks = Divisor::of(blocks);
  set_stages(plan, 1, skinny_blocks_per_multiprocessor(1), blocks, products_bytes, stream.device);
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(ceil_div(params.num_tokens, 8 * kNTiles)));
  const auto kernel =
      rows.keys != nullptr ? kv_fill_kernel<T, kNTiles, W, true> : kv_fill_kernel<T, kNTiles, W>;
  launch("kv_fill", kernel,
         {grid, dim3(kSkinnyThreads),
          static_cast<size_t>(skinny_ring_bytes(plan, 1) + products_bytes), Launch::kAfterPrevious},
         stream, params, rows, plan, cut);
}

template <typename T, typename W, int kNTiles>
void fill(const KvFillParams& params, const KvFillRows& rows, Stream stream) {
  if constexpr (!kIsPacked<W>) {  // packed rows that are read together are adjacent
    if (params.k_norm_weight == nullptr && HeadTiles::fit(params.head_dim, params.rotary_dim)) {
      return fill_pairs<T, W, kNTiles>(params, rows, stream);
    }
  }
  fill_heads<T, W, kNTiles>(params, rows, stream);
}

// Fills the layers of one loop, or of a model without loops.
void fill_loop(const KvFillParams& params, Stream stream) {
  dispatch_dtype(params.dtype, "kv_fill", [&](auto tag) {
    using T = typename decltype(tag)::type;
    const KvFillRows rows = rows_in_workspace<T>(params);
    const dim3 grid(static_cast<unsigned>(params.num_tokens),
                    static_cast<unsigned>(params.num_layers));
    launch("kv_fill", kv_fill_rows_kernel<T>,
           {grid, dim3(kRmsNormThreads), 0, Launch::kAfterPrevious}, stream, params, rows);
    dispatch_weight<T>(params.kv_scale, params.kv_table, [&](auto weight_tag) {
      using W = typename decltype(weight_tag)::type;
      if constexpr (std::is_same_v<T, float>) {
        fill<T, W, 1>(params, rows, stream);
      } else {
        dispatch_tokens<T, 4>(params.num_tokens,
                              [&](auto n_tiles) { fill<T, W, n_tiles()>(params, rows, stream); });
      }
    });
    if (params.norms_all_k) {
      launch("kv_fill", kv_fill_keys_kernel<T>,
             {grid, dim3(kRmsNormThreads), 0, Launch::kAfterPrevious}, stream, params, rows);
    }
  });
}

}  // namespace

int64_t kv_fill_workspace(const KvFillParams& params, int) {
  return order_bytes(params) +
         params.num_layers * params.num_tokens * row_form(params).padded_bytes() +
         keys_bytes(params);
}

void run_kv_fill(const KvFillParams& params, Stream stream) {
  if (params.num_tokens == 0 || params.num_layers == 0) return;
  KvFillParams loop = params;
  do {
    fill_loop(loop, stream);
    loop.first_layer += params.num_layers;
    loop.slot_offset += params.loop_slots;
  } while (params.loop_slots > 0 && loop.slot_offset < params.num_slots);
}

}  // namespace eecore::cuda
