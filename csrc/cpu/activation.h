// What a gated layer does to its gate.
#pragma once

#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

inline Vec silu(Vec x) { return x / (broadcast(1.0f) + exp(zero() - x)); }

// 0.5 x (1 + tanh(y)) = x / (1 + e^-2y), which neither overflows nor loses digits where the sum
// comes to nearly 0; 2y = 2 sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu_tanh(Vec x) {
  constexpr float kTwiceRoot = 1.5957691216f;
  const Vec twice_y = x * fma(x * x, broadcast(kTwiceRoot * 0.044715f), broadcast(kTwiceRoot));
  return x / (broadcast(1.0f) + exp(zero() - twice_y));
}

// Of a gate: kSilu or kGeluTanh.
inline Vec activate_gate(Activation activation, Vec gate) {
  return activation == Activation::kGeluTanh ? gelu_tanh(gate) : silu(gate);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
