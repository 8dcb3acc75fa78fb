// skinny_gated_linear on CUDA: one pass over the weight for each group of tokens. Rows of x that
// must be made ready are made by each block or, if they are many, by an earlier kernel.
#include "eecore/skinny_gated_linear.cuh"
#include "skinny_launch.cuh"

namespace eecore::cuda {
namespace {

template <typename T, typename W, int kNTiles>
void multiply(const SkinnyGatedLinearParams& params, Stream stream) {
  SkinnyPlan plan = make_plan<W>(params.weight, params.weight_stride, params.in_features);
  set_slices(plan, choose_slices(params.inner_size, plan.num_chunks, stream.device));
  plan.num_tiles = static_cast<int>(ceil_div(params.inner_size, skinny_tile_rows(plan, 1)));
  const int64_t blocks =
      std::min<int64_t>(plan.num_tiles, resident_skinny_blocks(kGatedMTiles, stream.device));
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(ceil_div(params.num_tokens, 8 * kNTiles)));
  with_ready_rows<T, W, kNTiles>(
      params, plan, kGatedMTiles, blocks, stream,
      [&](const SkinnyGatedLinearParams& ready, const SkinnyPlan& whole_plan, size_t shared_bytes,
          auto makes_rows) {
        launch("skinny_gated_linear", skinny_gated_linear_kernel<T, kNTiles, makes_rows(), W>,
               {grid, dim3(kSkinnyThreads), shared_bytes, Launch::kAfterPrevious}, stream, ready,
               whole_plan);
      });
}

}  // namespace

int64_t skinny_gated_linear_workspace(const SkinnyGatedLinearParams& params, int) {
  return ready_rows_bytes(params);
}

void run_skinny_gated_linear(const SkinnyGatedLinearParams& params, Stream stream) {
  check_activation("skinny_gated_linear", params.activation,
                   {Activation::kSilu, Activation::kGeluTanh});
  if (params.num_tokens == 0 || params.inner_size == 0) return;
  dispatch_product("skinny_gated_linear", params, [&](auto tag, auto weight_tag, auto n_tiles) {
    using T = typename decltype(tag)::type;
    multiply<T, typename decltype(weight_tag)::type, n_tiles()>(params, stream);
  });
}

}  // namespace eecore::cuda
