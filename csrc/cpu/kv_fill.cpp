// kv_fill on the CPU: one list of work over every layer, block of rows and head, in one parallel
// region. Rows are ordered by exit layer, so that the rows that a layer needs come first.
#include "float8.h"
#include "head_row.h"
#include "packed_rows.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

// The first slot that a row is written to: its own; of a looped model that of the first loop that
// it skipped.
inline int64_t first_slot(const KvFillParams& params, int64_t row) {
  const int64_t loops = ceil_div(params.exit_layer[row], max_of(params.num_layers, 1));
  return params.slot_mapping[row] + loops * params.loop_slots;
}

// The first of the layers that a row skipped; num_layers: it skipped none of them. A row of a
// looped model skips whole loops.
inline int64_t first_of(const KvFillParams& params, int64_t row) {
  if (params.loop_slots > 0) {
    return first_slot(params, row) < params.num_slots ? 0 : params.num_layers;
  }
  if (params.layer_numbers == nullptr) return min_of(params.exit_layer[row], params.num_layers);
  int64_t layer = 0;
  while (layer < params.num_layers && params.layer_numbers[layer] < params.exit_layer[row]) ++layer;
  return layer;
}

// Rows with a slot, by exit layer.
struct Rows {
  Scratch<int32_t> order;   // [num_tokens]
  Scratch<int64_t> counts;  // [num_layers + 1]: how many rows layer l needs

  explicit Rows(const KvFillParams& params)
      : order(params.num_tokens), counts(params.num_layers + 1) {
    int64_t count = 0;
    for (int64_t layer = 0; layer <= params.num_layers; ++layer) counts[layer] = 0;
    for (int64_t row = 0; row < params.num_tokens; ++row) {
      if (params.slot_mapping[row] >= 0) ++counts[first_of(params, row)];
    }
    for (int64_t layer = 0; layer <= params.num_layers; ++layer) {
      const int64_t here = counts[layer];
      counts[layer] = count;
      count += here;
    }
    // Each count moves from the first place of its layer's rows to the place after the last.
    for (int64_t row = 0; row < params.num_tokens; ++row) {
      if (params.slot_mapping[row] < 0) continue;
      order[counts[first_of(params, row)]++] = static_cast<int32_t>(row);
    }
  }
};

// A worker's buffers, and its work on one head of one layer for one block of rows.
template <typename T, typename W>
class Worker {
 public:
  Worker(const KvFillParams& params, int64_t block, int64_t x_stride)
      : params_(params),
        unit_(block),
        x_stride_(x_stride),
        x_(rows_held<W>(block) * x_stride_),
        normed_(kGroupRows<W> * params.hidden_size),
        heads_(block * params.head_dim * (params.norms_all_k ? params.num_kv_heads : 1)),
        rounded_(params.head_dim) {
    clear_rows<W>(0, rows_held<W>(block), x_stride_, x_.data());
  }

  // Norms rows, if there is a norm weight, and packs them: [num_rows], with the weight of `layer`.
  void norm(int64_t layer, const int32_t* rows, int64_t num_rows) {
    const T* weight = static_cast<const T*>(params_.norm_weight);
    if (weight) weight += layer * params_.norm_layer_stride;
    const auto row = [&](int64_t i) {
      return static_cast<const T*>(params_.hidden) + rows[i] * params_.hidden_stride;
    };
    pack_rows<W>(row, 0, num_rows, params_.hidden_size, weight, params_.eps, normed_.data(),
                 x_stride_, x_.data());
  }

  // Projects the normed rows to `head` (K heads, then V heads) and writes it to their slots.
  void fill(int64_t layer, int64_t head, const int32_t* rows, int64_t num_rows) {
    project(layer, head, num_rows, heads_.data());
    const int64_t n = params_.head_dim;
    for (int64_t i = 0; i < num_rows; ++i) {
      round(layer, head, heads_.data() + i * n);
      write(layer, head, rows[i], -1.0f, heads_.data() + i * n);
    }
  }

  // The same for all K heads, which are normed at once.
  void fill_keys(int64_t layer, const int32_t* rows, int64_t num_rows) {
    const int64_t n = params_.head_dim, num_heads = params_.num_kv_heads;
    const int64_t stride = num_rows * n;  // from one head to the next
    for (int64_t head = 0; head < num_heads; ++head) {
      project(layer, head, num_rows, heads_.data() + head * stride);
    }
    for (int64_t i = 0; i < num_rows; ++i) {
      float* first = heads_.data() + i * n;
      for (int64_t head = 0; head < num_heads; ++head) round(layer, head, first + head * stride);
      const float scale = inverse_rms_of_heads(first, num_heads, stride, n, params_.eps);
      for (int64_t head = 0; head < num_heads; ++head) {
        write(layer, head, rows[i], scale, first + head * stride);
      }
    }
  }

 private:
  // out: [num_rows, head_dim]
  void project(int64_t layer, int64_t head, int64_t num_rows, float* out) {
    const int64_t n = params_.head_dim;
    const WeightRows<W> weight = layer_weight(layer);
    const bool last_head = head + 1 == 2 * params_.num_kv_heads;
    const bool last_layer = layer + 1 == params_.num_layers;
    for (int64_t r = 0; r < n; r += kTileRows) {
      const int64_t count = min_of(kTileRows, n - r);
      const int64_t after = head * n + r + count;
      const W* following = r + count < n || !last_head ? weight.row(after)
                           : last_layer                ? nullptr
                                                       : layer_weight(layer + 1).row(0);
      multiply(unit_, weight.from(head * n + r), count, x_.data(), x_stride_, num_rows,
               params_.hidden_size, following, out + r, n);
    }
  }

  WeightRows<W> layer_weight(int64_t layer) const {
    return weight_rows<W>(
        static_cast<const W*>(params_.kv_weight) + layer * params_.weight_layer_stride,
        params_.weight_row_stride,
        params_.kv_scale ? params_.kv_scale + layer * params_.scale_layer_stride : nullptr,
        params_.kv_table ? params_.kv_table + layer * params_.table_layer_stride : nullptr);
  }

  // Adds the bias to a projected head, values: [head_dim], and rounds it, because a model of dtype
  // T rounds its projections. Later results are rounded once, when stored.
  void round(int64_t layer, int64_t head, float* values) {
    const int64_t n = params_.head_dim;
    T* rounded = rounded_.data();
    if (params_.kv_bias) {
      add(static_cast<const T*>(params_.kv_bias) + layer * params_.bias_layer_stride + head * n, n,
          values);
    }
    store_row(values, n, rounded);
    load_row(rounded, n, values);
  }

  // Writes a head of one row to the row's slots, a key normed and rotated. scale: 1 / rms over all
  // of the row's K heads; below 0: the head's own.
  void write(int64_t layer, int64_t head, int32_t row, float scale, float* values) const {
    const int64_t n = params_.head_dim;
    const CacheFormat& format = params_.cache_format;
    if (head >= params_.num_kv_heads) {
      return put(values, row, head - params_.num_kv_heads,
                 scale_of(format.value_scales, (layer - 1) * params_.num_kv_heads + head),
                 layer * params_.v_cache_layer_stride, params_.v_cache_strides, params_.v_cache);
    }
    if (params_.k_norm_weight) {
      const T* weight =
          static_cast<const T*>(params_.k_norm_weight) + layer * params_.k_norm_layer_stride;
      if (params_.norms_all_k) weight += head * n;
      scale_head(values, weight, n, scale < 0.0f ? inverse_rms(values, n, params_.eps) : scale);
    }
    if (params_.positions) {
      const int64_t table = params_.layer_ropes ? params_.layer_ropes[2 * layer + 1] : 0;
      rotate_row(values,
                 params_.cos_sin + table * params_.rope_stride +
                     params_.positions[row] * params_.rotary_dim,
                 params_.rotary_dim / 2);
    }
    put(values, row, head, scale_of(format.key_scales, layer * params_.num_kv_heads + head),
        layer * params_.k_cache_layer_stride, params_.k_cache_strides, params_.k_cache);
  }

  // Stores values: [head_dim], in a head's places in a layer's cache: one, or one in each loop that
  // the row skipped. scale: for float8.
  void put(const float* values, int32_t row, int64_t head, const float* scale, int64_t layer,
           const CacheStrides& strides, void* cache) const {
    int64_t slot = params_.loop_slots > 0 ? first_slot(params_, row) : params_.slot_mapping[row];
    do {
      const int64_t at = cache_offset(strides, cache_slot(slot, params_.page_size), head);
      put_at(values, scale, layer + at, cache);
      slot += params_.loop_slots;
    } while (params_.loop_slots > 0 && slot < params_.num_slots);
  }

  void put_at(const float* values, const float* scale, int64_t at, void* cache) const {
    const int64_t n = params_.head_dim;
    const CacheFormat& format = params_.cache_format;
    if (format.is_float8) {
      return store_scaled_row(values, n, scale, static_cast<Float8*>(cache) + at);
    }
    if (format.is_bfloat16) return store_row(values, n, static_cast<BFloat16*>(cache) + at);
    store_row(values, n, static_cast<T*>(cache) + at);
  }

  // values += bias, both [n].
  static void add(const T* bias, int64_t n, float* values) {
    for (int64_t i = 0; i < n; i += kWidth) {
      const int64_t lanes = min_of(n - i, kWidth);
      const Vec total = load_partial(values + i, lanes) + load_partial(bias + i, lanes);
      store_partial(values + i, total, lanes);
    }
  }

  const KvFillParams& params_;
  [[no_unique_address]] Unit<W> unit_;
  int64_t x_stride_;
  Scratch<PackedX<W>> x_;  // [rows_held, x_stride]
  Scratch<T> normed_;      // [kGroupRows<W>, hidden_size]
  Scratch<float> heads_;   // [block, head_dim], or for all K heads, [num_kv_heads, rows, head_dim]
  Scratch<T> rounded_;     // [head_dim]
};

// The number of work items of the heads of a block of rows: the K heads are one item where all are
// normed at once.
inline int64_t items_of_heads(const KvFillParams& params) {
  return params.num_kv_heads + (params.norms_all_k ? 1 : params.num_kv_heads);
}

// Work items [begin, end) of the list (layer, block of rows, head). x_stride: of packed rows.
template <typename T, typename W>
void fill_items(const KvFillParams& params, const Rows& rows, int64_t x_stride, int64_t begin,
                int64_t end) {
  const int64_t num_heads = items_of_heads(params);
  const int64_t joined =
      2 * params.num_kv_heads - num_heads;  // heads that are not items of their own
  const int64_t most = rows_at_once<W>(x_stride);
  Worker<T, W> worker(params, min_of(most, params.num_tokens), x_stride);
  int64_t item = begin, first = 0;
  for (int64_t layer = 0; layer < params.num_layers && item < end; ++layer) {
    const int64_t needed = rows.counts[layer];
    for (int64_t row = 0; row < needed && item < end; row += most, first += num_heads) {
      if (item >= first + num_heads) continue;
      const int32_t* block = rows.order.data() + row;
      const int64_t num_rows = min_of(most, needed - row);
      worker.norm(layer, block, num_rows);
      for (; item < min_of(first + num_heads, end); ++item) {
        if (params.norms_all_k && item == first) {
          worker.fill_keys(layer, block, num_rows);
        } else {
          worker.fill(layer, item - first + joined, block, num_rows);
        }
      }
    }
  }
}

template <typename T, typename W>
void fill_layers(const KvFillParams& params, const Parallel& parallel) {
  const Rows rows(params);
  const Tables tables{params.kv_table, 2 * params.num_kv_heads * params.head_dim, params.num_layers,
                      params.table_layer_stride};
  const int64_t x_stride = packed_stride<W>(params.hidden_size, tables);
  const int64_t most = rows_at_once<W>(x_stride);
  int64_t num_items = 0;
  for (int64_t layer = 0; layer < params.num_layers; ++layer) {
    num_items += ceil_div(rows.counts[layer], most) * items_of_heads(params);
  }
  // Each range norms its rows again, so it should hold many heads' work.
  const int64_t grain = ceil_div(65536, params.head_dim * params.hidden_size);
  parallel_for(parallel, num_items, grain, [&](int64_t begin, int64_t end) {
    fill_items<T, W>(params, rows, x_stride, begin, end);
  });
}

}  // namespace

void run_kv_fill(const KvFillParams& params, const Parallel& parallel) {
  dispatch_weight(params.dtype, params.kv_scale, params.kv_table, params.num_tokens,
                  [&]<typename T, typename W>() { fill_layers<T, W>(params, parallel); });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
