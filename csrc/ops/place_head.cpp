// place_head: copies what the head gives for some rows to the outputs of all rows.
#include "backend.h"
#include "index_checks.h"
#include "measure_arguments.h"

namespace eecore {
namespace {

void place_head(Tensor confidence, Tensor token, Tensor logsumexp, Tensor top_logit,
                const std::optional<Tensor>& index, const std::optional<Tensor>& kind,
                int64_t wanted, const std::optional<Tensor>& measured_at,
                const std::optional<Tensor>& exit_layer, bool as_probability,
                const std::optional<Tensor>& vocabulary, Tensor out_token, Tensor out_confidence,
                Tensor out_logprob, const std::optional<Tensor>& hidden,
                const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& lm_head,
                const std::optional<Tensor>& lm_head_scale,
                const std::optional<Tensor>& lm_head_table, double eps, double multiplier,
                double soft_cap) {
  Checker check("place_head");
  check.all_or_none({{"hidden", hidden}, {"lm_head", lm_head}});
  require_head(check, lm_head, {&norm_weight, &lm_head_scale, &lm_head_table});
  std::optional<ExitConfidenceSoftmaxParams> measure;
  if (hidden.has_value()) {
    check(*hidden, "hidden", Accept::kModel, {"num_selected", "hidden_size"}, 1);
    measure = softmax_params(
        check, "num_selected",
        {norm_weight, *lm_head, lm_head_scale, lm_head_table, eps, multiplier, soft_cap}, *hidden,
        {confidence, token, logsumexp, top_logit});
  } else {
    check.written(confidence, "confidence", Accept::kFloat32, {"num_selected"});
    check.written(token, "token", Accept::kInt64, {"num_selected"});
    check.written(logsumexp, "logsumexp", Accept::kFloat32, {"num_selected"});
    check.written(top_logit, "top_logit", Accept::kFloat32, {"num_selected"});
  }
  const bool has_index = check(index, "index", Accept::kInt32, {"num_selected"});
  check.written(out_token, "out_token", Accept::kInt64, {"num_rows"});
  check.written(out_confidence, "out_confidence", Accept::kFloat32, {"num_rows"});
  check.written(out_logprob, "out_logprob", Accept::kFloat32, {"num_rows"});
  check(kind, "kind", Accept::kInt32, {"num_rows"});
  check.all_or_none({{"measured_at", measured_at}, {"exit_layer", exit_layer}});
  check(measured_at, "measured_at", Accept::kInt32, {"num_rows"});
  check(exit_layer, "exit_layer", Accept::kInt32, {"num_rows"});
  [[maybe_unused]] const bool is_cut =
      check(vocabulary, "vocabulary", Accept::kInt64, {"vocab_size"});
  check.require(wanted >= INT32_MIN && wanted <= INT32_MAX,
                "wanted: expected a kind of 32 bits, got ", wanted);
  check.require(has_index || check["num_selected"] <= check["num_rows"],
                "token: expected at most num_rows=", check["num_rows"],
                " rows without an index, got ", check["num_selected"]);

  PlaceHeadParams params{};
  params.confidence = data<const float>(confidence);
  params.token = data<const int64_t>(token);
  params.logsumexp = data<const float>(logsumexp);
  params.top_logit = data<const float>(top_logit);
  params.index = data_or_null<const int32_t>(index);
  params.kind = data_or_null<const int32_t>(kind);
  params.measured_at = data_or_null<const int32_t>(measured_at);
  params.exit_layer = data_or_null<const int32_t>(exit_layer);
  params.vocabulary = data_or_null<const int64_t>(vocabulary);
  params.out_token = data<int64_t>(out_token);
  params.out_confidence = data<float>(out_confidence);
  params.out_logprob = data<float>(out_logprob);
  params.num_selected = check["num_selected"];
  params.wanted = static_cast<int32_t>(wanted);
  params.as_probability = as_probability;
#ifndef EECORE_BACKEND_CUDA
  if (has_index) {
    check_range(check, "index", params.index, params.num_selected, 0, check["num_rows"]);
  }
  if (is_cut && !measure) {
    check_range(check, "token", params.token, params.num_selected, -1, check["vocab_size"]);
  }
#endif
  if (measure) {
    measure->place = params;
    run_softmax(*measure, *hidden);
  }
  if (!kMeasuresGoOn || !measure) EECORE_RUN(place_head, params, confidence);
}

EECORE_OP(place_head,
          "Tensor(d!) confidence, Tensor(e!) token, Tensor(f!) logsumexp, Tensor(g!) top_logit, "
          "Tensor? index, Tensor? kind, int wanted, Tensor? measured_at, Tensor? exit_layer, "
          "bool as_probability, Tensor? vocabulary, Tensor(a!) out_token, "
          "Tensor(b!) out_confidence, Tensor(c!) out_logprob, Tensor? hidden=None, "
          "Tensor? norm_weight=None, Tensor? lm_head=None, Tensor? lm_head_scale=None, "
          "Tensor? lm_head_table=None, float eps=0., float multiplier=1., float soft_cap=0.")

}  // namespace
}  // namespace eecore
