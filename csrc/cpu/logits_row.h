// A row of logits in float32 with the largest of every block, so that a search for the most
// probable tokens reads only the blocks that can have them.
#pragma once

#include "scratch.h"
#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {

constexpr int64_t kLogitsBlock = 64;  // logits, a multiple of kWidth
constexpr float kInfinity = __builtin_inff();
constexpr float kMinTemperature = 1e-30f;  // with the largest logit at 0 no other infinity arises

// The key of a scaled logit, which is at most 0: the smaller the key, the more probable the token.
inline uint32_t key_of(float scaled) {
  uint32_t bits;
  __builtin_memcpy(&bits, &scaled, 4);
  return bits & 0x7fffffffu;
}

struct Entry {
  uint32_t key;
  float weight;
};

// A thread's buffers for one row after another.
struct LogitsRow {
  explicit LogitsRow(int64_t vocab_size)
      : vocab_size(vocab_size),
        num_blocks(ceil_div(vocab_size, kLogitsBlock)),
        values(num_blocks * kLogitsBlock),
        weights(num_blocks * kLogitsBlock),
        largest(num_blocks),
        ids(num_blocks * kLogitsBlock),
        entries(num_blocks * kLogitsBlock) {}

  int64_t vocab_size, num_blocks;
  Scratch<float> values;   // [vocab_size], padded with -infinity; later [count]
  Scratch<float> weights;  // exp of the scaled values
  Scratch<float> largest;  // [num_blocks] of values
  Scratch<int32_t> ids;    // [count], ascending, once packed
  Scratch<Entry> entries;  // [count], in no order
  int64_t count;           // of values
  bool packed;             // value i belongs to token ids[i], not to token i
  int64_t token_of(int64_t i) const { return packed ? ids[i] : i; }
};

// Loads 32 logits, or the last `count` of them, with -infinity for tokens that are not allowed;
// returns false where an allowed one is NaN.
template <typename T>
bool load_allowed_word(const T* logits, uint32_t allowed, int64_t count, float* values) {
  int32_t unknown = 0;
  if (allowed != 0 && count == 32) {
    for (uint32_t i = 0; i < 32; ++i) {
      const float value = to_float(logits[i]);
      values[i] = (allowed >> i & 1u) != 0 ? value : -kInfinity;
      unknown |= static_cast<int32_t>(values[i] != values[i]);
    }
    return unknown == 0;
  }
  for (int64_t i = 0; i < 32; ++i) {
    values[i] = i < count && (allowed >> i & 1u) != 0 ? to_float(logits[i]) : -kInfinity;
    unknown |= static_cast<int32_t>(values[i] != values[i]);
  }
  return unknown == 0;
}

// Loads the logits of allowed tokens, and -infinity for the rest; returns false where one is NaN.
template <typename T>
bool load_allowed(const T* logits, const int32_t* allowed, LogitsRow& row) {
  row.count = row.vocab_size;
  row.packed = false;
  bool known = true;
  for (int64_t begin = 0; begin < row.num_blocks * kLogitsBlock; begin += 32) {
    const int64_t count = min_of(max_of(row.vocab_size - begin, int64_t{0}), int64_t{32});
    const uint32_t word = count > 0 ? static_cast<uint32_t>(allowed[begin / 32]) : 0u;
    known = load_allowed_word(logits + begin, word, count, row.values.data() + begin) && known;
  }
  return known;
}

// Loads the logits; returns false where one is NaN.
template <typename T>
bool load_logits(const T* logits, const int32_t* allowed, LogitsRow& row) {
  if (allowed != nullptr) return load_allowed(logits, allowed, row);
  const int64_t whole = row.vocab_size / kLogitsBlock * kLogitsBlock;
  // max and min return their second operand where one is NaN: a NaN passes the clamp.
  Vec not_a_number = zero();
  for (int64_t i = 0; i < whole; i += kWidth) {
    const Vec x = load(logits + i);
    store(row.values.data() + i, x);
    not_a_number = not_a_number + min(broadcast(1.0f), max(broadcast(0.0f), x)) * zero();
  }
  float rest = sum(not_a_number);
  for (int64_t i = whole; i < row.num_blocks * kLogitsBlock; ++i) {
    row.values[i] = i < row.vocab_size ? to_float(logits[i]) : -kInfinity;
    if (row.values[i] != row.values[i]) rest = row.values[i];
  }
  row.count = row.vocab_size;
  row.packed = false;
  return rest == 0.0f;
}

inline void find_largest_of_blocks(LogitsRow& row) {
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    const float* values = row.values.data() + block * kLogitsBlock;
    Vec largest = load(values);
    for (int64_t i = kWidth; i < kLogitsBlock; i += kWidth)
      largest = max(largest, load(values + i));
    row.largest[block] = max_element(largest);
  }
}

struct TopTwo {
  float largest, second;
  int64_t id;  // of the largest, the lowest among equals
};

inline TopTwo top_two(const LogitsRow& row) {
  TopTwo top{-kInfinity, -kInfinity, 0};
  int64_t best = 0;
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    if (row.largest[block] > top.largest) {
      top.second = top.largest;
      top.largest = row.largest[block];
      best = block;
    } else if (row.largest[block] > top.second) {
      top.second = row.largest[block];
    }
  }
  top.id = best * kLogitsBlock;
  while (row.values[top.id] != top.largest) ++top.id;
  for (int64_t i = best * kLogitsBlock; i < (best + 1) * kLogitsBlock; ++i) {
    if (i != top.id && row.values[i] > top.second) top.second = row.values[i];
  }
  return top;
}

// weights = exp(values - shift); returns their sum.
inline double exponentiate(LogitsRow& row, float shift) {
  float* values = row.values.data();
  float* weights = row.weights.data();
  const int64_t end = ceil_div(row.count, kLogitsBlock) * kLogitsBlock;
  for (int64_t i = row.count; i < end; ++i) values[i] = -kInfinity;
  const Vec shifts = broadcast(shift);
  double total = 0.0;
  for (int64_t block = 0; block < end; block += kLogitsBlock) {
    Vec of_block = zero();
    for (int64_t i = block; i < block + kLogitsBlock; i += kWidth) {
      const Vec weight = exp(load(values + i) - shifts);
      store(weights + i, weight);
      of_block = of_block + weight;
    }
    total += sum(of_block);
  }
  return total;
}

// The largest values and their ids, equal values by ascending id. Overwrites weights and entries.
inline void write_top(int64_t num_top, LogitsRow& row, int64_t* ids, float* top) {
  const float taken = __builtin_nanf("");
  float* values = row.weights.data();
  float* largest = reinterpret_cast<float*>(row.entries.data());
  __builtin_memcpy(values, row.values.data(), row.num_blocks * kLogitsBlock * sizeof(float));
  __builtin_memcpy(largest, row.largest.data(), row.num_blocks * sizeof(float));
  // -1 where only NaN is left.
  const auto first_largest = [](const float* from, int64_t begin, int64_t end) {
    int64_t best = -1;
    for (int64_t i = begin; i < end; ++i) {
      if (from[i] == from[i] && (best < 0 || from[i] > from[best])) best = i;
    }
    return best;
  };
  for (int64_t k = 0; k < min_of(num_top, row.vocab_size); ++k) {
    const int64_t block = first_largest(largest, 0, row.num_blocks);
    const int64_t begin = block * kLogitsBlock, end = min_of(begin + kLogitsBlock, row.vocab_size);
    const int64_t id = first_largest(values, begin, end);
    ids[k] = id;
    top[k] = values[id];
    values[id] = taken;
    const int64_t next = first_largest(values, begin, end);
    largest[block] = next < 0 ? taken : values[next];
  }
}

// values = (values - largest) / temperature
inline void scale(float largest, float temperature, LogitsRow& row) {
  temperature = temperature > kMinTemperature ? temperature : kMinTemperature;
  const Vec shift = broadcast(largest), divisor = broadcast(temperature);
  for (int64_t i = 0; i < row.num_blocks * kLogitsBlock; i += kWidth) {
    store(row.values.data() + i, (load(row.values.data() + i) - shift) / divisor);
  }
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    row.largest[block] = (row.largest[block] - largest) / temperature;
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
