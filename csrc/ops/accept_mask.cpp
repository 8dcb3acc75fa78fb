// accept_mask: sticky per-row acceptance at one exit point, on the device.
#include "backend.h"

namespace eecore {
namespace {

void accept_mask(const Tensor& confidence, const Tensor& thresholds, int64_t layer, Tensor status,
                 Tensor exit_layer, Tensor survivors, Tensor num_survivors, Tensor all_accepted) {
  Checker check("accept_mask");
  check(confidence, "confidence", Accept::kFloat32, {"num_seqs"});
  check(thresholds, "thresholds", Accept::kFloat32, {"num_seqs"});
  check(status, "status", Accept::kBool, {"num_seqs"});
  check(exit_layer, "exit_layer", Accept::kInt32, {"num_seqs"});
  check(survivors, "survivors", Accept::kInt32, {"num_seqs"});
  check(num_survivors, "num_survivors", Accept::kInt32, {1});
  check(all_accepted, "all_accepted", Accept::kBool, {1});
  check.require(layer >= 1 && layer <= INT32_MAX,
                "layer: expected a positive number of layers that have run, got ", layer);

  AcceptMaskParams params{};
  params.confidence = data<const float>(confidence);
  params.thresholds = data<const float>(thresholds);
  params.status = data<uint8_t>(status);
  params.exit_layer = data<int32_t>(exit_layer);
  params.survivors = data<int32_t>(survivors);
  params.num_survivors = data<int32_t>(num_survivors);
  params.all_accepted = data<uint8_t>(all_accepted);
  params.num_seqs = check["num_seqs"];
  params.layer = static_cast<int32_t>(layer);
  EECORE_RUN(accept_mask, params, confidence);
}

EECORE_IMPL(accept_mask, accept_mask)

}  // namespace
}  // namespace eecore
