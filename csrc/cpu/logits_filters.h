// Filters of a scaled row of logits, whose largest is 0: the tokens that pass are packed, and order
// statistics are found by bisection among the few that remain.
#pragma once

#include "draw.h"
#include "logits_row.h"

namespace eecore::cpu::EECORE_CAPABILITY {

// The smallest key at which the entries up to it weigh `target` or more, and the weight of the
// entries below it. Reorders the entries.
inline uint32_t weighted_key(Entry* entries, int64_t count, double target, double* below) {
  uint32_t low = entries[0].key, high = low;
  for (int64_t i = 1; i < count; ++i) {
    low = entries[i].key < low ? entries[i].key : low;
    high = entries[i].key > high ? entries[i].key : high;
  }
  *below = 0.0;
  while (low < high) {
    const uint32_t middle = low + (high - low) / 2;
    int64_t num_lower = 0;
    double lower = 0.0;
    for (int64_t i = 0; i < count; ++i) {
      const Entry entry = entries[i];
      entries[i] = entries[num_lower];
      entries[num_lower] = entry;
      const bool is_lower = entry.key <= middle;
      num_lower += is_lower;
      lower += is_lower ? static_cast<double>(entry.weight) : 0.0;
    }
    if (*below + lower >= target) {
      high = middle;
      count = num_lower;
    } else {
      *below += lower;
      low = middle + 1;
      entries += num_lower;
      count -= num_lower;
    }
  }
  return high;
}

// Keeps the tokens for which keep(value, weight) holds, from first to last; `kWeights`: also their
// weights.
template <bool kWeights, typename Keep>
void keep_if(LogitsRow& row, const Keep& keep) {
  int64_t kept = 0;
  for (int64_t i = 0; i < row.count; ++i) {
    const int32_t id = static_cast<int32_t>(row.token_of(i));
    const float value = row.values[i], weight = kWeights ? row.weights[i] : 0.0f;
    row.ids[kept] = id;
    row.values[kept] = value;
    if (kWeights) row.weights[kept] = weight;
    kept += keep(value, weight);
  }
  row.count = kept;
  row.packed = true;
}

// Keeps the tokens of keys up to `limit`, for a row that is not packed; reads only the blocks that
// have such tokens.
inline void pack(uint32_t limit, LogitsRow& row) {
  int64_t kept = 0;
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    if (key_of(row.largest[block]) > limit) continue;
    const int64_t end = min_of((block + 1) * kLogitsBlock, row.vocab_size);
    for (int64_t i = block * kLogitsBlock; i < end; ++i) {
      const float value = row.values[i];
      row.ids[kept] = static_cast<int32_t>(i);
      row.values[kept] = value;
      kept += key_of(value) <= limit;
    }
  }
  row.count = kept;
  row.packed = true;
}

// Keeps the k largest, and all equal to the last of these.
inline void keep_top_k(int64_t k, LogitsRow& row) {
  double below;
  if (k <= row.num_blocks) {
    // The k-th largest of the blocks' largest is at most the k-th largest of all.
    for (int64_t block = 0; block < row.num_blocks; ++block) {
      row.entries[block] = {key_of(row.largest[block]), 1.0f};
    }
    pack(weighted_key(row.entries.data(), row.num_blocks, static_cast<double>(k), &below), row);
  }
  for (int64_t i = 0; i < row.count; ++i) row.entries[i] = {key_of(row.values[i]), 1.0f};
  const uint32_t last = weighted_key(row.entries.data(), row.count, static_cast<double>(k), &below);
  keep_if<false>(row, [=](float value, float) { return key_of(value) <= last; });
}

// A key up to which tokens weigh `target` or more, for a row that is not packed.
inline uint32_t key_with_mass(double target, const LogitsRow& row) {
  for (float bound = -1.0f; bound >= -64.0f; bound *= 2.0f) {
    double mass = 0.0;
    for (int64_t block = 0; block < row.num_blocks; ++block) {
      if (!(row.largest[block] >= bound)) continue;
      mass += sum_of_weights(
          [&](int64_t i) {
            return row.values[i] >= bound ? static_cast<double>(row.weights[i]) : 0.0;
          },
          block * kLogitsBlock, (block + 1) * kLogitsBlock);
    }
    if (mass >= target) return key_of(bound);
  }
  return ~uint32_t{0};
}

// Keeps the most probable tokens, lower ids first among equals, while the tokens before a token
// have less than top_p of the mass. Leaves weights in the row.
inline void keep_top_p(float top_p, LogitsRow& row) {
  const double share = static_cast<double>(top_p) * kTopPShare * exponentiate(row, 0.0f);
  const double target = share > 0.0 ? share : 0x1p-1000;  // the first is always kept
  if (!row.packed) {
    pack(key_with_mass(target, row), row);
    exponentiate(row, 0.0f);
  }
  for (int64_t i = 0; i < row.count; ++i) row.entries[i] = {key_of(row.values[i]), row.weights[i]};
  double below;
  const uint32_t last = weighted_key(row.entries.data(), row.count, target, &below);
  int64_t rank = 0;  // among those of the last key
  keep_if<true>(row, [=, &rank](float value, float weight) {
    const uint32_t key = key_of(value);
    if (key != last) return key < last;
    return rank == 0 ? ++rank > 0 : below + static_cast<double>(rank++) * weight < target;
  });
}

// Keeps the tokens of min_p times the largest probability or more. Leaves weights in the row.
inline void keep_min_p(float min_p, LogitsRow& row) {
  const float least = min_p < 1.0f ? min_p : 1.0f;  // the largest is always kept
  // A bound on the values passes only those and a few more, so that few have to be weighed.
  if (!row.packed) pack(key_of(__builtin_logf(least) - 0.01f), row);
  exponentiate(row, 0.0f);
  keep_if<true>(row, [=](float, float weight) { return weight >= least; });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
