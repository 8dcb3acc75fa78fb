// exit_confidence_softmax on the CPU: the LM head is read once, in tiles of vocabulary rows; the
// logits of a tile are kept in a buffer and reduced to one partial per row and tile. Tiles have a
// fixed size and are merged in order, so the result does not depend on the number of threads.
#include "activation.h"
#include "packed_rows.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int64_t kTile = 256;  // vocabulary rows per partial
constexpr float kInfinity = __builtin_inff();

// What is known about a row's logits so far. A NaN among them shows as a NaN in `total`.
struct Partial {
  float largest;  // -infinity at first
  float second;   // the largest of the others
  float total;    // sum of exp(logit - largest)
  int32_t index;  // of the largest; the lowest among equals
};

// The two largest logits, never a NaN, and the index of the first; no total yet. n: a multiple of
// kWidth.
Partial largest_of(const float* logits, int64_t n) {
  Vec firsts = broadcast(-kInfinity), seconds = firsts, places = zero();  // by lane
  for (int64_t i = 0; i < n; i += kWidth) {
    const Vec x = load(logits + i), others = where_greater(x, firsts, firsts, x);
    places = where_greater(x, firsts, broadcast(static_cast<float>(i)), places);
    firsts = where_greater(x, firsts, x, firsts);
    seconds = where_greater(others, seconds, others, seconds);
  }
  float first[kWidth], second[kWidth], place[kWidth];
  store(first, firsts);
  store(second, seconds);
  store(place, places);
  Partial found{-kInfinity, -kInfinity, 0.0f, 0};
  for (int32_t lane = 0; lane < kWidth; ++lane) {
    const int32_t index = static_cast<int32_t>(place[lane]) + lane;
    const bool is_largest = first[lane] > found.largest;
    const bool is_earlier = first[lane] == found.largest && index < found.index;
    const float other = is_largest ? found.largest : first[lane];
    found.second = other > found.second ? other : found.second;
    found.second = second[lane] > found.second ? second[lane] : found.second;
    if (is_largest) found.largest = first[lane];
    if (is_largest || is_earlier) found.index = index;
  }
  return found;
}

// The partial of the logits of a tile's n vocabulary rows, from first_index on; the buffer has room
// to fill the last vector.
Partial fold(float* logits, int64_t n, int64_t first_index) {
  const int64_t whole = ceil_div(n, kWidth) * kWidth;
  for (int64_t i = n; i < whole; ++i) logits[i] = -kInfinity;
  Partial partial = largest_of(logits, whole);
  partial.index += static_cast<int32_t>(first_index);
  const Vec shift = broadcast(partial.largest);
  Vec total = zero();
  if (partial.largest > -kInfinity) {
    for (int64_t i = 0; i < whole; i += kWidth) total = total + exp(load(logits + i) - shift);
  } else {
    // Only -infinity and NaN, which passes the clamp: min and max return their second operand.
    for (int64_t i = 0; i < whole; i += kWidth) {
      total = total + min(broadcast(1.0f), max(broadcast(0.0f), load(logits + i))) * zero();
    }
  }
  partial.total = sum(total);
  return partial;
}

// Merges the partial of later vocabulary rows.
void merge(const Partial& later, Partial* partial) {
  const float before = partial->largest;
  if (later.largest > before) {
    partial->second = later.second > before ? later.second : before;
    partial->largest = later.largest;
    partial->index = later.index;
  } else if (later.largest > partial->second) {
    partial->second = later.largest;
  }
  const float largest = partial->largest;
  // A partial of only -infinity adds its total of 0, or NaN, as it is.
  const auto factor = [&](float from) {
    return from > -kInfinity && from != largest ? __builtin_expf(from - largest) : 1.0f;
  };
  const float a = factor(before), b = factor(later.largest);
  partial->total = partial->total * a + later.total * b;
}

// Scales n logits, with room to fill the last vector, before they are measured.
void scale_logits(const ExitConfidenceSoftmaxParams& params, int64_t n, float* logits) {
  for (int64_t i = 0; i < n; i += kWidth) {
    Vec x = load(logits + i) * broadcast(params.multiplier);
    if (params.soft_cap > 0.0f) x = soft_capped(x, params.soft_cap);
    store(logits + i, x);
  }
}

void write_row(const ExitConfidenceSoftmaxParams& params, int64_t row, const Partial& partial) {
  const float total = partial.total, largest = partial.largest;
  const bool finite = __builtin_isfinite(largest);
  const bool not_a_number = total != total && !(largest == kInfinity);
  // The softmax of infinite logits is not defined.
  params.confidence[row] =
      finite ? (0.0f - __builtin_expm1f(partial.second - largest)) / total : __builtin_nanf("");
  params.token[row] = partial.index;
  if (params.logsumexp) {
    params.logsumexp[row] = finite || not_a_number ? largest + __builtin_logf(total) : largest;
  }
  if (params.top_logit) params.top_logit[row] = not_a_number ? total : largest;
}

template <typename T, typename W>
void measure(const ExitConfidenceSoftmaxParams& params, const Parallel& parallel) {
  const int64_t num_seqs = params.num_seqs, n = params.hidden_size;
  const WeightRows<W> head = weight_rows<W>(params.lm_head, params.lm_head_stride,
                                            params.lm_head_scale, params.lm_head_table);
  const PackedRows<T, W> x(static_cast<const T*>(params.hidden), params.hidden_stride, num_seqs, n,
                           static_cast<const T*>(params.norm_weight), params.eps,
                           {params.lm_head_table, params.vocab_size}, parallel);

  // Partials: [num_tiles, num_seqs].
  const int64_t num_tiles = ceil_div(params.vocab_size, kTile);
  Scratch<Partial> partials(num_tiles * num_seqs);
  const bool scales = params.multiplier != 1.0f || params.soft_cap > 0.0f;
  const int64_t grain = ceil_div(65536, kTile * n);
  parallel_for(parallel, num_tiles, grain, [&](int64_t begin, int64_t end) {
    const Unit<W> unit(num_seqs);
    const int64_t most = rows_at_once<W>(x.stride());
    const Scratch<float> logits(num_seqs * kTile);
    for (int64_t tile = begin; tile < end; ++tile) {
      const int64_t first = tile * kTile, last = min_of(first + kTile, params.vocab_size);
      for (int64_t v = first; v < last; v += kTileRows) {
        const int64_t count = min_of(kTileRows, last - v);
        for (int64_t row = 0; row < num_seqs; row += most) {
          const int64_t rows = min_of(most, num_seqs - row);
          // The last block of rows prefetches; the earlier ones leave this part of the head in
          // cache.
          const bool more = row + most >= num_seqs && v + count < params.vocab_size;
          multiply(unit, head.from(v), count, x.row(row), x.stride(), rows, n,
                   more ? head.row(v + count) : nullptr, &logits[row * kTile + v - first], kTile);
        }
      }
      for (int64_t row = 0; row < num_seqs; ++row) {
        if (scales) scale_logits(params, last - first, &logits[row * kTile]);
        partials[tile * num_seqs + row] = fold(&logits[row * kTile], last - first, first);
      }
    }
  });

  for (int64_t row = 0; row < num_seqs; ++row) {
    Partial whole = partials[row];
    for (int64_t tile = 1; tile < num_tiles; ++tile) merge(partials[tile * num_seqs + row], &whole);
    write_row(params, row, whole);
  }
}

}  // namespace

void run_exit_confidence_softmax(const ExitConfidenceSoftmaxParams& params,
                                 const Parallel& parallel) {
  if (params.num_seqs == 0) return;
  dispatch_weight(params.dtype, params.lm_head_scale, params.lm_head_table, params.num_seqs,
                  [&]<typename T, typename W>() { measure<T, W>(params, parallel); });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
