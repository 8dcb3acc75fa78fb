// Draws one of many by the inverse of their cumulative weight, in double: the sums of blocks first,
// then one by one in the block that is hit.
#pragma once

#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// Weights are never negative, nor NaN.
template <typename Weight>
double sum_of_weights(const Weight& weight, int64_t begin, int64_t end) {
  constexpr int kLanes = 8;
  double lanes[kLanes] = {};
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += weight(i + lane);
  }
  double total = 0.0;
  for (int lane = 0; lane < kLanes; ++lane) total += lanes[lane];
  for (; i < end; ++i) total += weight(i);
  return total;
}

// The index in [0, count) that u in [0, 1) hits; -1 when no weight(index) is positive. Never an
// index of weight 0: the block has a positive sum, and where rounding puts the target past its end,
// the last index with a positive weight is taken. `sum`, where given, is the sum of all weights.
template <typename Weight>
int64_t draw(const Weight& weight, int64_t count, double u, double* sum = nullptr) {
  constexpr int64_t kMaxBlocks = 512;
  const int64_t block_size = max_of(256, ceil_div(count, kMaxBlocks));
  const int64_t num_blocks = ceil_div(count, block_size);
  double block_sums[kMaxBlocks];
  double total = 0.0;
  for (int64_t block = 0; block < num_blocks; ++block) {
    const int64_t begin = block * block_size;
    block_sums[block] = sum_of_weights(weight, begin, min_of(begin + block_size, count));
    total += block_sums[block];
  }
  if (sum != nullptr) *sum = total;
  if (!(total > 0.0)) return -1;

  // The same additions in the same order end at total > target, so a block is always found.
  const double target = u * total;
  double before = 0.0;
  int64_t block = 0;
  while (block + 1 < num_blocks && !(before + block_sums[block] > target)) {
    before += block_sums[block++];
  }
  int64_t last_positive = -1;
  const int64_t end = min_of((block + 1) * block_size, count);
  for (int64_t i = block * block_size; i < end; ++i) {
    const double each = weight(i);
    if (each == 0.0) continue;
    last_positive = i;
    before += each;
    if (before > target) break;
  }
  return last_positive;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
