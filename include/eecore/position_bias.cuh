// The position bias of paged_attention, spread out in shared memory by relative position, so that
// the bias of a score is one load at an offset known beforehand.
#pragma once

#include "eecore/attention_tile.cuh"

namespace eecore::cuda {

// Entries beyond the last relative positions with a bias of their own, on both sides. A warp's step
// that reaches such a position from any of its rows reaches no further than this from the others.
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
// the block call it; a barrier makes the table theirs.
__device__ __forceinline__ void spread_position_bias(const PagedAttentionParams& params,
                                                     const AttentionPlan& plan, int kv_head,
                                                     Shared<float> table) {
  for (int i = threadIdx.x; i < plan.group_size.value * plan.bias_width; i += kAttentionThreads) {
    const int head = kv_head * plan.group_size.value + i / plan.bias_width;
    const int bucket = position_bucket(params.buckets, i % plan.bias_width - plan.bias_origin);
    table[i] = params.position_bias[bucket * params.num_q_heads + head] * kLog2E;
  }
}

// A row's part of the table.
class RowBias {
 public:
  RowBias() = default;
  // For head `head` of the group, and the query at `position`.
  __device__ __forceinline__ RowBias(const AttentionPlan& plan, Shared<float> table, int head,
                                     int position)
      : at_(table + (head * plan.bias_width + plan.bias_origin)), position_(position) {}

  // Of a key however far.
  __device__ __forceinline__ float of(const AttentionPlan& plan, int key) const {
    return at_[min(max(key - position_, -plan.bias_behind), plan.bias_ahead)];
  }
  // Of a key of a step that is not all far, and of those behind it.
  __device__ __forceinline__ Shared<float> from(int key) const { return at_ + (key - position_); }

 private:
  Shared<float> at_;  // of relative position 0
  int position_;
};

// Whether all of the keys [first_key, first_key + count) are so far from the queries at positions
// [first_position, last_position], on one side of them, that each query has one bias for all.
__device__ __forceinline__ bool has_one_bias(const AttentionPlan& plan, int first_key, int count,
                                             int first_position, int last_position) {
  return first_key + count - 1 - first_position <= -plan.bias_behind ||
         first_key - last_position >= plan.bias_ahead;
}

}  // namespace eecore::cuda
