// skinny_linear on CUDA: rows of x made ready where they must be, then one pass over the weight for
// each group of tokens.
#include "eecore/skinny_linear.cuh"
#include "skinny_launch.cuh"

namespace eecore::cuda {
namespace {

template <typename T, typename W, int kMTiles, int kNTiles>
void multiply(const SkinnyLinearParams& params, SkinnyPlan plan, Stream stream) {
  plan.num_tiles = static_cast<int>(ceil_div(params.out_features, skinny_tile_rows(plan, kMTiles)));
  const int64_t exchange_bytes = skinny_exchange_floats(plan, kMTiles) * int64_t{sizeof(float)};
  const int64_t blocks =
      std::min<int64_t>(plan.num_tiles, resident_skinny_blocks(kMTiles, stream.device));
  set_stages(plan, kMTiles, blocks, exchange_bytes, stream.device);
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(ceil_div(params.num_tokens, 8 * kNTiles)));
  launch("skinny_linear", skinny_linear_kernel<T, kMTiles, kNTiles, W>,
         {grid, dim3(kSkinnyThreads),
          static_cast<size_t>(skinny_ring_bytes(plan, kMTiles) + exchange_bytes),
          Launch::kAfterPrevious},
         stream, params, plan);
}

// With 32 rows to a warp x is read half as often as with 16: where that leaves a multiprocessor
// without a block, it does not pay.
template <typename T, typename W, int kNTiles>
void multiply(const SkinnyLinearParams& params, bool early_weight, Stream stream) {
  SkinnyPlan plan = make_plan<W>(params.weight, params.weight_stride, params.in_features);
  plan.num_slices = choose_slices(params.out_features, plan.num_chunks, stream.device);
  plan.early_weight = early_weight;
  const int64_t wide_tiles = ceil_div(params.out_features, skinny_tile_rows(plan, 2));
  const bool fills_device =
      10 * wide_tiles >= 9 * int64_t{device_properties(stream.device).num_multiprocessors};
  // With many tokens there are registers for the wide one only where a block is alone.
  constexpr bool kIsWide = kNTiles >= 4 || (std::is_same_v<T, float> && kNTiles == 2);
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
  with_ready_rows("skinny_linear", params, stream,
                  [&](auto tag, auto weight_tag, auto n_tiles, const SkinnyLinearParams& ready,
                      bool makes_rows) {
                    using T = typename decltype(tag)::type;
                    using W = typename decltype(weight_tag)::type;
                    // The kernel that makes rows has waited for whoever wrote the weight.
                    multiply<T, W, n_tiles()>(ready, makes_rows || ready.constant_weight, stream);
                  });
}

}  // namespace eecore::cuda
