// sample_tokens on the CPU: one thread per row of logits, which it keeps in float32.
#include "logits_filters.h"
#include "philox.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

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

// Calls visit(token, is_generated) for the tokens that a penalty may count, within the vocabulary.
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

// Adds biases, then penalises each token once, however often it occurs. Returns whether a value may
// have changed.
bool change_values(const SampleTokensParams& params, int64_t w, int64_t request, LogitsRow& row) {
  bool changed = false;
  for (int64_t i = request * params.num_bias; i < (request + 1) * params.num_bias; ++i) {
    const int64_t token = params.bias_ids[i];
    if (token < 0 || token >= row.vocab_size) continue;
    row.values[token] += params.bias[i];
    changed = true;
  }
  const Penalties penalties(params, request);
  if (!penalties.any()) return changed;
  constexpr int32_t kSeen = 1 << 30;  // the lower bits count
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

void write_probs(const LogitsRow& row, double total, float* probs) {
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

// The destination of the distribution of output row w; null where it is not asked for.
float* probs_row(const SampleTokensParams& params, int64_t w, int64_t request) {
  if (params.probs == nullptr) return nullptr;
  if (params.probs_by_step == 0) return params.probs + w * params.vocab_size;
  const int64_t step = step_of(params, w, request);
  if (step < 0 || step >= params.probs_by_step) return nullptr;
  return params.probs + (request * params.probs_by_step + step) * params.vocab_size;
}

struct Chosen {
  int64_t token;  // -1: no token
  float probability;
};

// Draws from the tokens that the filters keep, for a row whose weights may already belong to its
// values.
Chosen draw_token(const SampleTokensParams& params, int64_t request, double u, bool has_weights,
                  float* probs, LogitsRow& row) {
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
void sample_row(const SampleTokensParams& params, int64_t j, LogitsRow& row) {
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

  // The raw distribution over allowed tokens.
  if (!load_logits(logits, mask_of(params, w, request), row))
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

  // The distribution that the request asks for.
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
  constexpr int64_t kBytesPerLogit = 32;  // bytes that could be read while one logit is processed
  const int64_t grain = max_of(parallel.bytes_per_range / (params.vocab_size * kBytesPerLogit), 1);
  parallel_for(parallel, params.num_rows, grain, [&](int64_t begin, int64_t end) {
    LogitsRow row(params.vocab_size);
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
