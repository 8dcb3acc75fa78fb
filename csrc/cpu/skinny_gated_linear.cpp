// skinny_gated_linear on the CPU: a tile of gate rows, then the matching up rows, so that both
// halves of the weight are read once and only activation(gate) * up is written.
#include "activation.h"
#include "product_tiles.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// out = activation(gate) * up with a model's roundings to T; gates, ups: [n].
template <typename T>
void finish_row(const float* gates, const float* ups, const T* gate_bias, const T* up_bias,
                int64_t n, Activation activation, T* out) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t lanes = min_of(n - i, kWidth);
    const Vec gate = finish<T>(gates + i, gate_bias ? gate_bias + i : nullptr, lanes);
    const Vec up = finish<T>(ups + i, up_bias ? up_bias + i : nullptr, lanes);
    store_lanes(out + i, round_to<T>(activate_gate(activation, gate)) * up, lanes);
  }
}

// Columns [begin, end) of out.
template <typename T, typename W>
void multiply_range(const SkinnyGatedLinearParams& params, const PackedRows<T, W>& x, int64_t begin,
                    int64_t end) {
  const int64_t n = params.in_features;
  const WeightRows<W> gate =
      weight_rows<W>(params.weight, params.weight_stride, params.weight_scale, params.weight_table);
  const WeightRows<W> up = gate.from(params.inner_size);
  const T* gate_bias = static_cast<const T*>(params.bias);
  const T* up_bias = gate_bias ? gate_bias + params.inner_size : nullptr;
  const Unit<W> unit(params.num_tokens);
  struct Halves {
    Products gates, ups;
  };
  auto& halves = kept_by_thread<Halves>();
  auto& gates = halves.gates.row;
  auto& ups = halves.ups.row;
  const int64_t total = params.inner_size;
  for_each_tile<W>(begin, end, total, params.num_tokens, x.stride(), [&](const Tile& tile) {
    const int64_t row = tile.row;
    // The first rows of x prefetch the up rows, the last ones the next gate rows.
    multiply(unit, gate.from(row), tile.num_rows, x.row(tile.batch), x.stride(), tile.num_batch, n,
             tile.is_first ? up.row(row) : nullptr, gates[0], kTileRows);
    multiply(unit, up.from(row), tile.num_rows, x.row(tile.batch), x.stride(), tile.num_batch, n,
             tile.is_last ? gate.row(row + tile.num_rows) : nullptr, ups[0], kTileRows);
    for (int64_t i = 0; i < tile.num_batch; ++i) {
      finish_row(gates[i], ups[i], gate_bias ? gate_bias + row : nullptr,
                 up_bias ? up_bias + row : nullptr, tile.num_rows, params.activation,
                 static_cast<T*>(params.out) + (tile.batch + i) * params.out_stride + row);
    }
  });
}

template <typename T, typename W>
void run(const SkinnyGatedLinearParams& params, const Parallel& parallel) {
  const PackedRows<T, W> x(static_cast<const T*>(params.x), params.x_stride, params.num_tokens,
                           params.in_features, static_cast<const T*>(params.norm_weight),
                           params.eps, {params.weight_table, 2 * params.inner_size}, parallel);
  const int64_t row_bytes = 2 * params.in_features * static_cast<int64_t>(sizeof(W));
  parallel_for(parallel, params.inner_size, rows_per_range(parallel, row_bytes, params.num_tokens),
               [&](int64_t begin, int64_t end) { multiply_range<T, W>(params, x, begin, end); });
}

}  // namespace

void run_skinny_gated_linear(const SkinnyGatedLinearParams& params, const Parallel& parallel) {
  if (params.num_tokens == 0) return;
  dispatch_weight(params.dtype, params.weight_scale, params.weight_table, params.num_tokens,
                  [&]<typename T, typename W>() { run<T, W>(params, parallel); });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
