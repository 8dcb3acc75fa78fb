// The bias of an attention call laid out by relative position r = key position - query position, so
// that the biases of a row's consecutive keys are also consecutive.
#pragma once

#include "scratch.h"
#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Row h of `data` has head h's bias of r at [r - first], for r in [first, last + kWidth). Beyond
// `first` and `last` a head's bias stays constant, or no row sees such a key.
struct PositionBias {
  const float* data;  // [num_q_heads, stride]; null: there is none
  int64_t stride, first, last;

  const float* row(int64_t head) const { return data + head * stride; }

  // scores[j] += row of r + j, for j in [begin, end), multiples of kWidth.
  void add(const float* row, int64_t r, int64_t begin, int64_t end, float* scores) const {
    for (int64_t j = begin; j < end; j += kWidth) {
      const int64_t at = max_of(min_of(r + j, last), first) - first;
      store(scores + j, load(scores + j) + load(row + at));
    }
  }
};

// The range of a call's table: no key of the call is at a smaller or larger relative position.
inline PositionBias plan_position_bias(const PagedAttentionParams& params) {
  PositionBias bias{};
  if (params.position_bias == nullptr) return bias;
  int64_t longest = 0, most_queries = 0;
  for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
    longest = max_of(longest, params.seq_lens[seq]);
    most_queries =
        max_of(most_queries, params.query_start_loc[seq + 1] - params.query_start_loc[seq]);
  }
  const int64_t last_start = params.buckets.starts[params.buckets.num_sided - 1];
  bias.first = -min_of(last_start, longest) - kWidth;
  bias.last = (params.buckets.bidirectional ? min_of(last_start, most_queries) : 0) + 1;
  bias.stride = bias.last + kWidth - bias.first;
  return bias;
}

// Writes a planned table: [num_q_heads, stride].
inline void fill_position_bias(const PagedAttentionParams& params, const PositionBias& bias,
                               float* table) {
  const PositionBuckets& buckets = params.buckets;
  const int64_t num_sided = buckets.num_sided, end = bias.last + kWidth;
  for (int64_t head = 0; head < params.num_q_heads; ++head) {
    float* row = table + head * bias.stride;
    const auto fill = [&](int64_t bucket, int64_t from, int64_t to) {
      const float value = params.position_bias[bucket * params.num_q_heads + head];
      for (int64_t r = max_of(from, bias.first); r < min_of(to, end); ++r) {
        row[r - bias.first] = value;
      }
    };
    for (int64_t bucket = 0; bucket < num_sided; ++bucket) {
      const bool is_last = bucket + 1 == num_sided;
      const int64_t start = buckets.starts[bucket];
      const int64_t next = is_last ? max_of(end, 1 - bias.first) : buckets.starts[bucket + 1];
      fill(bucket, 1 - next, 1 - start);
      if (buckets.bidirectional) fill(num_sided + bucket, max_of(start, 1), next);
    }
    if (!buckets.bidirectional) fill(0, 1, end);
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
