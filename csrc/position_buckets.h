// T5's buckets of relative positions at the tensor boundary: the checks of a bias by bucket, and
// where each bucket starts.
#pragma once

#include <cmath>

#include "check.h"

namespace eecore {

// The bucket of a distance on one side; log_reach: log(max_distance / max_exact). In float32, as
// transformers computes it for its models: where a logarithm is close to a whole number, its
// rounding decides.
inline int64_t position_bucket(int64_t distance, int64_t num_sided, float log_reach) {
  const int64_t max_exact = num_sided / 2;
  if (distance < max_exact) return distance;
  const float ratio = static_cast<float>(distance) / static_cast<float>(max_exact);
  const float steps = std::log(ratio) / log_reach * static_cast<float>(num_sided - max_exact);
  const int64_t bucket = max_exact + static_cast<int64_t>(steps);
  return bucket < num_sided ? bucket : num_sided - 1;
}

// A bucket that holds no distance starts where the next bucket does.
inline PositionBuckets position_buckets(int64_t num_sided, int64_t max_distance,
                                        bool bidirectional) {
  PositionBuckets buckets{};
  buckets.num_sided = static_cast<int32_t>(num_sided);
  buckets.bidirectional = bidirectional;
  const double reach = static_cast<double>(max_distance) / static_cast<double>(num_sided / 2);
  const float log_reach = static_cast<float>(std::log(reach));
  for (int64_t bucket = 0; bucket < num_sided; ++bucket) {
    // Twice max_distance is in the last bucket, however max_distance itself is rounded.
    int64_t start = bucket, past = 2 * max_distance;
    if (bucket > num_sided / 2) {
      start = buckets.starts[bucket - 1];
      while (start < past) {
        const int64_t middle = start + (past - start) / 2;
        if (position_bucket(middle, num_sided, log_reach) >= bucket) {
          past = middle;
        } else {
          start = middle + 1;
        }
      }
    }
    buckets.starts[bucket] = static_cast<int32_t>(start);
  }
  return buckets;
}

// Checks a bias [num_buckets, num_q_heads], if given, and sets it in the params of the attention.
inline void set_position_bias(Checker& check, const std::optional<Tensor>& position_bias,
                              int64_t max_distance, bool bidirectional,
                              PagedAttentionParams& params) {
  constexpr int64_t kMaxDistance = 1 << 30;
  if (!check(position_bias, "position_bias", Accept::kFloat32,
             {"num_buckets", params.num_q_heads})) {
    return;
  }
  const int64_t num_buckets = check["num_buckets"];
  check.require(!bidirectional || num_buckets % 2 == 0,
                "position_bias: expected an even num_buckets when bidirectional, got ",
                num_buckets);
  const int64_t num_sided = bidirectional ? num_buckets / 2 : num_buckets;
  check.require(num_sided >= 2 && num_sided <= kMaxSidedBuckets, "position_bias: expected 2 to ",
                kMaxSidedBuckets, " buckets on a side, got ", num_sided);
  check.require(max_distance > num_sided / 2 && max_distance <= kMaxDistance,
                "max_distance: expected more than ", num_sided / 2,
                ", half the buckets of a side, and at most ", kMaxDistance, ", got ", max_distance);
  params.position_bias = data<const float>(*position_bias);
  params.buckets = position_buckets(num_sided, max_distance, bidirectional);
}

}  // namespace eecore
