// sample_tokens: from logits to tokens, for requests that sample, change logits or ask for
// log-probabilities.
#include "backend.h"
#include "index_checks.h"

namespace eecore {
namespace {

constexpr int64_t kMaxVocabSize = 1 << 30;  // ids, rounded up, are int32 in the kernels
constexpr int64_t kMaxCounted = 1 << 29;    // counts, including those of a round, have 30 bits

using OptionalTensor = std::optional<Tensor>;

void sample_tokens(const Tensor& logits, const Tensor& temperature, const Tensor& top_k,
                   const Tensor& top_p, const Tensor& min_p, const Tensor& repetition_penalty,
                   const Tensor& seed, const Tensor& seen, const OptionalTensor& presence_penalty,
                   const OptionalTensor& frequency_penalty, const OptionalTensor& generated,
                   const OptionalTensor& bias_ids, const OptionalTensor& bias,
                   const OptionalTensor& allowed, int64_t purpose, const Tensor& positions,
                   const OptionalTensor& index, const OptionalTensor& row,
                   const OptionalTensor& kind, int64_t wanted, const OptionalTensor& round_tokens,
                   const OptionalTensor& first_position, bool as_probability, int64_t probs_by_step,
                   Tensor token, Tensor confidence, Tensor logprob, Tensor logsumexp,
                   OptionalTensor probs, OptionalTensor uniform, OptionalTensor top_ids,
                   OptionalTensor top_logprobs) {
  Checker check("sample_tokens");
  check(logits, "logits", Accept::kModel, {"num_rows", "vocab_size"}, 1);
  check(temperature, "temperature", Accept::kFloat32, {"num_requests"});
  check(top_k, "top_k", Accept::kInt32, {"num_requests"});
  check(top_p, "top_p", Accept::kFloat32, {"num_requests"});
  check(min_p, "min_p", Accept::kFloat32, {"num_requests"});
  check(repetition_penalty, "repetition_penalty", Accept::kFloat32, {"num_requests"});
  check(seed, "seed", Accept::kInt64, {"num_requests"});
  check(seen, "seen", Accept::kInt64, {"num_requests", "num_seen"});
  check(presence_penalty, "presence_penalty", Accept::kFloat32, {"num_requests"});
  check(frequency_penalty, "frequency_penalty", Accept::kFloat32, {"num_requests"});
  check(generated, "generated", Accept::kInt64, {"num_requests", "num_generated"});
  check(bias_ids, "bias_ids", Accept::kInt64, {"num_requests", "num_bias"});
  check(bias, "bias", Accept::kFloat32, {"num_requests", "num_bias"});
  check(allowed, "allowed", Accept::kInt32, {"num_requests", "num_masks", "num_words"});
  check(positions, "positions", Accept::kInt64, {"num_outputs"});
  check(index, "index", Accept::kInt32, {"num_rows"});
  check(row, "row", Accept::kInt32, {"num_outputs"});
  check(kind, "kind", Accept::kInt32, {"num_requests"});
  check(round_tokens, "round_tokens", Accept::kInt64, {"num_requests", "round_width"});
  check(first_position, "first_position", Accept::kInt64, {"num_requests"});
  check.written(token, "token", Accept::kInt64, {"num_outputs"});
  check.written(confidence, "confidence", Accept::kFloat32, {"num_outputs"});
  check.written(logprob, "logprob", Accept::kFloat32, {"num_outputs"});
  check.written(logsumexp, "logsumexp", Accept::kFloat32, {"num_outputs"});
  check.written(probs, "probs", Accept::kFloat32, {"num_probs", "vocab_size"});
  check.written(uniform, "uniform", Accept::kFloat32, {"num_outputs", 2});
  check.written(top_ids, "top_ids", Accept::kInt64, {"num_outputs", "num_top"});
  check.written(top_logprobs, "top_logprobs", Accept::kFloat32, {"num_outputs", "num_top"});
  const int64_t num_requests = check["num_requests"], num_outputs = check["num_outputs"];
  check.require(check["vocab_size"] >= 1 && check["vocab_size"] <= kMaxVocabSize,
                "logits: expected vocab_size of 1 to 1073741824, got ", check["vocab_size"]);
  check.all_or_none({{"bias_ids", bias_ids}, {"bias", bias}});
  if (generated.has_value()) {
    check.require(check["num_generated"] < kMaxCounted, "generated: expected num_generated < ",
                  kMaxCounted, ", got ", check["num_generated"]);
  }
  if (allowed.has_value()) {
    check.require(check["num_words"] == (check["vocab_size"] + 31) / 32,
                  "allowed: expected num_words=", (check["vocab_size"] + 31) / 32, ", got ",
                  check["num_words"]);
  }
  check.require(index.has_value() || check["num_rows"] <= num_outputs,
                "positions: expected num_outputs >= num_rows=", check["num_rows"],
                " without index, got ", num_outputs);
  check.require(row.has_value() || num_outputs <= num_requests,
                "temperature: expected num_requests >= num_outputs=", num_outputs,
                " without row, got ", num_requests);
  check.require(purpose >= 0 && purpose <= UINT32_MAX,
                "purpose: expected a number in [0, 4294967295], got ", purpose);
  check.require(first_position.has_value() || (!round_tokens.has_value() && probs_by_step == 0),
                "first_position: expected it with round_tokens and with probs_by_step, got none");
  check.require(!allowed.has_value() || first_position.has_value() || check["num_masks"] == 1,
                "allowed: expected num_masks=1 without first_position, got ",
                allowed.has_value() ? check["num_masks"] : 0);
  check.require(probs_by_step >= 0 && probs_by_step <= INT32_MAX,
                "probs_by_step: expected a number of 0 to 2147483647, got ", probs_by_step);
  check.require(wanted >= INT32_MIN && wanted <= INT32_MAX,
                "wanted: expected a kind of 32 bits, got ", wanted);
  if (probs.has_value()) {
    const int64_t needed = probs_by_step > 0 ? num_requests * probs_by_step : num_outputs;
    check.require(check["num_probs"] >= needed, "probs: expected num_probs >= ", needed, ", got ",
                  check["num_probs"]);
  }
  check.all_or_none({{"top_ids", top_ids}, {"top_logprobs", top_logprobs}});
  if (index.has_value()) {
    check_range(check, "index", data<const int32_t>(*index), check["num_rows"], 0, num_outputs);
  }
  if (row.has_value()) {
    check_range(check, "row", data<const int32_t>(*row), num_outputs, 0, num_requests);
  }

  SampleTokensParams params{};
  params.logits = data<const void>(logits);
  params.temperature = data<const float>(temperature);
  params.top_k = data<const int32_t>(top_k);
  params.top_p = data<const float>(top_p);
  params.min_p = data<const float>(min_p);
  params.repetition_penalty = data<const float>(repetition_penalty);
  params.seed = data<const int64_t>(seed);
  params.seen = data<const int64_t>(seen);
  params.presence_penalty = data_or_null<const float>(presence_penalty);
  params.frequency_penalty = data_or_null<const float>(frequency_penalty);
  params.generated = data_or_null<const int64_t>(generated);
  params.bias_ids = data_or_null<const int64_t>(bias_ids);
  params.bias = data_or_null<const float>(bias);
  params.allowed = data_or_null<const int32_t>(allowed);
  params.positions = data<const int64_t>(positions);
  params.index = data_or_null<const int32_t>(index);
  params.row = data_or_null<const int32_t>(row);
  params.kind = data_or_null<const int32_t>(kind);
  params.round_tokens = data_or_null<const int64_t>(round_tokens);
  params.first_position = data_or_null<const int64_t>(first_position);
  params.token = data<int64_t>(token);
  params.confidence = data<float>(confidence);
  params.logprob = data<float>(logprob);
  params.logsumexp = data<float>(logsumexp);
  params.probs = data_or_null<float>(probs);
  params.uniform = data_or_null<float>(uniform);
  params.top_ids = data_or_null<int64_t>(top_ids);
  params.top_logprobs = data_or_null<float>(top_logprobs);
  params.num_rows = check["num_rows"];
  params.vocab_size = check["vocab_size"];
  params.num_seen = check["num_seen"];
  params.num_generated = generated.has_value() ? check["num_generated"] : 0;
  params.num_bias = bias_ids.has_value() ? check["num_bias"] : 0;
  params.num_masks = allowed.has_value() ? check["num_masks"] : 0;
  params.round_width = round_tokens.has_value() ? check["round_width"] : 0;
  params.num_top = top_ids.has_value() ? check["num_top"] : 0;
  params.probs_by_step = probs_by_step;
  params.logits_stride = logits.stride(0);
  params.wanted = static_cast<int32_t>(wanted);
  params.purpose = static_cast<uint32_t>(purpose);
  params.as_probability = as_probability;
  params.dtype = check.dtype();
#ifdef EECORE_BACKEND_CUDA
  const Tensor memory =
      workspace(logits, cuda::sample_tokens_workspace(params, current_stream(logits).device));
  params.workspace = data<void>(memory);
#endif
  EECORE_RUN(sample_tokens, params, logits);
}

EECORE_OP(sample_tokens,
          "Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
          "Tensor repetition_penalty, Tensor seed, Tensor seen, Tensor? presence_penalty, "
          "Tensor? frequency_penalty, Tensor? generated, Tensor? bias_ids, Tensor? bias, "
          "Tensor? allowed, int purpose, Tensor positions, Tensor? index, Tensor? row, "
          "Tensor? kind, int wanted, Tensor? round_tokens, Tensor? first_position, "
          "bool as_probability, int probs_by_step, Tensor(a!) token, Tensor(b!) confidence, "
          "Tensor(c!) logprob, Tensor(d!) logsumexp, Tensor(e!)? probs, Tensor(f!)? uniform, "
          "Tensor(g!)? top_ids, Tensor(h!)? top_logprobs")

}  // namespace
}  // namespace eecore
