// exit_rows: measures rows after a layer, lets rows exit there, keeps what they need later, and
// masks them from then on.
#include "backend.h"
#include "condition_argument.h"
#include "index_checks.h"
#include "measure_arguments.h"

namespace eecore {
namespace {

// How the rows are measured before they exit, if they are measured here: at most one of the three.
struct Measure {
  std::optional<ExitConfidenceSoftmaxParams> softmax;
  std::optional<ExitConfidenceCosineParams> cosine;
  std::optional<ExitConfidenceMlpParams> mlp;

  bool is_there() const { return softmax || cosine || mlp; }
};

// Measures the rows of `hidden`, and lets them exit.
void run(Measure measure, const ExitRowsParams& params, const Tensor& hidden) {
  if (measure.softmax) {
    measure.softmax->exit = params;
    run_softmax(*measure.softmax, hidden);
  }
  if (measure.cosine) {
    measure.cosine->exit = params;
    EECORE_RUN(exit_confidence_cosine, *measure.cosine, hidden);
  }
  if (measure.mlp) {
    measure.mlp->exit = params;
    run_mlp(*measure.mlp, hidden);
  }
  if (!kMeasuresGoOn || !measure.is_there()) EECORE_RUN(exit_rows, params, hidden);
}

void exit_rows(const Tensor& hidden, int64_t layer, std::optional<Tensor> confidence,
               std::optional<Tensor> token, std::optional<Tensor> top_logit,
               std::optional<Tensor> logsumexp, const std::optional<Tensor>& thresholds,
               const std::optional<Tensor>& asked, bool decide, const Tensor& exit_after,
               const Tensor& together, const Tensor& fills, const Tensor& kind, Tensor accepted,
               Tensor exited, Tensor exit_layer, Tensor fill_from, Tensor measured_at,
               Tensor final_confidence, Tensor final_token, Tensor final_logprob, Tensor token_at,
               Tensor pending, Tensor final_hidden, Tensor all_exited, const Tensor& row,
               Tensor slot_mapping, Tensor seq_lens, const std::optional<Tensor>& previous,
               const std::optional<Tensor>& weight1, const std::optional<Tensor>& bias1,
               const std::optional<Tensor>& weight2, const std::optional<Tensor>& bias2,
               const std::optional<Tensor>& norm_weight, const std::optional<Tensor>& lm_head,
               const std::optional<Tensor>& lm_head_scale,
               const std::optional<Tensor>& lm_head_table, double eps,
               std::optional<int64_t> condition, double multiplier, double soft_cap,
               bool cumulative) {
  Checker check("exit_rows");
  check(hidden, "hidden", Accept::kModel, {"num_active", "hidden_size"}, 1);
  check.require(layer >= 1 && layer <= INT32_MAX,
                "layer: expected a positive number of layers that have run, got ", layer);
  check(row, "row", Accept::kInt32, {"num_active"});
  check.written(slot_mapping, "slot_mapping", Accept::kInt64, {"num_active"});
  check.written(seq_lens, "seq_lens", Accept::kInt32, {"num_active"});
  const bool has_asked = check(asked, "asked", Accept::kInt32, {"num_asked"});
  const char* measured = has_asked ? "num_asked" : "num_active";
  const bool has_confidence = confidence.has_value();
  const bool has_head =
      check.all_or_none({{"token", token}, {"top_logit", top_logit}, {"logsumexp", logsumexp}});
  check.require(!has_head || has_confidence,
                "confidence: expected one with token, top_logit and logsumexp, got None");
  const int measures = previous.has_value() + weight1.has_value() + lm_head.has_value();
  if (measures > 1) {
    check.fail(
        "previous: expected one of previous, weight1 and lm_head, got " +
        Checker::given({{"previous", previous}, {"weight1", weight1}, {"lm_head", lm_head}}));
  }
  check.require(
      weight1.has_value() || !(bias1.has_value() || weight2.has_value() || bias2.has_value()),
      "weight1: expected one with bias1, weight2 or bias2, got None");
  require_head(check, lm_head, {&norm_weight, &lm_head_scale, &lm_head_table});
  check.require(measures == 0 || (has_confidence && !has_asked),
                "confidence: expected one of all active rows, to be measured here, got ",
                has_asked ? "one of those asked" : "None");
  check.require(!lm_head.has_value() || has_head,
                "token: expected token, top_logit and logsumexp with lm_head, got none of them");
  Measure measure;
  if (lm_head.has_value()) {
    measure.softmax = softmax_params(
        check, measured,
        {norm_weight, *lm_head, lm_head_scale, lm_head_table, eps, multiplier, soft_cap}, hidden,
        {*confidence, *token, logsumexp, top_logit});
  } else {
    if (previous.has_value()) {
      measure.cosine = cosine_params(check, measured, *previous, hidden, *confidence);
    } else if (weight1.has_value()) {
      measure.mlp =
          mlp_params(check, measured, {*weight1, bias1, weight2, bias2}, hidden, *confidence);
    } else {
      check.written(confidence, "confidence", Accept::kFloat32, {measured});
    }
    check.written(token, "token", Accept::kInt64, {measured});
    check.written(top_logit, "top_logit", Accept::kFloat32, {measured});
    check.written(logsumexp, "logsumexp", Accept::kFloat32, {measured});
  }
  check(exit_after, "exit_after", Accept::kInt32, {"num_rows"});
  const bool has_thresholds = check(thresholds, "thresholds", Accept::kFloat32, {"num_rows"});
  check.require(has_thresholds || !has_confidence,
                "thresholds: expected float32 [num_rows] with a confidence, got None");
  check(together, "together", Accept::kBool, {"num_rows"});
  check(fills, "fills", Accept::kBool, {"num_rows"});
  check(kind, "kind", Accept::kInt32, {"num_rows"});
  check.written(accepted, "accepted", Accept::kBool, {"num_rows"});
  check.written(exited, "exited", Accept::kBool, {"num_rows"});
  check.written(exit_layer, "exit_layer", Accept::kInt32, {"num_rows"});
  check.written(fill_from, "fill_from", Accept::kInt32, {"num_rows"});
  check.written(measured_at, "measured_at", Accept::kInt32, {"num_rows"});
  check.written(final_confidence, "final_confidence", Accept::kFloat32, {"num_rows"});
  check.written(final_token, "final_token", Accept::kInt64, {"num_rows"});
  check.written(final_logprob, "final_logprob", Accept::kFloat32, {"num_rows"});
  check.written(token_at, "token_at", Accept::kInt32, {"num_rows"});
  check.written(pending, "pending", Accept::kInt32, {"num_rows"});
  check.written(final_hidden, "final_hidden", Accept::kModel, {"num_rows", "hidden_size"}, 1);
  check.written(all_exited, "all_exited", Accept::kBool, {1});
  check.require(!cumulative || (has_confidence && !has_head),
                "cumulative: expected False without a confidence or with a head, got True");
  check.require(!condition.has_value() || decide,
                "condition: expected None with decide=False, got one");

  const int64_t element = size_of(check.dtype());
  ExitRowsParams params{};
  params.hidden = data<const void>(hidden);
  params.confidence = data_or_null<const float>(confidence);
  params.token = data_or_null<const int64_t>(token);
  params.top_logit = data_or_null<const float>(top_logit);
  params.logsumexp = data_or_null<const float>(logsumexp);
  params.thresholds = data_or_null<const float>(thresholds);
  params.asked = data_or_null<const int32_t>(asked);
  params.row = data<const int32_t>(row);
  params.slot_mapping = data<int64_t>(slot_mapping);
  params.seq_lens = data<int32_t>(seq_lens);
  params.exit_after = data<const int32_t>(exit_after);
  params.together = data<const uint8_t>(together);
  params.fills = data<const uint8_t>(fills);
  params.kind = data<const int32_t>(kind);
  params.accepted = data<uint8_t>(accepted);
  params.exited = data<uint8_t>(exited);
  params.exit_layer = data<int32_t>(exit_layer);
  params.fill_from = data<int32_t>(fill_from);
  params.measured_at = data<int32_t>(measured_at);
  params.final_confidence = data<float>(final_confidence);
  params.final_token = data<int64_t>(final_token);
  params.final_logprob = data<float>(final_logprob);
  params.token_at = data<int32_t>(token_at);
  params.pending = data<int32_t>(pending);
  params.final_hidden = data<void>(final_hidden);
  params.all_exited = data<uint8_t>(all_exited);
  params.num_active = check["num_active"];
  params.num_asked = has_confidence ? check[measured] : 0;
  params.num_rows = check["num_rows"];
  params.row_bytes = check["hidden_size"] * element;
  params.hidden_stride = hidden.stride(0) * element;
  params.final_hidden_stride = final_hidden.stride(0) * element;
  params.layer = static_cast<int32_t>(layer);
  params.decide = decide;
  params.cumulative = cumulative;
  params.condition = condition_of(check, hidden, condition);
#ifndef EECORE_BACKEND_CUDA
  check_range(check, "row", params.row, params.num_active, 0, params.num_rows);
  if (has_asked) check_range(check, "asked", params.asked, params.num_asked, 0, params.num_active);
#endif
  run(measure, params, hidden);
}

EECORE_OP(exit_rows,
          "Tensor hidden, int layer, Tensor(o!)? confidence, Tensor(p!)? token, "
          "Tensor(q!)? top_logit, Tensor(r!)? logsumexp, Tensor? thresholds, Tensor? asked, "
          "bool decide, Tensor exit_after, Tensor together, Tensor fills, Tensor kind, "
          "Tensor(a!) accepted, Tensor(b!) exited, Tensor(c!) exit_layer, Tensor(d!) fill_from, "
          "Tensor(e!) measured_at, Tensor(f!) final_confidence, Tensor(g!) final_token, "
          "Tensor(h!) final_logprob, Tensor(i!) token_at, Tensor(j!) pending, "
          "Tensor(k!) final_hidden, Tensor(l!) all_exited, Tensor row, Tensor(m!) slot_mapping, "
          "Tensor(n!) seq_lens, Tensor? previous=None, Tensor? weight1=None, Tensor? bias1=None, "
          "Tensor? weight2=None, Tensor? bias2=None, Tensor? norm_weight=None, "
          "Tensor? lm_head=None, Tensor? lm_head_scale=None, Tensor? lm_head_table=None, "
          "float eps=0., int? condition=None, float multiplier=1., float soft_cap=0., "
          "bool cumulative=False")

}  // namespace
}  // namespace eecore
