// skinny_gated_linear on CUDA: rows of x made ready where they must be, then one pass over the
// weight for each group of tokens.
#include "eecore/skinny_gated_linear.cuh"
#include "skinny_launch.cuh"

namespace eecore::cuda {
namespace {

template <typename T, typename W, int kNTiles>
void multiply(const SkinnyGatedLinearParams& params, bool early_weight, Stream stream) {
  SkinnyPlan plan = make_plan<W>(params.weight, params.weight_stride, params.in_features);
  plan.num_slices = choose_slices(params.inner_size, plan.num_chunks, stream.device);
  plan.early_weight = early_weight;
  plan.num_tiles = static_cast<int>(ceil_div(params.inner_size, skinny_tile_rows(plan, 1)));
  const int64_t exchange_bytes =
      skinny_exchange_floats(plan, kGatedMTiles) * int64_t{sizeof(float)};
  const int64_t blocks =
      std::min<int64_t>(plan.num_tiles, resident_skinny_blocks(kGatedMTiles, stream.device));
  set_stages(plan, kGatedMTiles, blocks, exchange_bytes, stream.device);
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(ceil_div(params.num_tokens, 8 * kNTiles)));
  launch("skinny_gated_linear", skinny_gated_linear_kernel<T, kNTiles, W>,
         {grid, dim3(kSkinnyThreads),
          static_cast<size_t>(skinny_ring_bytes(plan, kGatedMTiles) + exchange_bytes),
          Launch::kAfterPrevious},
         stream, params, plan);
}

}  // namespace

int64_t skinny_gated_linear_workspace(const SkinnyGatedLinearParams& params, int) {
  return ready_rows_bytes(params);
}

void run_skinny_gated_linear(const SkinnyGatedLinearParams& params, Stream stream) {
  check_activation("skinny_gated_linear", params.activation,
                   {Activation::kSilu, Activation::kGeluTanh});
  if (params.num_tokens == 0 || params.inner_size == 0) return;
  with_ready_rows("skinny_gated_linear", params, stream,
                  [&](auto tag, auto weight_tag, auto n_tiles, const SkinnyGatedLinearParams& ready,
                      bool makes_rows) {
                    using T = typename decltype(tag)::type;
                    using W = typename decltype(weight_tag)::type;
                    multiply<T, W, n_tiles()>(ready, makes_rows, stream);
                  });
}

}  // namespace eecore::cuda
