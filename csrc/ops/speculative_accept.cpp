// speculative_accept: the longest accepted prefix of each sequence's drafts and the token after it,
// greedy (against target_tokens) or lossless sampling (against the two distributions).
#include "backend.h"
#include "index_checks.h"

namespace eecore {
namespace {

using OptionalTensor = std::optional<Tensor>;

// Requires exactly one of the two sets of arguments, complete; returns whether it is the greedy
// one.
bool is_greedy(const Checker& check, const OptionalTensor& target_tokens,
               const OptionalTensor& draft_probs, const OptionalTensor& target_probs,
               const OptionalTensor& uniform) {
  const bool greedy = target_tokens.has_value();
  const int num_sampling = draft_probs.has_value() + target_probs.has_value() + uniform.has_value();
  if (greedy ? num_sampling == 0 : num_sampling == 3) return greedy;
  std::string got = greedy ? " target_tokens" : "";
  if (draft_probs.has_value()) got += " draft_probs";
  if (target_probs.has_value()) got += " target_probs";
  if (uniform.has_value()) got += " uniform";
  check.fail(
      "target_tokens: expected either target_tokens alone (greedy) or draft_probs, target_probs "
      "and uniform (sampling), got" +
      (got.empty() ? " none of them" : got));
}

#ifndef EECORE_BACKEND_CUDA
// Checks the values that the kernel uses as indices or probabilities, before anything is written.
void check_values(const Checker& check, const SpeculativeAcceptParams& params) {
  if (!holds_values()) return;
  const int32_t* start = params.draft_start_loc;
  check.require(start[0] == 0, "draft_start_loc: expected to start at 0, got ", start[0]);
  for (int64_t s = 0; s < params.num_seqs; ++s) {
    if (start[s + 1] < start[s]) {
      check.fail("draft_start_loc: expected a non-decreasing list, got " +
                 std::to_string(start[s]) + " before " + std::to_string(start[s + 1]) +
                 " at sequence " + std::to_string(s));
    }
  }
  if (start[params.num_seqs] != params.num_drafts) {
    check.fail(
        "draft_start_loc: expected to end at num_drafts=" + std::to_string(params.num_drafts) +
        ", got " + std::to_string(start[params.num_seqs]));
  }
  if (params.target_tokens != nullptr) return;
  for (int64_t i = 0; i < params.num_drafts; ++i) {
    const int64_t token = params.draft_tokens[i];
    if (token < 0 || token >= params.vocab_size) {
      check.fail(
          "draft_tokens: expected ids in [0, vocab_size=" + std::to_string(params.vocab_size) +
          "), got " + std::to_string(token) + " at draft " + std::to_string(i));
    }
  }
  for (int64_t i = 0; i < params.num_drafts + params.num_seqs; ++i) {
    if (!(params.uniform[i] >= 0.0f && params.uniform[i] < 1.0f)) {  // NaN fails too
      check.fail("uniform: expected numbers in [0, 1), got " + std::to_string(params.uniform[i]) +
                 " at row " + std::to_string(i));
    }
  }
}
#endif

void speculative_accept(const Tensor& draft_tokens, const Tensor& draft_start_loc,
                        const OptionalTensor& target_tokens, const OptionalTensor& draft_probs,
                        const OptionalTensor& target_probs, const OptionalTensor& uniform,
                        Tensor num_accepted, Tensor next_token) {
  Checker check("speculative_accept");
  const bool greedy = is_greedy(check, target_tokens, draft_probs, target_probs, uniform);
  check(draft_tokens, "draft_tokens", Accept::kInt64, {"num_drafts"});
  check(draft_start_loc, "draft_start_loc", Accept::kInt32, {"num_seqs + 1"});
  check.require(check["num_seqs + 1"] >= 1,
                "draft_start_loc: expected int32 [num_seqs + 1], got int32 [0]");
  check.bind("num_seqs", check["num_seqs + 1"] - 1);
  check.bind("num_drafts + num_seqs", check["num_drafts"] + check["num_seqs"]);
  check(target_tokens, "target_tokens", Accept::kInt64, {"num_drafts + num_seqs"});
  check(draft_probs, "draft_probs", Accept::kFloat32, {"num_drafts", "vocab_size"});
  check(target_probs, "target_probs", Accept::kFloat32, {"num_drafts + num_seqs", "vocab_size"});
  check(uniform, "uniform", Accept::kFloat32, {"num_drafts + num_seqs"});
  check.written(num_accepted, "num_accepted", Accept::kInt32, {"num_seqs"});
  check.written(next_token, "next_token", Accept::kInt64, {"num_seqs"});

  SpeculativeAcceptParams params{};
  params.draft_tokens = data<const int64_t>(draft_tokens);
  params.draft_start_loc = data<const int32_t>(draft_start_loc);
  params.target_tokens = data_or_null<const int64_t>(target_tokens);
  params.draft_probs = data_or_null<const float>(draft_probs);
  params.target_probs = data_or_null<const float>(target_probs);
  params.uniform = data_or_null<const float>(uniform);
  params.num_accepted = data<int32_t>(num_accepted);
  params.next_token = data<int64_t>(next_token);
  params.num_seqs = check["num_seqs"];
  params.num_drafts = check["num_drafts"];
  params.vocab_size = greedy ? 0 : check["vocab_size"];
  check.require(greedy || params.num_seqs == 0 || params.vocab_size > 0,
                "target_probs: expected vocab_size >= 1, got 0");
#ifndef EECORE_BACKEND_CUDA
  check_values(check, params);
#endif
  EECORE_RUN(speculative_accept, params, draft_tokens);
}

EECORE_OP(speculative_accept,
          "Tensor draft_tokens, Tensor draft_start_loc, Tensor? target_tokens, "
          "Tensor? draft_probs, Tensor? target_probs, Tensor? uniform, Tensor(a!) num_accepted, "
          "Tensor(b!) next_token")

}  // namespace
}  // namespace eecore
