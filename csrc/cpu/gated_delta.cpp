// gated_delta on the CPU: threads share the key heads of the sequences. A head runs its positions
// in order, tile by tile of S, so that a tile stays in the first-level cache for a block of
// positions. Positions that are not certain go on in a copy of S.
#include "activation.h"
#include "product_tiles.h"
#include "rms_norm.h"
#include "scratch.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int64_t kBlock = 64;  // positions whose queries, keys and values are ready at a time
constexpr float kLengthEps = 1e-6f;
constexpr int kTileVecs = kDeltaTile / kWidth;

float sigmoid(float x) { return 1.0f / (1.0f + __builtin_expf(-x)); }
float softplus(float x) { return x > 20.0f ? x : __builtin_log1pf(__builtin_expf(x)); }

// What a tile needs of a position.
struct Step {
  const float* key;    // [key_dim], of length 1
  const float* query;  // [key_dim], or null where the position has no output
  const float* value;  // [kDeltaTile]
  float* out;          // [kDeltaTile]
  float decay, beta;
  float overlap;  // the product of key and query
};

// The products of the columns of a tile with a position's key and query.
struct Products {
  Vec key[kTileVecs], query[kTileVecs];
};

// Adds what a row of a tile, in which S of one feature of the keys lies, adds to the products.
template <bool kQueries>
[[gnu::always_inline]] inline void add_row(const Vec* row, const Step& step, int64_t feature,
                                           Products& products) {
  const Vec key = broadcast(step.key[feature]);
  const Vec query = kQueries ? broadcast(step.query[feature]) : zero();
  EECORE_UNROLL
  for (int v = 0; v < kTileVecs; ++v) {
    products.key[v] = fma(row[v], key, products.key[v]);
    if constexpr (kQueries) products.query[v] = fma(row[v], query, products.query[v]);
  }
}

template <bool kQueries>
inline Products multiply(const float* tile, const Step& step, int64_t key_dim) {
  Products products;
  for (int v = 0; v < kTileVecs; ++v) products.key[v] = products.query[v] = zero();
  for (int64_t i = 0; i < key_dim; ++i) {
    Vec row[kTileVecs];
    EECORE_UNROLL
    for (int v = 0; v < kTileVecs; ++v) row[v] = load(tile + i * kDeltaTile + v * kWidth);
    add_row<kQueries>(row, step, i, products);
  }
  return products;
}

// to = decay * from + key * delta, and its products with the next position, where there is one.
template <bool kGoesOn, bool kQueries>
inline Products update(const float* from, float* to, const Step& step, const Vec* delta,
                       const Step* next, int64_t key_dim) {
  Products products;
  for (int v = 0; v < kTileVecs; ++v) products.key[v] = products.query[v] = zero();
  const Vec decay = broadcast(step.decay);
  for (int64_t i = 0; i < key_dim; ++i) {
    const Vec key = broadcast(step.key[i]);
    Vec row[kTileVecs];
    EECORE_UNROLL
    for (int v = 0; v < kTileVecs; ++v) {
      const int64_t at = i * kDeltaTile + v * kWidth;
      row[v] = fma(key, delta[v], decay * load(from + at));
      store(to + at, row[v]);
    }
    if constexpr (kGoesOn) add_row<kQueries>(row, *next, i, products);
  }
  return products;
}

// Runs positions over a tile: from `from` to `to`, which may be the same. What a position reads is
// computed from S before it, so that S after the last one need not be: not unless `kept`.
inline void run_tile(const float* from, float* to, const Step* steps, int64_t count,
                     int64_t key_dim, bool kept) {
  Products products = steps[0].query == nullptr ? multiply<false>(from, steps[0], key_dim)
                                                : multiply<true>(from, steps[0], key_dim);
  for (int64_t i = 0; i < count; ++i) {
    const Step& step = steps[i];
    Vec delta[kTileVecs];
    const Vec decay = broadcast(step.decay), beta = broadcast(step.beta);
    for (int v = 0; v < kTileVecs; ++v) {
      delta[v] = beta * (load(step.value + v * kWidth) - decay * products.key[v]);
      if (step.query == nullptr) continue;
      const Vec overlap = broadcast(step.overlap);
      store(step.out + v * kWidth, fma(overlap, delta[v], decay * products.query[v]));
    }
    const Step* next = i + 1 < count ? steps + i + 1 : nullptr;
    if (next == nullptr) {
      if (kept) update<false, false>(from, to, step, delta, next, key_dim);
    } else if (next->query == nullptr) {
      products = update<true, false>(from, to, step, delta, next, key_dim);
    } else {
      products = update<true, true>(from, to, step, delta, next, key_dim);
    }
    from = to;
  }
}

// The positions of a sequence that a call is about.
struct Text {
  int64_t entry;             // of the caches; -1: none, and the text begins with the call
  int64_t first_row;         // of position `first`
  int64_t first, end;        // the positions of the call's rows
  int64_t applied, certain;  // positions that S has, and that it shall have
};

// What a thread needs for a block of positions, and S of a head after positions that are not
// certain.
struct Memory {
  alignas(64) float keys[kBlock * kMaxDeltaDim];
  alignas(64) float queries[kBlock * kMaxDeltaDim];
  alignas(64) float values[kBlock * kMaxDeltaDim];
  alignas(64) float read[kBlock * kMaxDeltaDim];
  alignas(64) float open[kMaxDeltaDim * kMaxDeltaDim];
  Step steps[kBlock];
};

// T: the element type of the model.
template <typename T>
class Delta {
 public:
  explicit Delta(const GatedDeltaParams& params)
      : p_(params),
        memory_(kept_by_thread<Memory>()),
        group_(params.num_value_heads / params.num_key_heads),
        padded_(ceil_div(params.value_dim, kDeltaTile) * kDeltaTile),
        key_size_(params.num_key_heads * params.key_dim),
        conv_size_(2 * key_size_ + params.num_value_heads * params.value_dim) {}

  void run(int64_t seq, int64_t key_head) const {
    const int64_t first_row = p_.query_start_loc[seq], end_row = p_.query_start_loc[seq + 1];
    if (first_row == end_row) return;
    if (p_.exit_layer != nullptr && p_.exit_layer[first_row] > p_.layer) return;
    Text text{};
    const bool has_slot = p_.slot_mapping == nullptr || p_.slot_mapping[first_row] >= 0;
    text.entry = has_slot ? p_.states[seq * p_.states_stride] - 1 : -1;
    text.first_row = first_row;
    text.end = p_.seq_lens[seq];
    text.first = text.applied = text.certain = text.end - (end_row - first_row);
    if (text.entry < 0) {
      if (p_.out == nullptr) return;
      for (int64_t i = 0; i < group_; ++i) compute(text, key_head, value_head(key_head, i));
      return;
    }
    int32_t& applied = p_.applied[text.entry * p_.num_key_heads + key_head];
    text.applied =
        text.first > 0 ? within(applied, text.first - p_.num_kept + kMaxDeltaTaps, text.first) : 0;
    text.certain = within(p_.states[seq * p_.states_stride + 1], text.applied, text.end);
    // Without an output S may wait as long as the rows after it are kept.
    const bool waits = p_.out == nullptr && text.certain - text.applied <= p_.num_kept / 4;
    if (waits) text.certain = text.applied;
    for (int64_t i = 0; i < group_; ++i) {
      const int64_t head = value_head(key_head, i);
      if (text.first <= 0) set_zero(state_of(text.entry, head));
      compute(text, key_head, head);
    }
    applied = static_cast<int32_t>(text.certain);
    keep(text, key_head);
  }

 private:
  static int64_t within(int64_t value, int64_t least, int64_t most) {
    return min_of(max_of(value, least), most);
  }
  // Value head i of those of a key head.
  int64_t value_head(int64_t key_head, int64_t i) const {
    return p_.has_tiled_heads ? i * p_.num_key_heads + key_head : key_head * group_ + i;
  }
  void set_zero(float* head) const {
    __builtin_memset(head, 0, static_cast<uint64_t>(padded_ * p_.key_dim) * sizeof(float));
  }
  float* state_of(int64_t entry, int64_t value_head) const {
    return p_.state + (entry * p_.num_value_heads + value_head) * padded_ * p_.key_dim;
  }
  T* kept_row(int64_t entry, int64_t position) const {
    const int64_t size = conv_size_ + 2 * p_.num_value_heads;
    return static_cast<T*>(p_.rows) + (entry * p_.num_kept + position % p_.num_kept) * size;
  }
  const T* given_row(const Text& text, int64_t position) const {
    return static_cast<const T*>(p_.qkvz) +
           (text.first_row + position - text.first) * p_.qkvz_stride;
  }
  const T* given_gates(const Text& text, int64_t position) const {
    return static_cast<const T*>(p_.ba) + (text.first_row + position - text.first) * p_.ba_stride;
  }

  // Brings S of a value head from `applied` to `certain`, and with an output on to `end`.
  void compute(const Text& text, int64_t key_head, int64_t value_head) const {
    float* const kept = text.entry < 0 ? nullptr : state_of(text.entry, value_head);
    float* const open = memory_.open;
    if (kept == nullptr) set_zero(open);
    const float* from = kept == nullptr ? open : kept;
    const int64_t stop = p_.out == nullptr ? text.certain : text.end;
    for (int64_t begin = text.applied; begin < stop;) {
      const bool is_certain = begin < text.certain;
      const int64_t end = min_of(begin + kBlock, is_certain ? text.certain : stop);
      float* const to = is_certain ? kept : open;
      prepare(text, begin, end, key_head, value_head);
      for (int64_t tile = 0; tile < padded_; tile += kDeltaTile) {
        for (int64_t i = 0; i < end - begin; ++i) {
          memory_.steps[i].value = memory_.values + i * padded_ + tile;
          memory_.steps[i].out = memory_.read + i * padded_ + tile;
        }
        const int64_t at = tile * p_.key_dim;
        const bool kept = is_certain || end < stop;
        run_tile(from + at, to + at, memory_.steps, end - begin, p_.key_dim, kept);
      }
      for (int64_t position = max_of(begin, text.first); position < end; ++position) {
        if (p_.out != nullptr) put(text, position, value_head, position - begin);
      }
      from = to;
      begin = end;
    }
  }

  // Queries, keys, values and gates of the positions begin .. end - 1.
  void prepare(const Text& text, int64_t begin, int64_t end, int64_t key_head,
               int64_t value_head) const {
    const int64_t key_dim = p_.key_dim, value_dim = p_.value_dim;
    const float rate = __builtin_expf(p_.log_rate[value_head]);
    for (int64_t position = begin; position < end; ++position) {
      const int64_t i = position - begin;
      const bool is_kept = position < text.first;
      Step& step = memory_.steps[i];
      float* const key = memory_.keys + i * key_dim;
      convolve(text, position, key_size_ + key_head * key_dim, key_dim, key);
      set_length(key, 1.0f);
      step.key = key;
      step.query = nullptr;
      if (!is_kept && p_.out != nullptr) {
        float* const query = memory_.queries + i * key_dim;
        convolve(text, position, key_head * key_dim, key_dim, query);
        set_length(query, 1.0f / __builtin_sqrtf(static_cast<float>(key_dim)));
        step.query = query;
        step.overlap = product(key, query);
      }
      float* const value = memory_.values + i * padded_;
      convolve(text, position, 2 * key_size_ + value_head * value_dim, value_dim, value);
      for (int64_t column = value_dim; column < padded_; ++column) value[column] = 0.0f;
      const T* gates =
          is_kept ? kept_row(text.entry, position) + conv_size_ : given_gates(text, position);
      const float a = to_float(gates[p_.num_value_heads + value_head]);
      step.beta = sigmoid(to_float(gates[value_head]));
      step.decay = __builtin_expf(-rate * softplus(a + p_.dt_bias[value_head]));
    }
  }

  // `count` features of the convolution at a position, from feature `feature` on, with SiLU.
  void convolve(const Text& text, int64_t position, int64_t feature, int64_t count,
                float* out) const {
    const T* inputs[kMaxDeltaTaps];
    const int64_t oldest = text.entry < 0 ? text.first : 0;
    for (int64_t tap = 0; tap < p_.num_taps; ++tap) {
      const int64_t there = position - (p_.num_taps - 1 - tap);
      inputs[tap] = there < oldest       ? nullptr
                    : there < text.first ? kept_row(text.entry, there)
                                         : given_row(text, there);
    }
    const T* taps = static_cast<const T*>(p_.taps) + feature;
    for (int64_t i = 0; i < count; i += kWidth) {
      const int64_t lanes = min_of(count - i, kWidth);
      Vec sum = zero();
      for (int64_t tap = 0; tap < p_.num_taps; ++tap) {
        if (inputs[tap] == nullptr) continue;
        const Vec x = load_lanes(inputs[tap] + feature + i, lanes);
        sum = fma(load_lanes(taps + tap * conv_size_ + i, lanes), x, sum);
      }
      store_lanes(out + i, silu(sum), lanes);
    }
  }

  // Scales [key_dim] numbers to a length.
  void set_length(float* x, float length) const {
    const Vec factor = broadcast(length / __builtin_sqrtf(product(x, x) + kLengthEps));
    for (int64_t i = 0; i < p_.key_dim; i += kWidth) {
      const int64_t lanes = min_of(p_.key_dim - i, kWidth);
      store_lanes(x + i, load_lanes(x + i, lanes) * factor, lanes);
    }
  }

  float product(const float* a, const float* b) const {
    Vec products = zero();
    for (int64_t i = 0; i < p_.key_dim; i += kWidth) {
      const int64_t lanes = min_of(p_.key_dim - i, kWidth);
      products = fma(load_lanes(a + i, lanes), load_lanes(b + i, lanes), products);
    }
    return sum(products);
  }

  // The output of a head at a position: what it read, normed and gated.
  void put(const Text& text, int64_t position, int64_t value_head, int64_t step) const {
    const float* read = memory_.read + step * padded_;
    const int64_t n = p_.value_dim, row = text.first_row + position - text.first;
    const Vec scale = broadcast(inverse_rms(read, n, p_.eps));
    const T* z = given_row(text, position) + conv_size_ + value_head * n;
    const T* norm = static_cast<const T*>(p_.norm);
    T* out = static_cast<T*>(p_.out) + row * p_.out_stride + value_head * n;
    for (int64_t i = 0; i < n; i += kWidth) {
      const int64_t lanes = min_of(n - i, kWidth);
      const Vec normed = load_lanes(read + i, lanes) * scale * load_lanes(norm + i, lanes);
      store_lanes(out + i, normed * silu(load_lanes(z + i, lanes)), lanes);
    }
  }

  // Keeps what this head's features and gates of the call's rows are computed from.
  void keep(const Text& text, int64_t key_head) const {
    const auto copy = [](T* to, const T* from, int64_t at, int64_t count) {
      copy_bytes(to + at, from + at, count * static_cast<int64_t>(sizeof(T)));
    };
    for (int64_t t = max_of(max_of(text.first, text.end - p_.num_kept), 0); t < text.end; ++t) {
      T* const kept = kept_row(text.entry, t);
      const T* const given = given_row(text, t);
      copy(kept, given, key_head * p_.key_dim, p_.key_dim);
      copy(kept, given, key_size_ + key_head * p_.key_dim, p_.key_dim);
      for (int64_t i = 0; i < group_; ++i) {
        const int64_t head = value_head(key_head, i);
        copy(kept, given, 2 * key_size_ + head * p_.value_dim, p_.value_dim);
        copy(kept + conv_size_, given_gates(text, t), head, 1);
        copy(kept + conv_size_, given_gates(text, t), p_.num_value_heads + head, 1);
      }
    }
  }

  const GatedDeltaParams& p_;
  Memory& memory_;
  int64_t group_, padded_, key_size_, conv_size_;
};

template <typename T>
void run(const GatedDeltaParams& params, const Parallel& parallel) {
  const int64_t group = params.num_value_heads / params.num_key_heads;
  const int64_t bytes = group * params.key_dim * params.value_dim * int64_t{sizeof(float)};
  const int64_t grain = ceil_div(parallel.bytes_per_range, bytes);
  parallel_for(parallel, params.num_seqs * params.num_key_heads, grain,
               [&](int64_t begin, int64_t end) {
                 const Delta<T> delta(params);
                 for (int64_t i = begin; i < end; ++i) {
                   delta.run(i / params.num_key_heads, i % params.num_key_heads);
                 }
               });
}

}  // namespace

void run_gated_delta(const GatedDeltaParams& params, const Parallel& parallel) {
  if (params.dtype == DType::kFloat32) return run<float>(params, parallel);
  run<BFloat16>(params, parallel);
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
