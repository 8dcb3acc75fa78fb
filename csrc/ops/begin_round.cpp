// begin_round: the start of each row in a round of self-speculation, and how far the row may draft.
#include "backend.h"
#include "condition_argument.h"
#include "index_checks.h"

namespace eecore {
namespace {

using OptionalTensor = std::optional<Tensor>;

void begin_round(const Tensor& token_ids, const Tensor& start, const Tensor& tokens_left,
                 const Tensor& max_drafts, const Tensor& page_table, int64_t page_size,
                 const OptionalTensor& sources, const OptionalTensor& next_token,
                 const OptionalTensor& next_position, const OptionalTensor& next_left,
                 const OptionalTensor& drafts, const OptionalTensor& num_given,
                 const OptionalTensor& ahead_tokens, const OptionalTensor& ahead_probabilities,
                 const OptionalTensor& num_ahead, const OptionalTensor& thresholds,
                 Tensor first_position, Tensor left, Tensor round_slots, Tensor tokens,
                 Tensor num_drafted, Tensor most, Tensor done, Tensor all_done, Tensor row,
                 Tensor active_token_ids, Tensor positions, Tensor slot_mapping, Tensor seq_lens,
                 std::optional<int64_t> condition, bool own_key) {
  Checker check("begin_round");
  check(token_ids, "token_ids", Accept::kInt64, {"num_rows"});
  check(start, "start", Accept::kInt64, {"num_rows"});
  check(tokens_left, "tokens_left", Accept::kInt64, {"num_rows"});
  check(max_drafts, "max_drafts", Accept::kInt64, {"num_rows"});
  check(page_table, "page_table", Accept::kInt32, {"num_rows", "max_pages"}, 1);
  const bool has_sources = check.all_or_none({{"sources", sources},
                                              {"next_token", next_token},
                                              {"next_position", next_position},
                                              {"next_left", next_left}});
  check(sources, "sources", Accept::kInt32, {"num_rows"});
  check(next_token, "next_token", Accept::kInt64, {"num_ended"});
  check(next_position, "next_position", Accept::kInt64, {"num_ended"});
  check(next_left, "next_left", Accept::kInt64, {"num_ended"});
  const bool has_drafts = check.all_or_none({{"drafts", drafts}, {"num_given", num_given}});
  check(drafts, "drafts", Accept::kInt64, {"num_rows", "num_steps"});
  check(num_given, "num_given", Accept::kInt64, {"num_rows"});
  const bool is_ahead = check.all_or_none({{"ahead_tokens", ahead_tokens},
                                           {"ahead_probabilities", ahead_probabilities},
                                           {"num_ahead", num_ahead},
                                           {"thresholds", thresholds}});
  check.require(!is_ahead || (has_sources && has_drafts),
                "ahead_tokens: expected sources and drafts with them, got no ",
                has_sources ? "drafts" : "sources");
  check(ahead_tokens, "ahead_tokens", Accept::kInt64, {"num_ended", "ahead_steps + 1"});
  check(ahead_probabilities, "ahead_probabilities", Accept::kFloat32, {"num_ended", "ahead_steps"});
  check(num_ahead, "num_ahead", Accept::kInt64, {"num_ended"});
  check(thresholds, "thresholds", Accept::kFloat32, {"num_rows"});
  if (is_ahead) {
    const int64_t steps = check["ahead_steps + 1"] - 1;
    check.require(check["ahead_steps"] == steps, "ahead_probabilities: expected [num_ended, ",
                  steps, "], one fewer than ahead_tokens, got [", check["num_ended"], ", ",
                  check["ahead_steps"], "]");
  }
  check.written(first_position, "first_position", Accept::kInt64, {"num_rows"});
  check.written(left, "left", Accept::kInt64, {"num_rows"});
  check.written(round_slots, "round_slots", Accept::kInt64, {"num_rows", "num_steps + 1"});
  check.written(tokens, "tokens", Accept::kInt64, {"num_rows", "num_steps + 1"});
  check.written(num_drafted, "num_drafted", Accept::kInt64, {"num_rows"});
  check.written(most, "most", Accept::kInt64, {"num_rows"});
  check.written(done, "done", Accept::kBool, {"num_rows"});
  check.written(all_done, "all_done", Accept::kBool, {1});
  check.written(row, "row", Accept::kInt32, {"num_rows"});
  check.written(active_token_ids, "active_token_ids", Accept::kInt64, {"num_rows"});
  check.written(positions, "positions", Accept::kInt64, {"num_rows"});
  check.written(slot_mapping, "slot_mapping", Accept::kInt64, {"num_rows"});
  check.written(seq_lens, "seq_lens", Accept::kInt32, {"num_rows"});
  check.require(check["num_steps + 1"] >= 1, "round_slots: expected num_steps + 1 >= 1, got 0");
  check.require(!has_drafts || check["num_steps"] == check["num_steps + 1"] - 1,
                "drafts: expected [num_rows, num_steps=", check["num_steps + 1"] - 1, "], got [",
                check["num_rows"], ", ", has_drafts ? check["num_steps"] : 0, "]");
  check.require(check["num_rows"] == 0 || check["max_pages"] >= 1,
                "page_table: expected max_pages >= 1, got 0");
  check.require(page_size >= 1 && page_size <= INT32_MAX,
                "page_size: expected a number of 1 to 2147483647, got ", page_size);

  BeginRoundParams params{};
  params.token_ids = data<const int64_t>(token_ids);
  params.start = data<const int64_t>(start);
  params.tokens_left = data<const int64_t>(tokens_left);
  params.max_drafts = data<const int64_t>(max_drafts);
  params.page_table = data<const int32_t>(page_table);
  params.sources = data_or_null<const int32_t>(sources);
  params.next_token = data_or_null<const int64_t>(next_token);
  params.next_position = data_or_null<const int64_t>(next_position);
  params.next_left = data_or_null<const int64_t>(next_left);
  params.drafts = data_or_null<const int64_t>(drafts);
  params.num_given = data_or_null<const int64_t>(num_given);
  params.ahead_tokens = data_or_null<const int64_t>(ahead_tokens);
  params.ahead_probabilities = data_or_null<const float>(ahead_probabilities);
  params.num_ahead = data_or_null<const int64_t>(num_ahead);
  params.thresholds = data_or_null<const float>(thresholds);
  params.ahead_steps = is_ahead ? check["ahead_steps"] : 0;
  params.first_position = data<int64_t>(first_position);
  params.left = data<int64_t>(left);
  params.round_slots = data<int64_t>(round_slots);
  params.tokens = data<int64_t>(tokens);
  params.num_drafted = data<int64_t>(num_drafted);
  params.most = data<int64_t>(most);
  params.done = data<uint8_t>(done);
  params.all_done = data<uint8_t>(all_done);
  params.row = data<int32_t>(row);
  params.active_token_ids = data<int64_t>(active_token_ids);
  params.positions = data<int64_t>(positions);
  params.slot_mapping = data<int64_t>(slot_mapping);
  params.seq_lens = data<int32_t>(seq_lens);
  params.num_rows = check["num_rows"];
  params.num_steps = check["num_steps + 1"] - 1;
  params.max_pages = check["max_pages"];
  params.page_table_stride = page_table.stride(0);
  params.page_size = page_size;
  params.own_key = own_key ? 1 : 0;
  params.condition = condition_of(check, token_ids, condition);
#ifndef EECORE_BACKEND_CUDA
  if (has_sources) {
    check_range(check, "sources", params.sources, params.num_rows, -1, check["num_ended"]);
  }
#endif
  EECORE_RUN(begin_round, params, token_ids);
}

EECORE_OP(begin_round,
          "Tensor token_ids, Tensor start, Tensor tokens_left, Tensor max_drafts, "
          "Tensor page_table, int page_size, Tensor? sources, Tensor? next_token, "
          "Tensor? next_position, Tensor? next_left, Tensor? drafts, Tensor? num_given, "
          "Tensor? ahead_tokens, Tensor? ahead_probabilities, Tensor? num_ahead, "
          "Tensor? thresholds, "
          "Tensor(a!) first_position, Tensor(b!) left, Tensor(c!) round_slots, Tensor(d!) tokens, "
          "Tensor(e!) num_drafted, Tensor(f!) most, Tensor(g!) done, Tensor(h!) all_done, "
          "Tensor(i!) row, Tensor(j!) active_token_ids, Tensor(k!) positions, "
          "Tensor(l!) slot_mapping, Tensor(m!) seq_lens, int? condition=None, bool own_key=True")

}  // namespace
}  // namespace eecore
