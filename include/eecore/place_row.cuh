// Copies a row of the head's results to the outputs of all rows. place_head consists of this alone;
// the kernel that ends the head may end with it.
#pragma once

#include "eecore/params.h"

namespace eecore::cuda {

// The output row of the j-th selected row.
__device__ __forceinline__ int64_t placed_row(const PlaceHeadParams& params, int64_t j) {
  return params.index == nullptr ? j : params.index[j];
}

// Whether the head's results for row i are placed.
__device__ __forceinline__ bool is_wanted(const PlaceHeadParams& params, int64_t i) {
  return params.kind == nullptr || params.kind[i] == params.wanted;
}

// Places the j-th selected row; called by one thread.
__device__ __forceinline__ void place_row(const PlaceHeadParams& params, int64_t j) {
  const int64_t i = placed_row(params, j);
  if (!is_wanted(params, i)) return;
  const float logprob = params.top_logit[j] - params.logsumexp[j];
  const int64_t token = params.token[j];  // -1: no token
  const bool is_cut = params.vocabulary != nullptr && token >= 0;
  params.out_token[i] = is_cut ? params.vocabulary[token] : token;
  params.out_logprob[i] = logprob;
  if (params.measured_at != nullptr && params.measured_at[i] == params.exit_layer[i]) return;
  params.out_confidence[i] = params.as_probability ? expf(logprob) : params.confidence[j];
}

}  // namespace eecore::cuda
