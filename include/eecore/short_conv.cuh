// short_conv: a block has some features of one row. It computes u of earlier rows of its own call
// again, and reads those of earlier calls from their pages, so that no block waits for another one.
#pragma once

#include "eecore/element.cuh"
#include "eecore/params.h"

namespace eecore::cuda {

constexpr int kShortConvThreads = 128;

// Grid: (num_tokens, blocks of kShortConvThreads features).
template <typename T>
__global__ void __launch_bounds__(kShortConvThreads) short_conv_kernel(ShortConvParams params) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t token = blockIdx.x, n = params.hidden_size;
  const int64_t i = static_cast<int64_t>(blockIdx.y) * kShortConvThreads + threadIdx.x;
  if (i >= n) return;
  const T* row = static_cast<const T*>(params.bcx) + token * params.bcx_stride + i;
  const auto u_of = [&](const T* of) {
    return rounded<T>(__fmul_rn(to_float(of[0]), to_float(of[2 * n])));
  };
  T* state = static_cast<T*>(params.state) + i;
  const float own = u_of(row);
  const int64_t slot = params.slot_mapping[token];
  const bool keeps = params.exit_layer == nullptr || params.exit_layer[token] <= params.layer;
  if (slot >= 0 && keeps) state[slot * n] = from_float<T>(own);
  if (params.weight == nullptr) return;

  // The sequence of the row, by bisection: the last one that starts at it or before it.
  int64_t seq = 0, after = params.num_seqs;
  while (after - seq > 1) {
    const int64_t middle = (seq + after) / 2;
    if (params.query_start_loc[middle] <= token) {
      seq = middle;
    } else {
      after = middle;
    }
  }
  int64_t first = token, position = 0;  // of a row of no sequence: no earlier positions
  if (token < params.query_start_loc[seq + 1]) {
    first = params.query_start_loc[seq];
    position = params.seq_lens[seq] - params.query_start_loc[seq + 1] + token;
  }
  const int32_t* pages = params.page_table + seq * params.page_table_stride;
  const T* weight = static_cast<const T*>(params.weight) + i;
  float sum = 0.0f;
  for (int64_t tap = 0; tap < params.num_taps; ++tap) {
    const int64_t back = params.num_taps - 1 - tap;
    if (back > position && back > 0) continue;
    float u = own;
    if (back > 0 && token - back >= first) {
      u = u_of(row - back * params.bcx_stride);
    } else if (back > 0) {
      const int64_t at = position - back;
      const int64_t page = pages[at / params.page_size];
      u = to_float(state[(page * params.page_size + at % params.page_size) * n]);
    }
    sum = fmaf(to_float(weight[tap * n]), u, sum);
  }
  T* out = static_cast<T*>(params.out) + token * params.out_stride;
  out[i] = from_float<T>(to_float(row[n]) * sum);
}

}  // namespace eecore::cuda
