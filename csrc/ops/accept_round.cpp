// accept_round: the accepted prefix of each row's drafts, greedy or sampled, and where the row's
// text continues.
#include "backend.h"
#include "index_checks.h"

namespace eecore {
namespace {

using OptionalTensor = std::optional<Tensor>;

#ifndef EECORE_BACKEND_CUDA
// Checks the values that the kernel uses as indices or probabilities, before anything is written.
void check_values(const Checker& check, const AcceptRoundParams& params, int64_t max_tokens) {
  if (!holds_values()) return;
  const int64_t num_rows = params.num_rows;
  check_range(check, "num_drafted", params.num_drafted, num_rows, 0, params.num_steps + 1);
  for (int64_t row = 0; row < num_rows; ++row) {
    if (params.most[row] < 0) continue;
    const int64_t first = params.query_start_loc[row], last = first + params.num_drafted[row];
    check.require(first >= 0 && last < max_tokens,
                  "query_start_loc: expected num_drafted + 1 rows below max_tokens=", max_tokens,
                  ", got ", first, " to ", last, " at row ", row);
    if (params.sampled == nullptr || params.sampled[row] == 0) continue;
    for (int64_t i = 2 * first; i < 2 * last; ++i) {
      const float u = params.uniform[i];
      check.require(u >= 0.0f && u < 1.0f, "uniform: expected numbers in [0, 1), got ", u,
                    " at token ", i / 2);  // NaN fails too
    }
  }
}
#endif

void accept_round(const Tensor& tokens, const Tensor& num_drafted, const Tensor& most,
                  const Tensor& first_position, const Tensor& left, const Tensor& query_start_loc,
                  const Tensor& target, Tensor next_token, Tensor next_position, Tensor next_left,
                  Tensor num_accepted, const OptionalTensor& sampled,
                  const OptionalTensor& draft_probs, const OptionalTensor& target_probs,
                  const OptionalTensor& uniform, OptionalTensor last_row) {
  Checker check("accept_round");
  check(tokens, "tokens", Accept::kInt64, {"num_rows", "num_steps + 1"});
  const int64_t num_rows = check["num_rows"], num_steps = check["num_steps + 1"] - 1;
  check.require(num_steps >= 0, "tokens: expected num_steps + 1 >= 1, got 0");
  check.bind("num_rows + 1", num_rows + 1);
  check.bind("num_rows * num_steps", num_rows * num_steps);
  check(num_drafted, "num_drafted", Accept::kInt64, {"num_rows"});
  check(most, "most", Accept::kInt64, {"num_rows"});
  check(first_position, "first_position", Accept::kInt64, {"num_rows"});
  check(left, "left", Accept::kInt64, {"num_rows"});
  check(query_start_loc, "query_start_loc", Accept::kInt32, {"num_rows + 1"});
  check(target, "target", Accept::kInt64, {"max_tokens"});
  check.written(next_token, "next_token", Accept::kInt64, {"num_rows"});
  check.written(next_position, "next_position", Accept::kInt64, {"num_rows"});
  check.written(next_left, "next_left", Accept::kInt64, {"num_rows"});
  check.written(num_accepted, "num_accepted", Accept::kInt64, {"num_rows"});
  check.written(last_row, "last_row", Accept::kInt64, {"num_rows"});
  const bool is_sampled = check.all_or_none({{"sampled", sampled},
                                             {"draft_probs", draft_probs},
                                             {"target_probs", target_probs},
                                             {"uniform", uniform}});
  check(sampled, "sampled", Accept::kBool, {"num_rows"});
  check(draft_probs, "draft_probs", Accept::kFloat32, {"num_rows * num_steps", "vocab_size"});
  check(target_probs, "target_probs", Accept::kFloat32, {"max_tokens", "vocab_size"});
  check(uniform, "uniform", Accept::kFloat32, {"max_tokens", 2});

  AcceptRoundParams params{};
  params.tokens = data<const int64_t>(tokens);
  params.num_drafted = data<const int64_t>(num_drafted);
  params.most = data<const int64_t>(most);
  params.first_position = data<const int64_t>(first_position);
  params.left = data<const int64_t>(left);
  params.query_start_loc = data<const int32_t>(query_start_loc);
  params.target = data<const int64_t>(target);
  params.sampled = data_or_null<const uint8_t>(sampled);
  params.draft_probs = data_or_null<const float>(draft_probs);
  params.target_probs = data_or_null<const float>(target_probs);
  params.uniform = data_or_null<const float>(uniform);
  params.next_token = data<int64_t>(next_token);
  params.next_position = data<int64_t>(next_position);
  params.next_left = data<int64_t>(next_left);
  params.num_accepted = data<int64_t>(num_accepted);
  params.last_row = data_or_null<int64_t>(last_row);
  params.num_rows = num_rows;
  params.num_steps = num_steps;
  params.vocab_size = is_sampled ? check["vocab_size"] : 0;
#ifndef EECORE_BACKEND_CUDA
  check_values(check, params, check["max_tokens"]);
#endif
  EECORE_RUN(accept_round, params, tokens);
}

EECORE_OP(accept_round,
          "Tensor tokens, Tensor num_drafted, Tensor most, Tensor first_position, Tensor left, "
          "Tensor query_start_loc, Tensor target, Tensor(a!) next_token, "
          "Tensor(b!) next_position, Tensor(c!) next_left, Tensor(d!) num_accepted, "
          "Tensor? sampled, Tensor? draft_probs, Tensor? target_probs, Tensor? uniform, "
          "Tensor(e!)? last_row")

}  // namespace
}  // namespace eecore
