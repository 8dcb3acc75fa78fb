// skinny_linear on CUDA: one pass over the weight for each group of tokens. Rows of x that must be
// made ready are made by each block or, if they are many, by an earlier kernel. Heads are appended
// where they are summed or, if there are many rows or the heads are normed, by a later kernel.
#include "eecore/skinny_append.cuh"
#include "eecore/skinny_linear.cuh"
#include "skinny_launch.cuh"

namespace eecore::cuda {
namespace {

bool appends(const SkinnyLinearParams& params) { return params.append.slot_mapping != nullptr; }

// Whether the product's blocks can append what they sum. A head's norm would
// need the whole head in one block, and there would be fewer such blocks than multiprocessors. In a
// packed weight rows that are read together are adjacent; rows that are rotated together are not.
bool blocks_append(const SkinnyLinearParams& params) {
  const AppendKvParams& append = params.append;
  const int most_rows =
      params.dtype == DType::kFloat32 ? kMaxAppendedRows<float> : kMaxAppendedRows<BFloat16>;
  return params.weight_table == nullptr && !append.cache_format.is_float8 &&
         params.num_tokens <= most_rows && append.q_norm_weight == nullptr &&
         append.k_norm_weight == nullptr && HeadTiles::fit(append.head_dim, append.rotary_dim);
}

HeadTiles head_tiles(const AppendKvParams& append) {
  return HeadTiles::of(append.num_q_heads + 2 * append.num_kv_heads, append.head_dim,
                       append.rotary_dim, append.page_size);
}

template <typename T, typename W, int kMTiles, int kNTiles>
void multiply(const SkinnyLinearParams& params, SkinnyPlan plan, Stream stream) {
  plan.num_tiles = static_cast<int>(ceil_div(params.out_features, skinny_tile_rows(plan, kMTiles)));
  const int64_t blocks =
      std::min<int64_t>(plan.num_tiles, resident_skinny_blocks(kMTiles, stream.device));
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(ceil_div(params.num_tokens, 8 * kNTiles)));
  with_ready_rows<T, W, kNTiles>(
      params, plan, kMTiles, blocks, stream,
      [&](const SkinnyLinearParams& ready, const SkinnyPlan& whole_plan, size_t shared_bytes,
          auto makes_rows) {
        const LaunchShape shape = {grid, dim3(kSkinnyThreads), shared_bytes,
                                   Launch::kAfterPrevious};
        if constexpr (8 * kNTiles <= kMaxAppendedRows<T> && !kIsPacked<W>) {
          if (appends(ready)) {
            launch("skinny_linear", skinny_append_kernel<T, kMTiles, kNTiles, makes_rows(), W>,
                   shape, stream, ready, whole_plan, head_tiles(ready.append));
            return;
          }
        }
        launch("skinny_linear", skinny_linear_kernel<T, kMTiles, kNTiles, makes_rows(), W>, shape,
               stream, ready, whole_plan);
      });
}

// Whether blocks with 16 * m_tiles rows per warp would make rows of x ready.
template <typename T, typename W>
bool would_make_rows(const SkinnyLinearParams& params, const SkinnyPlan& plan, int m_tiles,
                     int device) {
  const int64_t blocks = std::min(ceil_div(params.out_features, skinny_tile_rows(plan, m_tiles)),
                                  resident_skinny_blocks(m_tiles, device));
  const int64_t exchange_bytes = skinny_exchange_floats(plan, m_tiles) * int64_t{sizeof(float)};
  return blocks_make_rows<T, W>(plan, params.num_tokens, m_tiles, blocks, exchange_bytes, device);
}

// With 32 rows per warp x is read half as often as with 16. Where a multiprocessor would then have
// no block, that pays only for rows of x that fit if one block runs on a multiprocessor, but not if
// two do.
template <typename T, typename W, int kNTiles>
void multiply(const SkinnyLinearParams& params, Stream stream) {
  SkinnyPlan plan = make_plan<W>(params.weight, params.weight_stride, params.in_features);
  set_slices(plan, choose_slices(params.out_features, plan.num_chunks, stream.device));
  plan.early_places = params.append.constant_places;
  const int64_t wide_tiles = ceil_div(params.out_features, skinny_tile_rows(plan, 2));
  const bool fills_device =
      10 * wide_tiles >= 9 * int64_t{device_properties(stream.device).num_multiprocessors};
  // With many float32 tokens there are enough registers only for one block at a time.
  constexpr bool kIsWide = std::is_same_v<T, float> && kNTiles == 2;
  bool has_room = false;
  if constexpr (kNTiles > 1 && 8 * kNTiles <= kMaxSharedRows<T, W>) {
    has_room = needs_rows(row_form(params), params.x, params.x_stride, params.norm_weight) &&
               !would_make_rows<T, W>(params, plan, 1, stream.device) &&
               would_make_rows<T, W>(params, plan, 2, stream.device);
  }
  if (kIsWide || fills_device || has_room) return multiply<T, W, 2, kNTiles>(params, plan, stream);
  if constexpr (!kIsWide) multiply<T, W, 1, kNTiles>(params, plan, stream);
}

}  // namespace

int64_t skinny_linear_workspace(const SkinnyLinearParams& params, int) {
  return ready_rows_bytes(params);
}

void run_skinny_linear(const SkinnyLinearParams& params, Stream stream) {
  check_activation("skinny_linear", params.activation, {Activation::kNone, Activation::kRelu});
  if (params.num_tokens == 0 || params.out_features == 0) return;
  SkinnyLinearParams product = params;
  const bool appends_later = appends(params) && !blocks_append(params);
  if (appends_later) product.append = {};
  dispatch_product("skinny_linear", product, [&](auto tag, auto weight_tag, auto n_tiles) {
    using T = typename decltype(tag)::type;
    multiply<T, typename decltype(weight_tag)::type, n_tiles()>(product, stream);
  });
  if (appends_later) run_append_kv(params.append, stream);
}

}  // namespace eecore::cuda
