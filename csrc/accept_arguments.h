// The tensors of accept_mask, which ops that measure confidences also take to accept rows.
#pragma once

#include "check.h"

namespace eecore {

// Checks the tensors against a float32 [num_seqs] `confidence` that has been checked.
inline AcceptMaskParams accept_params(Checker& check, const Tensor& confidence,
                                      const Tensor& thresholds, int64_t layer, const Tensor& status,
                                      const Tensor& exit_layer, const Tensor& survivors,
                                      const Tensor& num_survivors, const Tensor& all_accepted) {
  check(thresholds, "thresholds", Accept::kFloat32, {"num_seqs"});
  check.written(status, "status", Accept::kBool, {"num_seqs"});
  check.written(exit_layer, "exit_layer", Accept::kInt32, {"num_seqs"});
  check.written(survivors, "survivors", Accept::kInt32, {"num_seqs"});
  check.written(num_survivors, "num_survivors", Accept::kInt32, {1});
  check.written(all_accepted, "all_accepted", Accept::kBool, {1});
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
  return params;
}

// The same as optional tensors: all of them or none are given; num_survivors is null without them.
struct OptionalAccept {
  const std::optional<Tensor>& thresholds;
  int64_t layer;
  const std::optional<Tensor>&status, &exit_layer, &survivors, &num_survivors, &all_accepted;

  AcceptMaskParams params(Checker& check, const Tensor& confidence) const {
    if (!check.all_or_none({{"thresholds", thresholds},
                            {"status", status},
                            {"exit_layer", exit_layer},
                            {"survivors", survivors},
                            {"num_survivors", num_survivors},
                            {"all_accepted", all_accepted}})) {
      return {};
    }
    return accept_params(check, confidence, *thresholds, layer, *status, *exit_layer, *survivors,
                         *num_survivors, *all_accepted);
  }
};

}  // namespace eecore
