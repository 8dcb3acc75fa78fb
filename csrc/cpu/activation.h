// The activation of a gated layer's gate.
#pragma once

#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

inline Vec silu(Vec x) { return x / (broadcast(1.0f) + exp(zero() - x)); }

// 0.5 x (1 + tanh(y)) = x / (1 + e^-2y), which neither overflows nor loses digits where the sum is
// nearly 0; 2y = 2 sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu_tanh(Vec x) {
  constexpr float kTwiceRoot = 1.5957691216f;
  const Vec twice_y = x * fma(x * x, broadcast(kTwiceRoot * 0.044715f), broadcast(kTwiceRoot));
  return x / (broadcast(1.0f) + exp(zero() - twice_y));
}

// cap * tanh(x / cap), written so that nothing overflows; NaN stays NaN.
inline Vec soft_capped(Vec x, float cap) {
  const Vec one = broadcast(1.0f), two = broadcast(2.0f);
  const Vec grown = exp(x * broadcast(2.0f / cap));
  return broadcast(cap) * (one - two / (one + grown));
}

// The activation of a gate: kSilu or kGeluTanh.
inline Vec activate_gate(Activation activation, Vec gate) {
  return activation == Activation::kGeluTanh ? gelu_tanh(gate) : silu(gate);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
