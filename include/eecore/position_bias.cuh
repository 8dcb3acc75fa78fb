// The position bias of paged_attention, spread out in shared memory by relative position, so that
// the bias of a score is one load at a known offset.
#pragma once

#include "eecore/attention_tile.cuh"

namespace eecore::cuda {

// Extra entries on both sides, beyond the last relative positions with a bias of their own. A
// warp's step that reaches such a position from any of its rows reaches at most this much further
// from the other rows.
template <typename Sizes>
constexpr int kPositionBiasMargin = Sizes::kStepKeys + Sizes::kWarpRows;

// The bucket of the key at `relative` positions from its query.
__device__ __forceinline__ int position_bucket(const PositionBuckets& buckets, int relative) {
  const int distance = relative < 0 ? -relative : buckets.bidirectional ? relative : 0;
  int bucket = 0, end = buckets.num_sided;
  while (end - bucket > 1) {
    const int middle = (bucket + end) / 2;
    if (buckets.starts[middle] <= distance) {
      bucket = middle;
    } else {
      end = middle;
    }
  }
  return buckets.bidirectional && relative > 0 ? buckets.num_sided + bucket : bucket;
}

// Fills `table`, [group_size, bias_width], for the heads of a kv head, in base 2. All threads of
// the block call it, and may read the table after a barrier.
__device__ __forceinline__ void spread_position_bias(const PagedAttentionParams& params,
                                                     const AttentionPlan& plan, int kv_head,
                                                     Shared<float> table) {
  for (int i = threadIdx.x; i < plan.group_size.value * plan.bias_width; i += kAttentionThreads) {
    const int head = kv_head * plan.group_size.value + i / plan.bias_width;
    const int bucket = position_bucket(params.buckets, i % plan.bias_width - plan.bias_origin);
    table[i] = params.position_bias[bucket * params.num_q_heads + head] * kLog2E;
  }
}

// The part of the table that a row reads.
class RowBias {
 public:
  RowBias() = default;
  // For head `head` of the group and the query at `position`.
  __device__ __forceinline__ RowBias(const AttentionPlan& plan, Shared<float> table, int head,
                                     int position)
      : at_(table + (head * plan.bias_width + plan.bias_origin)), position_(position) {}

  // The bias of a key at any distance.
  __device__ __forceinline__ float of(const AttentionPlan& plan, int key) const {
    return at_[min(max(key - position_, -plan.bias_before), plan.bias_ahead)];
  }
  // The biases of a key and the keys after it, in a step that is not far as a whole.
  __device__ __forceinline__ Shared<float> from(int key) const { return at_ + (key - position_); }

 private:
  Shared<float> at_;  // of relative position 0
  int position_;
};

// Whether all keys [first_key, first_key + count) are so far from the queries at positions
// [first_position, last_position], on one side, that each query has one bias for all of them.
__device__ __forceinline__ bool has_one_bias(const AttentionPlan& plan, int first_key, int count,
                                             int first_position, int last_position) {
  return first_key + count - 1 - first_position <= -plan.bias_before ||
         first_key - last_position >= plan.bias_ahead;
}

}  // namespace eecore::cuda
