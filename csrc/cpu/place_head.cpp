// place_head on the CPU: a few numbers of a few hundred rows at most, so one thread.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {

void run_place_head(const PlaceHeadParams& params, const Parallel&) {
  for (int64_t j = 0; j < params.num_selected; ++j) {
    const int64_t i = params.index == nullptr ? j : params.index[j];
    if (params.kind != nullptr && params.kind[i] != params.wanted) continue;
    const float logprob = params.top_logit[j] - params.logsumexp[j];
    const int64_t token = params.token[j];  // -1: no token
    const bool is_cut = params.vocabulary != nullptr && token >= 0;
    params.out_token[i] = is_cut ? params.vocabulary[token] : token;
    params.out_logprob[i] = logprob;
    if (params.measured_at != nullptr && params.measured_at[i] == params.exit_layer[i]) continue;
    params.out_confidence[i] =
        params.as_probability ? __builtin_expf(logprob) : params.confidence[j];
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
