// The tensors of ops that measure the confidence of rows, which exit_rows also takes to measure
// first. `rows` is the name of the batch size in messages: hidden has been checked.
#pragma once

#include "backend.h"
#include "packed_check.h"

namespace eecore {

// Whether the launchers of the measures also run the following step: `accept`, `exit` and `place`
// of their params. Otherwise that is a separate call.
#ifdef EECORE_BACKEND_CUDA
constexpr bool kMeasuresGoOn = true;
#else
constexpr bool kMeasuresGoOn = false;
#endif

inline ExitConfidenceCosineParams cosine_params(Checker& check, const char* rows,
                                                const Tensor& previous, const Tensor& hidden,
                                                const Tensor& confidence) {
  check(previous, "previous", Accept::kModel, {rows, "hidden_size"}, 1);
  check.written(confidence, "confidence", Accept::kFloat32, {rows});

  ExitConfidenceCosineParams params{};
  params.previous = previous.data_ptr();
  params.hidden = hidden.data_ptr();
  params.confidence = data<float>(confidence);
  params.num_seqs = check[rows];
  params.hidden_size = check["hidden_size"];
  params.previous_stride = previous.stride(0);
  params.hidden_stride = hidden.stride(0);
  params.dtype = check.dtype();
  return params;
}

struct MlpWeights {
  const Tensor& weight1;
  const std::optional<Tensor>&bias1, &weight2, &bias2;
};

inline ExitConfidenceMlpParams mlp_params(Checker& check, const char* rows, const MlpWeights& mlp,
                                          const Tensor& hidden, const Tensor& confidence) {
  check(mlp.weight1, "weight1", Accept::kFloat32, {"inner_size", "hidden_size"});
  check(mlp.bias1, "bias1", Accept::kFloat32, {"inner_size"});
  const bool has_hidden_layer = check(mlp.weight2, "weight2", Accept::kFloat32, {2, "inner_size"});
  check(mlp.bias2, "bias2", Accept::kFloat32, {2});
  check.written(confidence, "confidence", Accept::kFloat32, {rows});
  check.require(check["inner_size"] >= 1, "weight1: expected inner_size >= 1, got 0");
  check.require(has_hidden_layer || check["inner_size"] == 2,
                "weight1: expected inner_size=2 without weight2 (one linear layer), got ",
                check["inner_size"]);
  check.require(has_hidden_layer || !mlp.bias2.has_value(),
                "bias2: expected only together with weight2, got bias2 and no weight2");

  ExitConfidenceMlpParams params{};
  params.hidden = hidden.data_ptr();
  params.weight1 = data<const float>(mlp.weight1);
  params.bias1 = data_or_null<const float>(mlp.bias1);
  params.weight2 = data_or_null<const float>(mlp.weight2);
  params.bias2 = data_or_null<const float>(mlp.bias2);
  params.confidence = data<float>(confidence);
  params.num_seqs = check[rows];
  params.hidden_size = check["hidden_size"];
  params.inner_size = check["inner_size"];
  params.hidden_stride = hidden.stride(0);
  params.dtype = check.dtype();
  return params;
}

inline void run_mlp(ExitConfidenceMlpParams params, [[maybe_unused]] const Tensor& hidden) {
#ifdef EECORE_BACKEND_CUDA
  const Tensor memory =
      workspace(hidden, cuda::exit_confidence_mlp_workspace(params, current_stream(hidden).device));
  params.workspace = data<void>(memory);
#endif
  EECORE_RUN(exit_confidence_mlp, params, hidden);
}

struct HeadWeights {
  const std::optional<Tensor>& norm_weight;
  const Tensor& lm_head;
  const std::optional<Tensor>&lm_head_scale, &lm_head_table;
  double eps, multiplier, soft_cap;
};
// Requires an LM head where tensors that belong to one are given.
inline void require_head(const Checker& check, const std::optional<Tensor>& lm_head,
                         std::initializer_list<const std::optional<Tensor>*> others) {
  for (const std::optional<Tensor>* other : others) {
    check.require(lm_head.has_value() || !other->has_value(),
                  "lm_head: expected one with norm_weight, lm_head_scale or lm_head_table, got "
                  "None");
  }
}

struct HeadOutputs {
  const Tensor &confidence, &token;
  const std::optional<Tensor>&logsumexp, &top_logit;
};

inline ExitConfidenceSoftmaxParams softmax_params(Checker& check, const char* rows,
                                                  const HeadWeights& head, const Tensor& hidden,
                                                  const HeadOutputs& out) {
  check(head.norm_weight, "norm_weight", Accept::kModel, {"hidden_size"});
  const WeightCoding coding = check_weight(check, {"lm_head", "lm_head_scale", "lm_head_table"},
                                           head.lm_head, {"vocab_size", "hidden_size"},
                                           head.lm_head_scale, head.lm_head_table, {"vocab_size"});
  check.written(out.confidence, "confidence", Accept::kFloat32, {rows});
  check.written(out.token, "token", Accept::kInt64, {rows});
  check.written(out.logsumexp, "logsumexp", Accept::kFloat32, {rows});
  check.written(out.top_logit, "top_logit", Accept::kFloat32, {rows});
  check.require(check["hidden_size"] >= 1, "hidden: expected hidden_size >= 1, got 0");
  check.require(check["vocab_size"] >= 2 && check["vocab_size"] <= INT32_MAX,
                "lm_head: expected vocab_size of 2 to 2147483647, got ", check["vocab_size"]);
  check.require(head.eps >= 0, "eps: expected a number >= 0, got ", head.eps);
  check.require(head.soft_cap >= 0, "soft_cap: expected a number >= 0, got ", head.soft_cap);

  ExitConfidenceSoftmaxParams params{};
  params.hidden = data<const void>(hidden);
  params.norm_weight = data_or_null<const void>(head.norm_weight);
  params.lm_head = data<const void>(head.lm_head);
  params.lm_head_scale = coding.scale;
  params.lm_head_table = coding.table;
  params.confidence = data<float>(out.confidence);
  params.token = data<int64_t>(out.token);
  params.logsumexp = data_or_null<float>(out.logsumexp);
  params.top_logit = data_or_null<float>(out.top_logit);
  params.num_seqs = check[rows];
  params.hidden_size = check["hidden_size"];
  params.vocab_size = check["vocab_size"];
  params.hidden_stride = hidden.stride(0);
  params.lm_head_stride = head.lm_head.stride(0);
  params.eps = static_cast<float>(head.eps);
  params.multiplier = static_cast<float>(head.multiplier);
  params.soft_cap = static_cast<float>(head.soft_cap);
  params.dtype = check.dtype();
  return params;
}

inline void run_softmax(ExitConfidenceSoftmaxParams params, [[maybe_unused]] const Tensor& hidden) {
#ifdef EECORE_BACKEND_CUDA
  const Tensor memory = workspace(
      hidden, cuda::exit_confidence_softmax_workspace(params, current_stream(hidden).device));
  params.workspace = data<void>(memory);
#endif
  EECORE_RUN(exit_confidence_softmax, params, hidden);
}

}  // namespace eecore
