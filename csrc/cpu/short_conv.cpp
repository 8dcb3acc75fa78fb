// short_conv on the CPU: threads share the tokens. A row computes u of earlier rows of its own call
// again, and reads those of earlier calls from their pages, so that no row waits for another one.
#include "product_tiles.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int64_t kMaxTaps = 8;

// C: the element type of the state.
template <typename T, typename C>
class Convolution {
 public:
  explicit Convolution(const ShortConvParams& params) : params_(params) {}

  // u of a row's elements from `i` on, rounded as the state holds it.
  Vec own(const T* row, int64_t i, int64_t lanes) const {
    const T* x = row + 2 * params_.hidden_size;
    return round_to<C>(load_lanes(row + i, lanes) * load_lanes(x + i, lanes));
  }

  void keep(int64_t token) const {
    const int64_t slot = params_.slot_mapping[token];
    if (slot < 0) return;
    if (params_.exit_layer != nullptr && params_.exit_layer[token] > params_.layer) return;
    C* kept = static_cast<C*>(params_.state) + slot * params_.hidden_size;
    for (int64_t i = 0; i < params_.hidden_size; i += kWidth) {
      const int64_t lanes = min_of(params_.hidden_size - i, kWidth);
      store_lanes(kept + i, own(row_of(token), i, lanes), lanes);
    }
  }

  // seq: num_seqs for a row of no sequence, which has no earlier positions.
  void convolve(int64_t token, int64_t seq) const {
    int64_t first = token, position = 0;
    if (seq < params_.num_seqs) {
      first = params_.query_start_loc[seq];
      position = params_.seq_lens[seq] - params_.query_start_loc[seq + 1] + token;
    }
    // u of each earlier position: of a row of this call, or kept, or neither and 0.
    const T* rows[kMaxTaps] = {};
    const C* kept[kMaxTaps] = {};
    for (int64_t back = 1; back < params_.num_taps && back <= position; ++back) {
      if (token - back >= first) {
        rows[back] = row_of(token - back);
      } else {
        kept[back] = kept_at(seq, position - back);
      }
    }
    const int64_t n = params_.hidden_size;
    const T* weight = static_cast<const T*>(params_.weight);
    const T* row = row_of(token);
    T* out = static_cast<T*>(params_.out) + token * params_.out_stride;
    for (int64_t i = 0; i < n; i += kWidth) {
      const int64_t lanes = min_of(n - i, kWidth);
      Vec sum = zero();
      for (int64_t tap = 0; tap < params_.num_taps; ++tap) {
        const int64_t back = params_.num_taps - 1 - tap;
        Vec u = zero();
        if (back == 0) {
          u = own(row, i, lanes);
        } else if (rows[back] != nullptr) {
          u = own(rows[back], i, lanes);
        } else if (kept[back] != nullptr) {
          u = load_lanes(kept[back] + i, lanes);
        }
        sum = fma(load_lanes(weight + tap * n + i, lanes), u, sum);
      }
      store_lanes(out + i, load_lanes(row + n + i, lanes) * sum, lanes);
    }
  }

 private:
  const T* row_of(int64_t token) const {
    return static_cast<const T*>(params_.bcx) + token * params_.bcx_stride;
  }
  const C* kept_at(int64_t seq, int64_t position) const {
    const int32_t* pages = params_.page_table + seq * params_.page_table_stride;
    const int64_t page = pages[position / params_.page_size];
    const int64_t slot = page * params_.page_size + position % params_.page_size;
    return static_cast<const C*>(params_.state) + slot * params_.hidden_size;
  }

  const ShortConvParams& params_;
};

template <typename T, typename C>
void run(const ShortConvParams& params, const Parallel& parallel) {
  const int64_t row_bytes = 8 * params.hidden_size * static_cast<int64_t>(sizeof(T));
  const int64_t grain = ceil_div(parallel.bytes_per_range, row_bytes);
  parallel_for(parallel, params.num_tokens, grain, [&](int64_t begin, int64_t end) {
    const Convolution<T, C> convolution(params);
    int64_t seq = 0;
    for (int64_t token = begin; token < end; ++token) {
      convolution.keep(token);
      if (params.weight == nullptr) continue;
      while (seq < params.num_seqs && params.query_start_loc[seq + 1] <= token) ++seq;
      convolution.convolve(token, seq);
    }
  });
}

}  // namespace

void run_short_conv(const ShortConvParams& params, const Parallel& parallel) {
  if (params.dtype != DType::kFloat32) return run<BFloat16, BFloat16>(params, parallel);
  if (params.narrow_state) return run<float, BFloat16>(params, parallel);
  run<float, float>(params, parallel);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
