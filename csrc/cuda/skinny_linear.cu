// skinny_linear on CUDA: one pass over the weight for each group of tokens. Where rows of x must be
// made ready, each block does so, or, of many rows, a kernel ahead. Heads are appended where they
// are summed, or, of many rows and where they are normed, by a kernel behind.
#include "eecore/skinny_append.cuh"
#include "eecore/skinny_linear.cuh"
#include "skinny_launch.cuh"

namespace eecore::cuda {
namespace {

bool appends(const SkinnyLinearParams& params) { return params.append.slot_mapping != nullptr; }

// Whether the product's blocks can append what they sum. A head's norm would need all of it in one
// block, of which there would be fewer than multiprocessors. Rows of a packed weight that are read
// together lie side by side, those that are rotated together do not.
bool blocks_append(const SkinnyLinearParams& params) {
  const AppendKvParams& append = params.append;
  return params.weight_table == nullptr && !append.cache_format.is_float8 &&
         params.num_tokens <= kMostAppendedRows && append.q_norm_weight == nullptr &&
         append.k_norm_weight == nullptr && HeadTiles::fit(append.head_dim, append.rotary_dim);
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
        if constexpr (8 * kNTiles <= kMostAppendedRows && !kIsPacked<W>) {
          if (appends(ready)) {
            const int64_t num_heads = ready.append.num_q_heads + 2 * ready.append.num_kv_heads;
            launch("skinny_linear", skinny_append_kernel<T, kMTiles, makes_rows(), W>, shape,
                   stream, ready, whole_plan,
                   HeadTiles::of(num_heads, ready.append.head_dim, ready.append.rotary_dim));
            return;
          }
        }
        launch("skinny_linear", skinny_linear_kernel<T, kMTiles, kNTiles, makes_rows(), W>, shape,
               stream, ready, whole_plan);
      });
}

// With 32 rows to a warp x is read half as often as with 16: where that leaves a multiprocessor
// without a block, it does not pay.
template <typename T, typename W, int kNTiles>
void multiply(const SkinnyLinearParams& params, Stream stream) {
  SkinnyPlan plan = make_plan<W>(params.weight, params.weight_stride, params.in_features);
  plan.num_slices = choose_slices(params.out_features, plan.num_chunks, stream.device);
  const int64_t wide_tiles = ceil_div(params.out_features, skinny_tile_rows(plan, 2));
  const bool fills_device =
      10 * wide_tiles >= 9 * int64_t{device_properties(stream.device).num_multiprocessors};
  // Of many float32 tokens there are registers enough only where a block is alone.
  constexpr bool kIsWide = std::is_same_v<T, float> && kNTiles == 2;
  if (kIsWide || fills_device) return multiply<T, W, 2, kNTiles>(params, plan, stream);
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
  const bool is_behind = appends(params) && !blocks_append(params);
  if (is_behind) product.append = {};
  dispatch_product("skinny_linear", product, [&](auto tag, auto weight_tag, auto n_tiles) {
    using T = typename decltype(tag)::type;
    multiply<T, typename decltype(weight_tag)::type, n_tiles()>(product, stream);
  });
  if (is_behind) run_append_kv(params.append, stream);
}

}  // namespace eecore::cuda
