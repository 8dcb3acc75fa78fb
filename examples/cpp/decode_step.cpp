// The two ends of a decoding step on eecore's CPU kernels, with plain pointers: attention of one
// new token a sequence to a paged KV cache, then token and confidence of a state without its
// logits. Both are held against loops that do the same.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "eecore/cpu.h"

namespace {

constexpr int64_t kHeads = 8, kKvHeads = 2, kHeadDim = 64, kPageSize = 16, kPages = 12;
constexpr int64_t kSeqs = 3, kMaxPages = 4, kHidden = 96, kVocab = 1000;

std::mt19937 random_bits{1};

std::vector<float> random_floats(int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random_bits);
  return values;
}

bool check(const char* what, float largest) {
  std::printf("%s: largest difference %.2g\n", what, largest);
  return largest < 1e-4f;
}

bool attention() {
  const auto q = random_floats(kSeqs * kHeads * kHeadDim);
  const auto k = random_floats(kPages * kPageSize * kKvHeads * kHeadDim);
  const auto v = random_floats(kPages * kPageSize * kKvHeads * kHeadDim);
  std::vector<float> out(q.size());
  // Pages may lie anywhere: sequence s has keys in pages s, s + 3, s + 6, ...
  std::vector<int32_t> table(kSeqs * kMaxPages), lengths{5, 33, 64}, begin{0, 1, 2, 3};
  for (int64_t s = 0; s < kSeqs; ++s) {
    for (int64_t p = 0; p < kMaxPages; ++p) {
      table[s * kMaxPages + p] = static_cast<int32_t>(s + kSeqs * p);
    }
  }
  eecore::PagedAttentionParams params{};
  params.q = q.data();
  params.k_cache = k.data();
  params.v_cache = v.data();
  params.page_table = table.data();
  params.seq_lens = lengths.data();
  params.query_start_loc = begin.data();
  params.out = out.data();
  params.num_tokens = params.num_seqs = kSeqs;
  params.num_q_heads = kHeads;
  params.num_kv_heads = kKvHeads;
  params.head_dim = kHeadDim;
  params.num_pages = kPages;
  params.page_size = kPageSize;
  params.page_table_stride = params.max_pages_per_seq = kMaxPages;
  params.q_token_stride = params.out_token_stride = kHeads * kHeadDim;
  params.q_head_stride = params.out_head_stride = kHeadDim;
  params.k_cache_strides = {kPageSize * kKvHeads * kHeadDim, kKvHeads * kHeadDim, kHeadDim};
  params.v_cache_strides = params.k_cache_strides;
  params.scale = 1.0f / std::sqrt(static_cast<float>(kHeadDim));
  params.causal = true;
  params.dtype = eecore::DType::kFloat32;
  eecore::cpu::run_paged_attention(params, eecore::cpu::kOneThread);

  float largest = 0.0f;
  for (int64_t s = 0; s < kSeqs; ++s) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const float* query = &q[(s * kHeads + h) * kHeadDim];
      std::vector<double> sum(kHeadDim);
      double total = 0.0;
      for (int64_t j = 0; j < lengths[s]; ++j) {
        const int64_t slot = table[s * kMaxPages + j / kPageSize] * kPageSize + j % kPageSize;
        const int64_t at = (slot * kKvHeads + h * kKvHeads / kHeads) * kHeadDim;
        double score = 0.0;
        for (int64_t d = 0; d < kHeadDim; ++d) score += query[d] * k[at + d];
        const double weight = std::exp(score * params.scale);
        total += weight;
        for (int64_t d = 0; d < kHeadDim; ++d) sum[d] += weight * v[at + d];
      }
      for (int64_t d = 0; d < kHeadDim; ++d) {
        const float got = out[(s * kHeads + h) * kHeadDim + d];
        largest = std::fmax(largest, std::fabs(got - static_cast<float>(sum[d] / total)));
      }
    }
  }
  return check("paged_attention", largest);
}

bool confidence() {
  const auto hidden = random_floats(kSeqs * kHidden), norm = random_floats(kHidden);
  const auto head = random_floats(kVocab * kHidden);
  std::vector<float> gap(kSeqs), top(kSeqs), logsumexp(kSeqs);
  std::vector<int64_t> token(kSeqs);
  eecore::ExitConfidenceSoftmaxParams params{};
  params.hidden = hidden.data();
  params.norm_weight = norm.data();
  params.lm_head = head.data();
  params.confidence = gap.data();
  params.token = token.data();
  params.top_logit = top.data();
  params.logsumexp = logsumexp.data();
  params.num_seqs = kSeqs;
  params.hidden_size = params.hidden_stride = params.lm_head_stride = kHidden;
  params.vocab_size = kVocab;
  params.eps = 1e-6f;
  params.dtype = eecore::DType::kFloat32;
  eecore::cpu::run_exit_confidence_softmax(params, eecore::cpu::kOneThread);

  float largest = 0.0f;
  for (int64_t s = 0; s < kSeqs; ++s) {
    const float* state = &hidden[s * kHidden];
    double squares = 0.0, total = 0.0;
    for (int64_t d = 0; d < kHidden; ++d) squares += state[d] * state[d];
    const double scale = 1.0 / std::sqrt(squares / kHidden + params.eps);
    double best = -1e30, second = -1e30;
    int64_t winner = 0;
    for (int64_t r = 0; r < kVocab; ++r) {
      double logit = 0.0;
      for (int64_t d = 0; d < kHidden; ++d) logit += state[d] * norm[d] * head[r * kHidden + d];
      logit *= scale;
      total += std::exp(logit);
      if (logit > best) winner = r;
      second = std::fmax(second, std::fmin(best, logit));
      best = std::fmax(best, logit);
    }
    if (token[s] != winner) return false;
    const double expected = (std::exp(best) - std::exp(second)) / total;
    largest = std::fmax(largest, std::fabs(gap[s] - static_cast<float>(expected)));
  }
  return check("exit_confidence_softmax", largest);
}

}  // namespace

int main() {
  std::printf("%s kernels\n", eecore::cpu::capability_name(eecore::cpu::active_capability()));
  return attention() && confidence() ? 0 : 1;
}
