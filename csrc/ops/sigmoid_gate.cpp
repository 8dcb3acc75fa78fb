// sigmoid_gate: the output of attention's heads times the sigmoid of their gates.
#include "backend.h"

namespace eecore {
namespace {

void sigmoid_gate(const Tensor& x, const Tensor& gate, Tensor out) {
  Checker check("sigmoid_gate");
  check(x, "x", Accept::kModel, {"num_tokens", "num_heads", "head_dim"});
  check(gate, "gate", Accept::kModel, {"num_tokens", "num_heads", "head_dim"}, 1);
  check.written(out, "out", Accept::kModel, {"num_tokens", "num_heads", "head_dim"}, 8, "x");

  SigmoidGateParams params{};
  params.x = data<const void>(x);
  params.gate = data<const void>(gate);
  params.out = data<void>(out);
  params.num_tokens = check["num_tokens"];
  params.num_heads = check["num_heads"];
  params.head_dim = check["head_dim"];
  params.gate_token_stride = gate.stride(0);
  params.gate_head_stride = gate.stride(1);
  params.dtype = check.dtype();
  EECORE_RUN(sigmoid_gate, params, x);
}

EECORE_OP(sigmoid_gate, "Tensor x, Tensor gate, Tensor(a!) out")

}  // namespace
}  // namespace eecore
