// sigmoid_gate on the CPU: threads share the tokens.
#include "product_tiles.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

template <typename T>
void run(const SigmoidGateParams& params, const Parallel& parallel) {
  const int64_t n = params.head_dim, size = params.num_heads * n;
  const int64_t grain = ceil_div(parallel.bytes_per_range, 8 * size);
  const Vec one = broadcast(1.0f);
  parallel_for(parallel, params.num_tokens, grain, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t head = 0; head < params.num_heads; ++head) {
        const T* x = static_cast<const T*>(params.x) + token * size + head * n;
        T* out = static_cast<T*>(params.out) + token * size + head * n;
        const T* gate = static_cast<const T*>(params.gate) + token * params.gate_token_stride +
                        head * params.gate_head_stride;
        for (int64_t i = 0; i < n; i += kWidth) {
          const int64_t lanes = min_of(n - i, kWidth);
          const Vec closed = one + exp(zero() - load_lanes(gate + i, lanes));
          store_lanes(out + i, load_lanes(x + i, lanes) / closed, lanes);
        }
      }
    }
  });
}

}  // namespace

void run_sigmoid_gate(const SigmoidGateParams& params, const Parallel& parallel) {
  if (params.dtype == DType::kFloat32) return run<float>(params, parallel);
  run<BFloat16>(params, parallel);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
