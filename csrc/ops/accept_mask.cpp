// accept_mask: sticky per-row acceptance at one exit point, on the device.
#include "accept_arguments.h"
#include "backend.h"

namespace eecore {
namespace {

void accept_mask(const Tensor& confidence, const Tensor& thresholds, int64_t layer, Tensor status,
                 Tensor exit_layer, Tensor survivors, Tensor num_survivors, Tensor all_accepted) {
  Checker check("accept_mask");
  check(confidence, "confidence", Accept::kFloat32, {"num_seqs"});
  const AcceptMaskParams params = accept_params(check, confidence, thresholds, layer, status,
                                                exit_layer, survivors, num_survivors, all_accepted);
  EECORE_RUN(accept_mask, params, confidence);
}

EECORE_OP(accept_mask,
          "Tensor confidence, Tensor thresholds, int layer, Tensor(a!) status, "
          "Tensor(b!) exit_layer, Tensor(c!) survivors, Tensor(d!) num_survivors, "
          "Tensor(e!) all_accepted")

}  // namespace
}  // namespace eecore
