// sample_tokens on the CPU: one thread for a row of logits, which it keeps in float32. The largest
// of every block of logits is known, so that filters look at the blocks that can pass alone; what
// passes is packed, and order statistics are found by bisection among the few that are left.
#include "draw.h"
#include "philox.h"
#include "scratch.h"
#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int64_t kBlock = 64;  // logits, a multiple of kWidth
constexpr float kInfinity = __builtin_inff();
constexpr float kMinTemperature = 1e-30f;  // with the largest logit at 0 no other infinity arises

// Of a scaled logit, which is 0 or less: the smaller the key, the more probable the token.
inline uint32_t key_of(float scaled) {
  uint32_t bits;
  __builtin_memcpy(&bits, &scaled, 4);
  return bits & 0x7fffffffu;
}

struct Entry {
  uint32_t key;
  float weight;
};

// What a thread needs for one row after the other.
struct Row {
  explicit Row(int64_t vocab_size)
      : vocab_size(vocab_size),
        num_blocks(ceil_div(vocab_size, kBlock)),
        values(num_blocks * kBlock),
        weights(num_blocks * kBlock),
        largest(num_blocks),
        ids(num_blocks * kBlock),
        entries(num_blocks * kBlock) {}

  int64_t vocab_size, num_blocks;
  Scratch<float> values;   // [vocab_size], filled up with -infinity; later [count]
  Scratch<float> weights;  // exp of the scaled values
  Scratch<float> largest;  // [num_blocks] of values
  Scratch<int32_t> ids;    // [count], ascending, once packed
  Scratch<Entry> entries;  // [count], in no order
  int64_t count;           // of values
  bool packed;             // value i is that of token ids[i], and not of i
  int64_t token_of(int64_t i) const { return packed ? ids[i] : i; }
};

// Loads 32 logits, or the `count` that are left of them, -infinity for tokens that are not allowed;
// false where one that is allowed is NaN.
template <typename T>
bool load_word(const T* logits, uint32_t allowed, int64_t count, float* values) {
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

// Loads the logits of allowed tokens, -infinity for the others; false where one is NaN.
template <typename T>
bool load_allowed(const T* logits, const int32_t* allowed, Row& row) {
  row.count = row.vocab_size;
  row.packed = false;
  bool known = true;
  for (int64_t begin = 0; begin < row.num_blocks * kBlock; begin += 32) {
    const int64_t count = min_of(max_of(row.vocab_size - begin, int64_t{0}), int64_t{32});
    const uint32_t word = count > 0 ? static_cast<uint32_t>(allowed[begin / 32]) : 0u;
    known = load_word(logits + begin, word, count, row.values.data() + begin) && known;
  }
  return known;
}

// Loads the logits; false where one is NaN.
template <typename T>
bool load_row(const T* logits, const int32_t* allowed, Row& row) {
  if (allowed != nullptr) return load_allowed(logits, allowed, row);
  const int64_t whole = row.vocab_size / kBlock * kBlock;
  // max and min give their second operand where one is NaN: a NaN passes the clamp.
  Vec not_a_number = zero();
  for (int64_t i = 0; i < whole; i += kWidth) {
    const Vec x = load(logits + i);
    store(row.values.data() + i, x);
    not_a_number = not_a_number + min(broadcast(1.0f), max(broadcast(0.0f), x)) * zero();
  }
  float rest = sum(not_a_number);
  for (int64_t i = whole; i < row.num_blocks * kBlock; ++i) {
    row.values[i] = i < row.vocab_size ? to_float(logits[i]) : -kInfinity;
    if (row.values[i] != row.values[i]) rest = row.values[i];
  }
  row.count = row.vocab_size;
  row.packed = false;
  return rest == 0.0f;
}

void find_largest_of_blocks(Row& row) {
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    const float* values = row.values.data() + block * kBlock;
    Vec largest = load(values);
    for (int64_t i = kWidth; i < kBlock; i += kWidth) largest = max(largest, load(values + i));
    row.largest[block] = max_element(largest);
  }
}

struct TopTwo {
  float largest, second;
  int64_t id;  // of the largest, the lowest among equals
};

TopTwo top_two(const Row& row) {
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
  top.id = best * kBlock;
  while (row.values[top.id] != top.largest) ++top.id;
  for (int64_t i = best * kBlock; i < (best + 1) * kBlock; ++i) {
    if (i != top.id && row.values[i] > top.second) top.second = row.values[i];
  }
  return top;
}

// weights = exp(values - shift); returns their sum.
double exponentiate(Row& row, float shift) {
  float* values = row.values.data();
  float* weights = row.weights.data();
  const int64_t end = ceil_div(row.count, kBlock) * kBlock;
  for (int64_t i = row.count; i < end; ++i) values[i] = -kInfinity;
  const Vec shifts = broadcast(shift);
  double total = 0.0;
  for (int64_t block = 0; block < end; block += kBlock) {
    Vec of_block = zero();
    for (int64_t i = block; i < block + kBlock; i += kWidth) {
      const Vec weight = exp(load(values + i) - shifts);
      store(weights + i, weight);
      of_block = of_block + weight;
    }
    total += sum(of_block);
  }
  return total;
}

// The largest values and their ids, equals by ascending id. Weights and entries are used up.
void write_top(int64_t num_top, Row& row, int64_t* ids, float* top) {
  const float taken = __builtin_nanf("");
  float* values = row.weights.data();
  float* largest = reinterpret_cast<float*>(row.entries.data());
  __builtin_memcpy(values, row.values.data(), row.num_blocks * kBlock * sizeof(float));
  __builtin_memcpy(largest, row.largest.data(), row.num_blocks * sizeof(float));
  // Where nothing but NaN is left, none.
  const auto first_largest = [](const float* from, int64_t begin, int64_t end) {
    int64_t best = -1;
    for (int64_t i = begin; i < end; ++i) {
      if (from[i] == from[i] && (best < 0 || from[i] > from[best])) best = i;
    }
    return best;
  };
  for (int64_t k = 0; k < min_of(num_top, row.vocab_size); ++k) {
    const int64_t block = first_largest(largest, 0, row.num_blocks);
    const int64_t begin = block * kBlock, end = min_of(begin + kBlock, row.vocab_size);
    const int64_t id = first_largest(values, begin, end);
    ids[k] = id;
    top[k] = values[id];
    values[id] = taken;
    const int64_t next = first_largest(values, begin, end);
    largest[block] = next < 0 ? taken : values[next];
  }
}

// The place of output row w in its request's round.
int64_t step_of(const SampleTokensParams& params, int64_t w, int64_t request) {
  const int64_t first = params.first_position[request];
  return wrapping_add(wrapping_add(params.positions[w], ~first), 1);
}

// The mask of output row w; null where all tokens are allowed.
const int32_t* mask_of(const SampleTokensParams& params, int64_t w, int64_t request) {
  if (params.allowed == nullptr) return nullptr;
  const int64_t step = params.first_position == nullptr ? 0 : step_of(params, w, request);
  if (step < 0 || step >= params.num_masks) return nullptr;
  const int64_t num_words = ceil_div(params.vocab_size, int64_t{32});
  return params.allowed + (request * params.num_masks + step) * num_words;
}

struct Penalties {
  float repetition, presence, frequency;

  Penalties(const SampleTokensParams& params, int64_t request)
      : repetition(params.repetition_penalty[request]),
        presence(params.presence_penalty != nullptr ? params.presence_penalty[request] : 0.0f),
        frequency(params.frequency_penalty != nullptr ? params.frequency_penalty[request] : 0.0f) {}

  bool any() const { return repetition != 1.0f || presence != 0.0f || frequency != 0.0f; }
};

// visit(token, is_generated) for what a penalty may count, within the vocabulary.
template <typename Visit>
void visit_text(const SampleTokensParams& params, int64_t w, int64_t request, Visit visit) {
  const auto visit_known = [&](int64_t token, bool is_generated) {
    if (token >= 0 && token < params.vocab_size) visit(token, is_generated);
  };
  const int64_t* seen = params.seen + request * params.num_seen;
  for (int64_t i = 0; i < params.num_seen; ++i) visit_known(seen[i], false);
  const int64_t* generated = params.generated + request * params.num_generated;
  for (int64_t i = 0; i < params.num_generated; ++i) visit_known(generated[i], true);
  if (params.round_tokens == nullptr) return;
  const int64_t* drafts = params.round_tokens + request * params.round_width;
  const int64_t last = min_of(step_of(params, w, request), params.round_width - 1);
  for (int64_t i = 1; i <= last; ++i) {
    visit_known(drafts[i], false);
    visit_known(drafts[i], true);
  }
}

// Adds biases, then penalises: a token once, whatever it occurs in. Returns whether a value may
// have changed.
bool change_values(const SampleTokensParams& params, int64_t w, int64_t request, Row& row) {
  bool changed = false;
  for (int64_t i = request * params.num_bias; i < (request + 1) * params.num_bias; ++i) {
    const int64_t token = params.bias_ids[i];
    if (token < 0 || token >= row.vocab_size) continue;
    row.values[token] += params.bias[i];
    changed = true;
  }
  const Penalties penalties(params, request);
  if (!penalties.any()) return changed;
  constexpr int32_t kSeen = 1 << 30;  // the bits below count
  int32_t* marks = row.ids.data();
  visit_text(params, w, request, [=](int64_t token, bool) { marks[token] = 0; });
  visit_text(params, w, request, [=](int64_t token, bool is_generated) {
    marks[token] = is_generated ? marks[token] + 1 : marks[token] | kSeen;
  });
  visit_text(params, w, request, [&](int64_t token, bool) {
    const int32_t mark = marks[token], count = mark & (kSeen - 1);
    marks[token] = 0;
    float value = row.values[token];
    if ((mark & kSeen) != 0) {
      value = value > 0.0f ? value / penalties.repetition : value * penalties.repetition;
    }
    value -= penalties.frequency * static_cast<float>(count);
    if (count > 0) value -= penalties.presence;
    row.values[token] = value;
  });
  return true;
}

// values = (values - largest) / temperature
void scale(float largest, float temperature, Row& row) {
  temperature = temperature > kMinTemperature ? temperature : kMinTemperature;
  const Vec shift = broadcast(largest), divisor = broadcast(temperature);
  for (int64_t i = 0; i < row.num_blocks * kBlock; i += kWidth) {
    store(row.values.data() + i, (load(row.values.data() + i) - shift) / divisor);
  }
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    row.largest[block] = (row.largest[block] - largest) / temperature;
  }
}

// The smallest key for which the entries up to it weigh `target` or more, and what those below it
// weigh. Entries are moved about.
uint32_t weighted_key(Entry* entries, int64_t count, double target, double* below) {
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

// Keeps the tokens for which keep(value, weight) holds, from first to last; `kWeights`: and their
// weights.
template <bool kWeights, typename Keep>
void keep_if(Row& row, const Keep& keep) {
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

// Keeps the tokens of keys up to `limit`, of a row that is not packed; of their blocks alone is
// read.
void pack(uint32_t limit, Row& row) {
  int64_t kept = 0;
  for (int64_t block = 0; block < row.num_blocks; ++block) {
    if (key_of(row.largest[block]) > limit) continue;
    const int64_t end = min_of((block + 1) * kBlock, row.vocab_size);
    for (int64_t i = block * kBlock; i < end; ++i) {
      const float value = row.values[i];
      row.ids[kept] = static_cast<int32_t>(i);
      row.values[kept] = value;
      kept += key_of(value) <= limit;
    }
  }
  row.count = kept;
  row.packed = true;
}

// Keeps the k largest and what equals the last of them.
void keep_top_k(int64_t k, Row& row) {
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

// A key up to which tokens weigh `target` or more, of a row that is not packed.
uint32_t key_with_mass(double target, const Row& row) {
  for (float bound = -1.0f; bound >= -64.0f; bound *= 2.0f) {
    double mass = 0.0;
    for (int64_t block = 0; block < row.num_blocks; ++block) {
      if (!(row.largest[block] >= bound)) continue;
      mass += sum_of_weights(
          [&](int64_t i) {
            return row.values[i] >= bound ? static_cast<double>(row.weights[i]) : 0.0;
          },
          block * kBlock, (block + 1) * kBlock);
    }
    if (mass >= target) return key_of(bound);
  }
  return ~uint32_t{0};
}

// Keeps the most probable tokens, lower ids first among equals, while those before a token have
// less than top_p of the mass. Leaves weights.
void keep_top_p(float top_p, Row& row) {
  const double share = static_cast<double>(top_p) * kTopPShare * exponentiate(row, 0.0f);
  const double target = share > 0.0 ? share : 0x1p-1000;  // the first always stays
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

// Keeps the tokens of min_p times the largest probability or more. Leaves weights.
void keep_min_p(float min_p, Row& row) {
  const float least = min_p < 1.0f ? min_p : 1.0f;  // the largest always stays
  // Few are left to be weighed where a bound on the values lets none pass but those and a few more.
  if (!row.packed) pack(key_of(__builtin_logf(least) - 0.01f), row);
  exponentiate(row, 0.0f);
  keep_if<true>(row, [=](float, float weight) { return weight >= least; });
}

void write_probs(const Row& row, double total, float* probs) {
  if (!row.packed) {
    for (int64_t i = 0; i < row.vocab_size; ++i) {
      probs[i] = static_cast<float>(static_cast<double>(row.weights[i]) / total);
    }
    return;
  }
  __builtin_memset(probs, 0, row.vocab_size * sizeof(float));
  for (int64_t i = 0; i < row.count; ++i) {
    probs[row.ids[i]] = static_cast<float>(static_cast<double>(row.weights[i]) / total);
  }
}

// Where the distribution of output row w goes; null where nobody wants it.
float* probs_row(const SampleTokensParams& params, int64_t w, int64_t request) {
  if (params.probs == nullptr) return nullptr;
  if (params.probs_by_step == 0) return params.probs + w * params.vocab_size;
  const int64_t step = step_of(params, w, request);
  if (step < 0 || step >= params.probs_by_step) return nullptr;
  return params.probs + (request * params.probs_by_step + step) * params.vocab_size;
}

struct Chosen {
  int64_t token;  // -1: none
  float probability;
};

// Draws from what the filters leave of a row whose weights may be those of its values already.
Chosen draw_token(const SampleTokensParams& params, int64_t request, double u, bool has_weights,
                  float* probs, Row& row) {
  const int64_t top_k = params.top_k[request];
  const float top_p = params.top_p[request], min_p = params.min_p[request];
  const bool by_count = top_k > 0 && top_k < row.vocab_size;
  if (by_count) keep_top_k(top_k, row);
  if (top_p < 1.0f) keep_top_p(top_p, row);
  if (min_p > 0.0f) keep_min_p(min_p, row);
  const bool filtered = top_p < 1.0f || min_p > 0.0f;
  if (!filtered && (by_count || !has_weights)) exponentiate(row, 0.0f);
  double total;
  const float* weights = row.weights.data();
  const int64_t at =
      draw([=](int64_t i) { return static_cast<double>(weights[i]); }, row.count, u, &total);
  if (at < 0) return {-1, 0.0f};
  if (probs != nullptr) write_probs(row, total, probs);
  return {row.token_of(at), static_cast<float>(static_cast<double>(weights[at]) / total)};
}

void write_nothing_known(const SampleTokensParams& params, int64_t w, float* probs) {
  const float nan = __builtin_nanf("");
  params.token[w] = -1;
  params.confidence[w] = params.logprob[w] = params.logsumexp[w] = nan;
  if (probs != nullptr) __builtin_memset(probs, 0, params.vocab_size * sizeof(float));
}

template <typename T>
void sample_row(const SampleTokensParams& params, int64_t j, Row& row) {
  const int64_t w = params.index != nullptr ? params.index[j] : j;
  const int64_t request = params.row != nullptr ? params.row[w] : w;
  if (params.kind != nullptr && params.kind[request] != params.wanted) return;
  const T* logits = static_cast<const T*>(params.logits) + j * params.logits_stride;
  float* probs = probs_row(params, w, request);
  const int64_t seed = params.seed[request], position = wrapping_add(params.positions[w], 1);
  if (params.uniform != nullptr) {
    const RandomWords random = random_words(seed, position, kAcceptancePurpose);
    for (int i = 0; i < 2; ++i) params.uniform[2 * w + i] = uniform_float(random, i);
  }
  for (int64_t k = 0; k < params.num_top; ++k) {
    params.top_ids[w * params.num_top + k] = -1;
    params.top_logprobs[w * params.num_top + k] = -kInfinity;
  }

  // The raw distribution, of allowed tokens.
  if (!load_row(logits, mask_of(params, w, request), row))
    return write_nothing_known(params, w, probs);
  find_largest_of_blocks(row);
  const TopTwo raw = top_two(row);
  if (!__builtin_isfinite(raw.largest)) return write_nothing_known(params, w, probs);
  int64_t* top_ids = params.top_ids + w * params.num_top;
  float* top_logprobs = params.top_logprobs + w * params.num_top;
  write_top(params.num_top, row, top_ids, top_logprobs);
  const float total = static_cast<float>(exponentiate(row, raw.largest));
  const float logsumexp = raw.largest + __builtin_logf(total);
  for (int64_t k = 0; k < params.num_top; ++k) top_logprobs[k] -= logsumexp;

  // The one that the request asks for.
  const float temperature = params.temperature[request];
  const bool changed = change_values(params, w, request, row);
  TopTwo best = raw;
  if (changed) {
    find_largest_of_blocks(row);
    best = top_two(row);
  }
  Chosen chosen{-1, 0.0f};
  if (__builtin_isfinite(best.largest)) {
    if (temperature > 0.0f) {
      scale(best.largest, temperature, row);
      const double u = uniform_double(random_words(seed, position, params.purpose));
      chosen = draw_token(params, request, u, !changed && temperature == 1.0f, probs, row);
    } else {
      chosen.token = best.id;
    }
  }
  const bool one_hot = chosen.token >= 0 && !(temperature > 0.0f);
  if (probs != nullptr && (one_hot || chosen.token < 0)) {
    __builtin_memset(probs, 0, row.vocab_size * sizeof(float));
    if (one_hot) probs[chosen.token] = 1.0f;
  }

  const float logprob =
      chosen.token < 0 ? __builtin_nanf("") : to_float(logits[chosen.token]) - logsumexp;
  if (!(temperature > 0.0f)) chosen.probability = __builtin_expf(logprob);
  params.token[w] = chosen.token;
  params.logprob[w] = logprob;
  params.logsumexp[w] = logsumexp;
  params.confidence[w] = !params.as_probability
                             ? (0.0f - __builtin_expm1f(raw.second - raw.largest)) / total
                             : (chosen.token < 0 ? __builtin_nanf("") : chosen.probability);
}

}  // namespace

void run_sample_tokens(const SampleTokensParams& params, const Parallel& parallel) {
  if (params.num_rows == 0) return;
  constexpr int64_t kBytesPerLogit = 32;  // that could be read while one is gone through
  const int64_t grain = max_of(parallel.bytes_per_range / (params.vocab_size * kBytesPerLogit), 1);
  parallel_for(parallel, params.num_rows, grain, [&](int64_t begin, int64_t end) {
    Row row(params.vocab_size);
    for (int64_t j = begin; j < end; ++j) {
      if (params.dtype == DType::kFloat32) {
        sample_row<float>(params, j, row);
      } else {
        sample_row<BFloat16>(params, j, row);
      }
    }
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
