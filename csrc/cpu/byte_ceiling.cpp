// The peak rate of products of bytes, without matrix tiles, as packed weights of 4 bits have them.
#include "panel_lanes.h"
#include "vnni_products.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

using Dot = PanelDot<8, 4, false>;
// Rows of x. A lone sum waits for its last product; other sums would not stay in registers.
#if defined(__AVX512VNNI__) || defined(EECORE_VNNI)
constexpr int kRows = 12;
#else
constexpr int kRows = 3;
#endif

template <int kGroup = 0>
[[gnu::always_inline]] inline void add_groups(const uint8_t* weights, const Bytes* x, Dot* dots) {
  const Bytes w = load_bytes(weights + kGroup * kLaneBytes);
#pragma GCC unroll 12
  for (int row = 0; row < kRows; ++row) {
    dots[row].template add<kGroup>(w, x[row], Dot::ones());
  }
  if constexpr (kGroup + 1 < Dot::kGroups) add_groups<kGroup + 1>(weights, x, dots);
}

}  // namespace

double multiply_bytes(int64_t steps, float* sink) {
#if defined(EECORE_HANDS_OVER)
  switch (active_capability()) {
    case Capability::kAvxVnni:
      return avx_vnni::multiply_bytes(steps, sink);
    case Capability::kAvxVnniModel:
      return avx_vnni_model::multiply_bytes(steps, sink);
    default:
      break;
  }
#endif
  // Steps take turns with two lots of weights, or the compiler would multiply only once.
  constexpr int64_t kLot = Dot::kGroups * kLaneBytes;
  uint8_t weights[2 * kLot];
  for (int64_t i = 0; i < 2 * kLot; ++i) weights[i] = static_cast<uint8_t>((i + steps) % 16);
  Bytes x[kRows];
  Dot dots[kRows];
  for (int row = 0; row < kRows; ++row) {
    const int8_t columns[4] = {1, static_cast<int8_t>(row), -2, 3};
    x[row] = broadcast_bytes(columns);
    dots[row].begin(0);
  }
  for (int64_t i = 0; i < steps; ++i) add_groups(weights + i % 2 * kLot, x, dots);
  for (const Dot& dot : dots) {
    if (sum(to_vec(dot.total(0))) == 1.2345e30f) *sink = 1.0f;
  }
  return 2.0 * kLaneBytes * kRows * Dot::kGroups;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
