// place_head: a thread for each row.
#pragma once

#include "eecore/params.h"
#include "eecore/ptx.cuh"

namespace eecore::cuda {

constexpr int kPlaceHeadThreads = 128;

// Grid: ceil(num_selected / kPlaceHeadThreads).
__global__ void __launch_bounds__(kPlaceHeadThreads) place_head_kernel(PlaceHeadParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t j = int64_t{blockIdx.x} * kPlaceHeadThreads + threadIdx.x;
  if (j >= params.num_selected) return;
  const int64_t i = params.index == nullptr ? j : params.index[j];
  if (params.kind != nullptr && params.kind[i] != params.wanted) return;
  const float logprob = params.top_logit[j] - params.logsumexp[j];
  const int64_t token = params.token[j];  // -1: none
  const bool is_cut = params.vocabulary != nullptr && token >= 0;
  params.out_token[i] = is_cut ? params.vocabulary[token] : token;
  params.out_logprob[i] = logprob;
  if (params.measured_at != nullptr && params.measured_at[i] == params.exit_layer[i]) return;
  params.out_confidence[i] = params.as_probability ? expf(logprob) : params.confidence[j];
}

}  // namespace eecore::cuda
