// begin_verification: the ragged rows with which the full model verifies a round.
#include "backend.h"
#include "index_checks.h"

namespace eecore {
namespace {

void begin_verification(const Tensor& first_position, const Tensor& round_slots,
                        const Tensor& tokens, const Tensor& num_drafted, const Tensor& most,
                        Tensor last_tokens, Tensor last_positions, Tensor last_slots,
                        Tensor last_seq_lens, Tensor token_ids, Tensor positions,
                        Tensor slot_mapping, Tensor sequence, Tensor seq_lens,
                        Tensor query_start_loc, Tensor num_tokens) {
  Checker check("begin_verification");
  check(first_position, "first_position", Accept::kInt64, {"num_rows"});
  const int64_t num_rows = check["num_rows"];
  check.bind("num_rows + 1", num_rows + 1);
  check(round_slots, "round_slots", Accept::kInt64, {"num_rows", "num_steps + 1"});
  check(tokens, "tokens", Accept::kInt64, {"num_rows", "num_steps + 1"});
  check(num_drafted, "num_drafted", Accept::kInt64, {"num_rows"});
  check(most, "most", Accept::kInt64, {"num_rows"});
  check.written(last_tokens, "last_tokens", Accept::kInt64, {"num_rows"});
  check.written(last_positions, "last_positions", Accept::kInt64, {"num_rows"});
  check.written(last_slots, "last_slots", Accept::kInt64, {"num_rows"});
  check.written(last_seq_lens, "last_seq_lens", Accept::kInt32, {"num_rows"});
  check.written(token_ids, "token_ids", Accept::kInt64, {"max_tokens"});
  check.written(positions, "positions", Accept::kInt64, {"max_tokens"});
  check.written(slot_mapping, "slot_mapping", Accept::kInt64, {"max_tokens"});
  check.written(sequence, "sequence", Accept::kInt32, {"max_tokens"});
  check.written(seq_lens, "seq_lens", Accept::kInt32, {"num_rows"});
  check.written(query_start_loc, "query_start_loc", Accept::kInt32, {"num_rows + 1"});
  check.written(num_tokens, "num_tokens", Accept::kInt32, {1});
  const int64_t most_tokens = num_rows * check["num_steps + 1"];
  check.require(check["max_tokens"] >= most_tokens,
                "token_ids: expected at least num_rows * (num_steps + 1)=", most_tokens,
                " rows, got ", check["max_tokens"]);

  BeginVerificationParams params{};
  params.first_position = data<const int64_t>(first_position);
  params.round_slots = data<const int64_t>(round_slots);
  params.tokens = data<const int64_t>(tokens);
  params.num_drafted = data<const int64_t>(num_drafted);
  params.most = data<const int64_t>(most);
  params.last_tokens = data<int64_t>(last_tokens);
  params.last_positions = data<int64_t>(last_positions);
  params.last_slots = data<int64_t>(last_slots);
  params.last_seq_lens = data<int32_t>(last_seq_lens);
  params.token_ids = data<int64_t>(token_ids);
  params.positions = data<int64_t>(positions);
  params.slot_mapping = data<int64_t>(slot_mapping);
  params.sequence = data<int32_t>(sequence);
  params.seq_lens = data<int32_t>(seq_lens);
  params.query_start_loc = data<int32_t>(query_start_loc);
  params.num_tokens = data<int32_t>(num_tokens);
  params.num_rows = num_rows;
  params.num_steps = check["num_steps + 1"] - 1;
  params.max_tokens = check["max_tokens"];
#ifndef EECORE_BACKEND_CUDA
  check_range(check, "num_drafted", params.num_drafted, num_rows, 0, check["num_steps + 1"]);
#endif
  EECORE_RUN(begin_verification, params, first_position);
}

EECORE_OP(begin_verification,
          "Tensor first_position, Tensor round_slots, Tensor tokens, Tensor num_drafted, "
          "Tensor most, Tensor(a!) last_tokens, Tensor(b!) last_positions, Tensor(c!) last_slots, "
          "Tensor(d!) last_seq_lens, Tensor(e!) token_ids, Tensor(f!) positions, "
          "Tensor(g!) slot_mapping, Tensor(h!) sequence, Tensor(i!) seq_lens, "
          "Tensor(j!) query_start_loc, Tensor(k!) num_tokens")

}  // namespace
}  // namespace eecore
