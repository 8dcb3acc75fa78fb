// exit_confidence_mlp on the CPU: softmax(.)[1] of a linear classifier, threaded over rows, or of
// one with a ReLU hidden layer, threaded over slices of that layer so that each weight is read once
// per group of rows. The slices depend only on inner_size: a row's result depends neither on the
// other rows nor on the number of threads.
#include "scratch.h"
#include "vec.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int kRowBlock = 4;  // rows and weights of one register tile
constexpr int kWeightBlock = 2;
constexpr int64_t kRowGroup = 32;  // rows that share one pass over the weights
constexpr int64_t kMaxSlices = 64;

// out[r][w] = dot(hidden row r, weight row w) for kRows x kWeights rows of n elements.
template <int kRows, int kWeights, typename T>
void dot_tile(const T* hidden, int64_t hidden_stride, const float* weight, int64_t n,
              float (&out)[kRowBlock][kWeightBlock]) {
  Vec sums[kRows][kWeights];
  for (auto& row : sums) {
    for (Vec& x : row) x = zero();
  }
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    Vec w[kWeights];
    for (int c = 0; c < kWeights; ++c) w[c] = load(weight + c * n + i);
    for (int r = 0; r < kRows; ++r) {
      const Vec h = load(hidden + r * hidden_stride + i);
      for (int c = 0; c < kWeights; ++c) sums[r][c] = fma(h, w[c], sums[r][c]);
    }
  }
  if (i < n) {
    Vec w[kWeights];
    for (int c = 0; c < kWeights; ++c) w[c] = load_partial(weight + c * n + i, n - i);
    for (int r = 0; r < kRows; ++r) {
      const Vec h = load_partial(hidden + r * hidden_stride + i, n - i);
      for (int c = 0; c < kWeights; ++c) sums[r][c] = fma(h, w[c], sums[r][c]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kWeights; ++c) out[r][c] = sum(sums[r][c]);
  }
}

template <int kWeights, typename T>
void dot_rows(int64_t num_rows, const T* hidden, int64_t hidden_stride, const float* weight,
              int64_t n, float (&out)[kRowBlock][kWeightBlock]) {
  switch (num_rows) {
    case 1:
      return dot_tile<1, kWeights>(hidden, hidden_stride, weight, n, out);
    case 2:
      return dot_tile<2, kWeights>(hidden, hidden_stride, weight, n, out);
    case 3:
      return dot_tile<3, kWeights>(hidden, hidden_stride, weight, n, out);
    default:
      return dot_tile<4, kWeights>(hidden, hidden_stride, weight, n, out);
  }
}

float softmax_of_second(float logit0, float logit1) {
  return 1.0f / (1.0f + __builtin_expf(logit0 - logit1));
}

template <typename T>
void run_linear(const ExitConfidenceMlpParams& params, const Parallel& parallel) {
  const T* hidden = static_cast<const T*>(params.hidden);
  const int64_t n = params.hidden_size;
  const float bias[2] = {params.bias1 ? params.bias1[0] : 0.0f,
                         params.bias1 ? params.bias1[1] : 0.0f};
  const int64_t grain = ceil_div(int64_t{1} << 16, max_of(n, 1));
  parallel_for(parallel, params.num_seqs, grain, [&](int64_t begin, int64_t end) {
    float logits[kRowBlock][kWeightBlock];
    for (int64_t row = begin; row < end; row += kRowBlock) {
      const int64_t num_rows = min_of(kRowBlock, end - row);
      dot_rows<2>(num_rows, hidden + row * params.hidden_stride, params.hidden_stride,
                  params.weight1, n, logits);
      for (int64_t r = 0; r < num_rows; ++r) {
        params.confidence[row + r] =
            softmax_of_second(logits[r][0] + bias[0], logits[r][1] + bias[1]);
      }
    }
  });
}

// Adds what hidden units begin..end contribute to both logits of num_rows <= kRowBlock rows.
template <typename T>
void add_units(const ExitConfidenceMlpParams& params, const T* hidden, int64_t num_rows,
               int64_t begin, int64_t end, float (*logits)[2]) {
  float units[kRowBlock][kWeightBlock];
  for (int64_t unit = begin; unit < end; unit += kWeightBlock) {
    const int64_t num_units = min_of(kWeightBlock, end - unit);
    const float* weight = params.weight1 + unit * params.hidden_size;
    if (num_units == kWeightBlock) {
      dot_rows<kWeightBlock>(num_rows, hidden, params.hidden_stride, weight, params.hidden_size,
                             units);
    } else {
      dot_rows<1>(num_rows, hidden, params.hidden_stride, weight, params.hidden_size, units);
    }
    for (int64_t c = 0; c < num_units; ++c) {
      const float bias = params.bias1 ? params.bias1[unit + c] : 0.0f;
      const float weight0 = params.weight2[unit + c];
      const float weight1 = params.weight2[params.inner_size + unit + c];
      for (int64_t r = 0; r < num_rows; ++r) {
        float x = units[r][c] + bias;
        x = x < 0.0f ? 0.0f : x;  // NaN stays NaN: it must not look confident
        logits[r][0] += x * weight0;
        logits[r][1] += x * weight1;
      }
    }
  }
}

// What one slice of the hidden layer contributes to both logits of the rows of a group.
struct SliceLogits {
  float rows[kRowGroup][2];
};

template <typename T>
void run_hidden_layer(const ExitConfidenceMlpParams& params, const Parallel& parallel) {
  const T* hidden = static_cast<const T*>(params.hidden);
  const int64_t slice_size = max_of(8, ceil_div(params.inner_size, kMaxSlices));
  const int64_t num_slices = ceil_div(params.inner_size, slice_size);
  const Scratch<SliceLogits> partial(num_slices);
  for (int64_t first_row = 0; first_row < params.num_seqs; first_row += kRowGroup) {
    const int64_t num_rows = min_of(kRowGroup, params.num_seqs - first_row);
    const int64_t work = num_rows * slice_size * params.hidden_size;
    const int64_t grain = ceil_div(int64_t{1} << 16, max_of(work, 1));
    parallel_for(parallel, num_slices, grain, [&](int64_t begin, int64_t end) {
      for (int64_t slice = begin; slice < end; ++slice) {
        const int64_t unit = slice * slice_size;
        const int64_t last_unit = min_of(unit + slice_size, params.inner_size);
        for (int64_t row = 0; row < num_rows; row += kRowBlock) {
          const int64_t block = min_of(kRowBlock, num_rows - row);
          for (int64_t r = 0; r < block; ++r) {
            partial[slice].rows[row + r][0] = partial[slice].rows[row + r][1] = 0.0f;
          }
          add_units(params, hidden + (first_row + row) * params.hidden_stride, block, unit,
                    last_unit, partial[slice].rows + row);
        }
      }
    });
    // Slices are added in order, whichever threads computed them.
    for (int64_t row = 0; row < num_rows; ++row) {
      float logits[2] = {params.bias2 ? params.bias2[0] : 0.0f,
                         params.bias2 ? params.bias2[1] : 0.0f};
      for (int64_t slice = 0; slice < num_slices; ++slice) {
        logits[0] += partial[slice].rows[row][0];
        logits[1] += partial[slice].rows[row][1];
      }
      params.confidence[first_row + row] = softmax_of_second(logits[0], logits[1]);
    }
  }
}

template <typename T>
void run(const ExitConfidenceMlpParams& params, const Parallel& parallel) {
  if (params.weight2 == nullptr) return run_linear<T>(params, parallel);
  run_hidden_layer<T>(params, parallel);
}

}  // namespace

void run_exit_confidence_mlp(const ExitConfidenceMlpParams& params, const Parallel& parallel) {
  if (params.dtype == DType::kFloat32) return run<float>(params, parallel);
  run<BFloat16>(params, parallel);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
