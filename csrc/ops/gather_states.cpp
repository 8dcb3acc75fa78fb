// gather_states: the states of a verification's ragged rows, gathered from those kept while
// drafting.
#include "backend.h"
#include "index_checks.h"

namespace eecore {
namespace {

#ifndef EECORE_BACKEND_CUDA
// No sequence may have more rows than states, or reach past the last row.
void check_starts(const Checker& check, const GatherStatesParams& params, int64_t width) {
  if (!holds_values()) return;
  const int32_t* starts = params.query_start_loc;
  check_range(check, "query_start_loc", starts, params.num_seqs + 1, 0, params.max_tokens + 1);
  for (int64_t seq = 0; seq < params.num_seqs; ++seq) {
    const int64_t count = int64_t{starts[seq + 1]} - starts[seq];
    check.require(count >= 0 && count <= width, "query_start_loc: expected 0..num_steps+1=", width,
                  " rows of a sequence, got ", count, " of sequence ", seq);
  }
}
#endif

void gather_states(const Tensor& states, const Tensor& last, const Tensor& sequence,
                   const Tensor& query_start_loc, const Tensor& num_tokens, Tensor out) {
  Checker check("gather_states");
  check(states, "states", Accept::kModel, {"num_seqs", "num_steps + 1", "hidden_size"}, 1);
  check.bind("num_seqs + 1", check["num_seqs"] + 1);
  check(last, "last", Accept::kModel, {"num_seqs", "hidden_size"}, 1);
  check(sequence, "sequence", Accept::kInt32, {"max_tokens"});
  check(query_start_loc, "query_start_loc", Accept::kInt32, {"num_seqs + 1"});
  check(num_tokens, "num_tokens", Accept::kInt32, {1});
  check.written(out, "out", Accept::kModel, {"max_tokens", "hidden_size"}, 1);

  const int64_t element = size_of(check.dtype());
  GatherStatesParams params{};
  params.states = data<const void>(states);
  params.last = data<const void>(last);
  params.sequence = data<const int32_t>(sequence);
  params.query_start_loc = data<const int32_t>(query_start_loc);
  params.num_tokens = data<const int32_t>(num_tokens);
  params.out = data<void>(out);
  params.num_seqs = check["num_seqs"];
  params.max_tokens = check["max_tokens"];
  params.row_bytes = check["hidden_size"] * element;
  params.states_row_stride = states.stride(0) * element;
  params.states_step_stride = states.stride(1) * element;
  params.last_stride = last.stride(0) * element;
  params.out_stride = out.stride(0) * element;
#ifndef EECORE_BACKEND_CUDA
  check_starts(check, params, check["num_steps + 1"]);
#endif
  EECORE_RUN(gather_states, params, states);
}

EECORE_OP(gather_states,
          "Tensor states, Tensor last, Tensor sequence, Tensor query_start_loc, "
          "Tensor num_tokens, Tensor(a!) out")

}  // namespace
}  // namespace eecore
