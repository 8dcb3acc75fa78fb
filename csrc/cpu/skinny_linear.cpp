// skinny_linear on the CPU: the weight is read in row order, each thread a contiguous range of its
// rows. A tile of products is finished with bias and residual while it is in cache.
#include "activation.h"
#include "product_tiles.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// Finishes values: [n] into out[n], which may be residual[n]. The results of a multiplier and of a
// cap are rounded to O, too.
template <typename T, typename O>
void finish_row(const SkinnyLinearParams& params, const float* values, const T* bias,
                const T* residual, int64_t n, O* out) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t lanes = min_of(n - i, kWidth);
    Vec result = finish<O>(values + i, bias ? bias + i : nullptr, lanes);
    // Zero first: if one operand is NaN, max returns the second.
    if (params.activation == Activation::kRelu) result = max(zero(), result);
    if (params.multiplier != 1.0f) {
      result = round_to<O>(result * broadcast(params.multiplier));
    }
    if (params.soft_cap > 0.0f) result = round_to<O>(soft_capped(result, params.soft_cap));
    if (residual) result = load_lanes(residual + i, lanes) + result;
    store_lanes(out + i, result, lanes);
  }
}

// Columns [begin, end) of out.
template <typename T, typename W>
void multiply_range(const SkinnyLinearParams& params, const PackedRows<T, W>& x, int64_t begin,
                    int64_t end) {
  const WeightRows<W> weight =
      weight_rows<W>(params.weight, params.weight_stride, params.weight_scale, params.weight_table);
  const T* bias = static_cast<const T*>(params.bias);
  const T* residual = static_cast<const T*>(params.residual);
  const Unit<W> unit(params.num_tokens);
  auto& products = kept_by_thread<Products>().row;
  const int64_t total = params.out_features;
  for_each_tile<W>(begin, end, total, params.num_tokens, x.stride(), [&](const Tile& tile) {
    const int64_t row = tile.row;
    // The last rows of x prefetch; the earlier ones leave this part of the weight in cache.
    multiply(unit, weight.from(row), tile.num_rows, x.row(tile.batch), x.stride(), tile.num_batch,
             params.in_features, tile.is_last ? weight.row(row + tile.num_rows) : nullptr,
             products[0], kTileRows);
    for (int64_t i = 0; i < tile.num_batch; ++i) {
      const int64_t token = tile.batch + i;
      const auto finish_into = [&](auto* out) {
        finish_row(params, products[i], bias ? bias + row : nullptr,
                   residual ? residual + token * params.residual_stride + row : nullptr,
                   tile.num_rows, out + token * params.out_stride + row);
      };
      if (params.wide_out) {
        finish_into(static_cast<float*>(params.out));
      } else {
        finish_into(static_cast<T*>(params.out));
      }
    }
  });
}

template <typename T, typename W>
void run(const SkinnyLinearParams& params, const Parallel& parallel) {
  const PackedRows<T, W> x(static_cast<const T*>(params.x), params.x_stride, params.num_tokens,
                           params.in_features, static_cast<const T*>(params.norm_weight),
                           params.eps, {params.weight_table, params.out_features}, parallel);
  const int64_t row_bytes = params.in_features * static_cast<int64_t>(sizeof(W));
  parallel_for(parallel, params.out_features,
               rows_per_range(parallel, row_bytes, params.num_tokens),
               [&](int64_t begin, int64_t end) { multiply_range<T, W>(params, x, begin, end); });
}

}  // namespace

void run_skinny_linear(const SkinnyLinearParams& params, const Parallel& parallel) {
  if (params.num_tokens == 0) return;
  dispatch_weight(params.dtype, params.weight_scale, params.weight_table, params.num_tokens,
                  [&]<typename T, typename W>() { run<T, W>(params, parallel); });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
