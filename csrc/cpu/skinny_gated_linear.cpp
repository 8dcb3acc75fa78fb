// skinny_gated_linear on the CPU: a tile of gate rows, then the up rows that go with it, so that
// both halves of the weight are read once and only activation(gate) * up is written.
#include "activation.h"
#include "packed_rows.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// out = activation(gate) * up with a model's roundings to T; gates, ups: [n].
template <typename T>
void finish_row(const float* gates, const float* ups, const T* gate_bias, const T* up_bias,
                int64_t n, Activation activation, T* out) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t lanes = min_of(n - i, kWidth);
    const Vec gate = finish(gates + i, gate_bias ? gate_bias + i : nullptr, lanes);
    const Vec up = finish(ups + i, up_bias ? up_bias + i : nullptr, lanes);
    T activated[kWidth];
    store(activated, activate_gate(activation, gate));
    store_partial(out + i, load(activated) * up, lanes);
  }
}

// Columns [begin, end) of out.
template <typename T, typename W>
void multiply_range(const SkinnyGatedLinearParams& params, const PackedRows<T, W>& x, int64_t begin,
                    int64_t end) {
  const int64_t n = params.in_features;
  const WeightRows<W> gate{static_cast<const W*>(params.weight), params.weight_stride,
                           params.weight_scale};
  const WeightRows<W> up = gate.from(params.inner_size);
  const T* gate_bias = static_cast<const T*>(params.bias);
  const T* up_bias = gate_bias ? gate_bias + params.inner_size : nullptr;
  float gates[kTileBatch][kTileRows], ups[kTileBatch][kTileRows];
  for (int64_t r = begin; r < end; r += kTileRows) {
    const int64_t count = min_of(kTileRows, end - r);
    for (int64_t b = 0; b < params.num_tokens; b += kTileBatch) {
      const int64_t batch = min_of(kTileBatch, params.num_tokens - b);
      // The first rows of x bring the up rows into cache, the last ones the next gate rows.
      const bool more = b + kTileBatch >= params.num_tokens && r + count < end;
      multiply(gate.from(r), count, x.row(b), x.stride(), batch, n, b == 0 ? up.row(r) : nullptr,
               gates[0], kTileRows);
      multiply(up.from(r), count, x.row(b), x.stride(), batch, n,
               more ? gate.row(r + count) : nullptr, ups[0], kTileRows);
      for (int64_t i = 0; i < batch; ++i) {
        finish_row(gates[i], ups[i], gate_bias ? gate_bias + r : nullptr,
                   up_bias ? up_bias + r : nullptr, count, params.activation,
                   static_cast<T*>(params.out) + (b + i) * params.out_stride + r);
      }
    }
  }
}

template <typename T, typename W>
void run(const SkinnyGatedLinearParams& params, const Parallel& parallel) {
  const PackedRows<T, W> x(static_cast<const T*>(params.x), params.x_stride, params.num_tokens,
                           params.in_features, static_cast<const T*>(params.norm_weight),
                           params.eps);
  const int64_t grain =
      rows_per_range(parallel, 2 * params.in_features * static_cast<int64_t>(sizeof(W)));
  parallel_for(parallel, params.inner_size, grain,
               [&](int64_t begin, int64_t end) { multiply_range<T, W>(params, x, begin, end); });
}

}  // namespace

void run_skinny_gated_linear(const SkinnyGatedLinearParams& params, const Parallel& parallel) {
  if (params.num_tokens == 0) return;
  EECORE_DISPATCH_WEIGHT(params, weight_scale, run, (params, parallel));
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
