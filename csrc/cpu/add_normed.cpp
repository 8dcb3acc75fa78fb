// add_normed on the CPU: row by row, each normed in a buffer; if there are many rows, threads share
// them.
#include "product_tiles.h"
#include "rms_norm.h"
#include "scratch.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// normed: [hidden_size], a buffer.
template <typename T>
void add_row(const AddNormedParams& params, int64_t row, T* normed) {
  const int64_t n = params.hidden_size;
  const T* x = static_cast<const T*>(params.x) + row * params.x_stride;
  const T* residual = static_cast<const T*>(params.residual);
  if (residual != nullptr) residual += row * params.residual_stride;
  T* out = static_cast<T*>(params.out) + row * params.out_stride;
  scale_row(x, static_cast<const T*>(params.norm_weight), inverse_rms(x, n, params.eps), n, normed);
  const Vec multiplier = broadcast(params.multiplier);
  for (int64_t i = 0; i < n; i += kWidth) {
    const int64_t lanes = min_of(n - i, kWidth);
    const Vec given = round_to<T>(load_lanes(normed + i, lanes) * multiplier);
    store_lanes(out + i, residual == nullptr ? given : load_lanes(residual + i, lanes) + given,
                lanes);
  }
}

template <typename T>
void add_rows(const AddNormedParams& params, const Parallel& parallel) {
  const int64_t row_bytes = params.hidden_size * static_cast<int64_t>(sizeof(T));
  parallel_for(parallel, params.num_tokens, ceil_div(parallel.bytes_per_range, 4 * row_bytes),
               [&](int64_t begin, int64_t end) {
                 const Scratch<T> normed(params.hidden_size);
                 for (int64_t row = begin; row < end; ++row) add_row(params, row, normed.data());
               });
}

}  // namespace

void run_add_normed(const AddNormedParams& params, const Parallel& parallel) {
  if (params.dtype == DType::kFloat32) {
    add_rows<float>(params, parallel);
  } else {
    add_rows<BFloat16>(params, parallel);
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
