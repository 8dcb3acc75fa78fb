// kv_fill: one list of work over the heads of all layers that some row skipped. Rows are ordered by
// exit layer, so that the rows that a layer needs come first.
#pragma once

#include "eecore/cache_slot.cuh"
#include "eecore/float8.cuh"
#include "eecore/panel_stream.cuh"
#include "eecore/params.h"
#include "eecore/rms_norm.cuh"

namespace eecore::cuda {

// What the first kernel hands to the second.
struct KvFillRows {
  void* normed;     // [num_layers, num_tokens, padded_size], rows in order
  int32_t* order;   // [num_tokens], rows with a slot, by exit layer
  int32_t* counts;  // [num_layers], the number of rows that the layer needs
  void* keys;  // [num_layers, num_tokens, num_kv_heads * head_dim], rows in order: projected keys
               // for a third kernel that norms all heads at once; else null
  int64_t padded_size;  // of hidden_size
  bool hidden_aligned, norm_weight_aligned;
};

// The slot of a row in the loop that is filled; -1: it has none.
__device__ __forceinline__ int64_t slot_of(const KvFillParams& params, int64_t row) {
  const int64_t slot = params.slot_mapping[row];
  if (slot < 0 || slot + params.slot_offset >= params.num_slots) return -1;
  return slot + params.slot_offset;
}

// The first layer that a row of the filled loop skipped; 0 or less: all.
__device__ __forceinline__ int64_t first_skipped(const KvFillParams& params, int64_t row) {
  const int64_t exit_layer = params.exit_layer[row];
  if (params.layer_numbers == nullptr) return exit_layer - params.first_layer;
  int64_t layer = 0;
  while (layer < params.num_layers && params.layer_numbers[layer] < exit_layer) ++layer;
  return layer;
}

// Grid: (num_tokens, num_layers). Each block finds the place of its row in the order, and norms the
// row for its layer if the layer needs it.
template <typename T>
__global__ void __launch_bounds__(kRmsNormThreads)
    kv_fill_rows_kernel(KvFillParams params, KvFillRows rows) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x, layer = blockIdx.y;
  const int64_t exit_layer = first_skipped(params, row);
  const bool has_slot = slot_of(params, row) >= 0;
  const bool needed = has_slot && exit_layer <= layer;
  if (!needed && row > 0 && layer > 0) return;

  // Counts in float: exact for any number of rows that fits into memory.
  float before = 0.0f, count = 0.0f;
  for (int64_t other = threadIdx.x; other < params.num_tokens; other += kRmsNormThreads) {
    if (slot_of(params, other) < 0) continue;
    const int64_t other_layer = first_skipped(params, other);
    if (other_layer < exit_layer || (other_layer == exit_layer && other < row)) before += 1.0f;
    if (other_layer <= layer) count += 1.0f;
  }
  const auto place = static_cast<int64_t>(reduce_block<kRmsNormThreads>(before));
  count = reduce_block<kRmsNormThreads>(count);
  if (threadIdx.x == 0) {
    if (row == 0) rows.counts[layer] = static_cast<int32_t>(count);
    if (layer == 0 && has_slot) rows.order[place] = static_cast<int32_t>(row);
  }
  if (!needed) return;

  const T* hidden = static_cast<const T*>(params.hidden) + row * params.hidden_stride;
  const T* weight = static_cast<const T*>(params.norm_weight);
  float scale = 1.0f;
  if (weight != nullptr) {
    weight += layer * params.norm_layer_stride;
    scale = inverse_rms(hidden, params.hidden_size, rows.hidden_aligned, params.eps);
  }
  scale_row(hidden, weight, scale, params.hidden_size, rows.hidden_aligned,
            rows.norm_weight_aligned, rows.padded_size,
            static_cast<T*>(rows.normed) + (layer * params.num_tokens + place) * rows.padded_size);
}

// How a head is cut: plan.num_slices warps share each of its 16 rows.
struct HeadPlan {
  int row_tiles;      // of 16 rows
  int group_tiles;    // tiles that a block works on at a time
  Divisor num_parts;  // of a head, group_tiles each
  Divisor num_heads;  // of a layer's keys and values
  int column;         // floats of shared memory from one row of x to the next
};

// Floats of shared memory for the products of one head.
__host__ __device__ inline int head_floats(const SkinnyPlan& plan, const HeadPlan& head,
                                           int n_tiles) {
  return plan.num_slices * 8 * n_tiles * head.column;
}

// Where the tables of a layer's keys begin in cos_sin.
__device__ __forceinline__ int64_t key_table_of(const KvFillParams& params, int64_t layer) {
  const int32_t* const ropes = params.layer_ropes;
  return ropes == nullptr ? 0 : ropes[2 * layer + 1] * params.rope_stride;
}

// The cosines and sines of a layer's keys, position by position.
__device__ __forceinline__ const float* key_angles(const KvFillParams& params, int64_t layer) {
  return params.cos_sin + key_table_of(params, layer);
}

// Element i of a head after rotation, where x is the element and y the other one of its pair.
__device__ __forceinline__ float turned(float x, float y, int i, int half, const float* cos_sin) {
  if (i >= 2 * half) return x;
  const int angle = i < half ? i : i - half;
  const float other = y * cos_sin[half + angle];
  return fmaf(x, cos_sin[angle], i < half ? -other : other);
}

// Grid: (num_tokens, num_layers). Norms all key heads of a row and layer at once, rotates them and
// writes them to the row's slot.
template <typename T>
__global__ void __launch_bounds__(kRmsNormThreads)
    kv_fill_keys_kernel(KvFillParams params, KvFillRows rows) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t place = blockIdx.x, layer = blockIdx.y;
  if (place >= rows.counts[layer]) return;
  const int32_t row = rows.order[place];
  const int head_dim = static_cast<int>(params.head_dim);
  const int num_heads = static_cast<int>(params.num_kv_heads), size = num_heads * head_dim;
  const T* keys = static_cast<const T*>(rows.keys) + (layer * params.num_tokens + place) * size;
  float squares = 0.0f;
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kRmsNormThreads) {
    const float x = to_float(keys[i]);
    squares = fmaf(x, x, squares);
  }
  const float scale = inverse_rms(reduce_block<kRmsNormThreads>(squares), size, params.eps);
  const T* weight =
      static_cast<const T*>(params.k_norm_weight) + layer * params.k_norm_layer_stride;
  const int half = params.positions != nullptr ? static_cast<int>(params.rotary_dim / 2) : 0;
  const float* cos_sin =
      half > 0 ? key_angles(params, layer) + params.positions[row] * params.rotary_dim : nullptr;
  const CacheSlot slot = cache_slot(slot_of(params, row), params.page_size);
  const auto normed = [&](int i) { return to_float(keys[i]) * (scale * to_float(weight[i])); };
  for (int i = static_cast<int>(threadIdx.x); i < size; i += kRmsNormThreads) {
    const int head = i / head_dim, in_head = i % head_dim;
    const int other = in_head < half ? i + half : in_head < 2 * half ? i - half : i;
    const float key = turned(normed(i), normed(other), in_head, half, cos_sin);
    const int64_t to = layer * params.k_cache_layer_stride +
                       cache_offset(params.k_cache_strides, slot, head) + in_head;
    if (params.cache_format.is_float8) {
      const float factor = float8_factor(params.cache_format.key_scales, layer * num_heads + head);
      static_cast<Float8*>(params.k_cache)[to] = float_to_float8(__fmul_rn(key, factor));
    } else {
      static_cast<T*>(params.k_cache)[to] = from_float<T>(key);
    }
  }
}

// Finishes one head of one row and writes it to its slot. Where all key heads are normed at once,
// it instead stores a key as projected in rows.keys, for the row at `place`. values: [head_dim],
// with `num_slices` sums still to be added that are `slice_stride` apart. The lanes of a warp share
// the head.
template <typename T, typename W, bool kLeavesKeys>
__device__ __forceinline__ void write_head(const KvFillParams& params, int64_t layer, int head,
                                           CacheSlot slot, int64_t angles, Shared<float> values,
                                           int num_slices, int slice_stride, const KvFillRows& rows,
                                           int64_t place) {
  // Elements of a lane whose loads are in flight together.
  constexpr int kBatch = 4;
  const int lane = threadIdx.x % 32, head_dim = static_cast<int>(params.head_dim);
  const int num_kv_heads = static_cast<int>(params.num_kv_heads);
  const T* bias = static_cast<const T*>(params.kv_bias);
  if (bias != nullptr) bias += layer * params.bias_layer_stride + head * params.head_dim;
  const float* row_scales = nullptr;  // of int8 weights
  if constexpr (kHasScales<W>) {
    row_scales = params.kv_scale + layer * params.scale_layer_stride + head * params.head_dim;
  }
  const bool is_key = head < num_kv_heads;
  const int kv_head = is_key ? head : head - num_kv_heads;
  const int64_t to = is_key ? layer * params.k_cache_layer_stride +
                                  cache_offset(params.k_cache_strides, slot, kv_head)
                            : layer * params.v_cache_layer_stride +
                                  cache_offset(params.v_cache_strides, slot, kv_head);
  void* const cache = is_key ? params.k_cache : params.v_cache;
  const CacheFormat& format = params.cache_format;
  const float factor = !format.is_float8
                           ? 1.0f
                           : float8_factor(is_key ? format.key_scales : format.value_scales,
                                           layer * num_kv_heads + kv_head);
  const auto store = [&](int i, float value) {
    if (format.is_float8) {
      static_cast<Float8*>(cache)[to + i] = float_to_float8(__fmul_rn(value, factor));
    } else {
      static_cast<T*>(cache)[to + i] = from_float<T>(value);
    }
  };

  // The projection, rounded as a model of dtype T rounds it; later results are rounded when stored.
  float squares = 0.0f;
  for (int first = lane; first < head_dim; first += 32 * kBatch) {
    float biases[kBatch], scales[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + 32 * j;
      biases[j] = bias != nullptr && i < head_dim ? to_float(bias[i]) : 0.0f;
      if constexpr (kHasScales<W>) scales[j] = i < head_dim ? row_scales[i] : 0.0f;
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + 32 * j;
      if (i >= head_dim) break;
      float value = values[i];
      for (int slice = 1; slice < num_slices; ++slice) value += values[slice * slice_stride + i];
      if constexpr (kHasScales<W>) {
        value = fmaf(value, scales[j], biases[j]);
      } else if (bias != nullptr) {
        value += biases[j];
      }
      value = rounded<T>(value);
      if (is_key) {
        values[i] = value;
        squares = fmaf(value, value, squares);
      } else {
        store(i, value);
      }
    }
  }
  if (!is_key) return;
  if constexpr (kLeavesKeys) {
    T* keys = static_cast<T*>(rows.keys) +
              ((layer * params.num_tokens + place) * params.num_kv_heads + head) * params.head_dim;
    for (int i = lane; i < head_dim; i += 32) keys[i] = from_float<T>(values[i]);
    return;
  }

  // Head norm and rotary: pairs of elements half of rotary_dim apart.
  const T* weight = static_cast<const T*>(params.k_norm_weight);
  float scale = 1.0f;
  if (weight != nullptr) {
    weight += layer * params.k_norm_layer_stride;
    squares = reduce_lanes(squares);
    scale = 1.0f / sqrtf(squares / static_cast<float>(head_dim) + params.eps);
  }
  __syncwarp();
  const int half = params.positions != nullptr ? static_cast<int>(params.rotary_dim / 2) : 0;
  const float* cos_sin = params.cos_sin + angles;  // where half is not 0
  for (int first = lane; first < head_dim; first += 32 * kBatch) {
    float x[kBatch], y[kBatch], cosine[kBatch], sine[kBatch];  // y: the other one of the pair
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + 32 * j;
      const int other = i < half ? i + half : i < 2 * half ? i - half : i;
      const int angle = i < half ? i : i - half;
      cosine[j] = other != i ? cos_sin[angle] : 1.0f;
      sine[j] = other != i ? cos_sin[half + angle] : 0.0f;
      x[j] = i < head_dim ? values[i] : 0.0f;
      y[j] = other != i ? values[other] : 0.0f;
      if (weight != nullptr && i < head_dim) {
        x[j] *= scale * to_float(weight[i]);
        y[j] *= scale * to_float(weight[other]);
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = first + 32 * j;
      if (i >= head_dim) break;
      const float turned = y[j] * sine[j];
      if (i < 2 * half) x[j] = fmaf(x[j], cosine[j], i < half ? -turned : turned);
      store(i, x[j]);
    }
  }
}

// A block's i-th unit of the work of all layers. Units run from the last layer down: it needs all
// rows that any layer needs.
__device__ __forceinline__ int fill_unit(int num_units, int i) {
  return num_units - 1 - static_cast<int>(blockIdx.x) - i * static_cast<int>(gridDim.x);
}

// Starts the stream of a block's units, `tiles_of_unit` each where the warp works, waits for the
// previous kernel, and returns how many of the units are needed. That is known once the rows are in
// order. Blocks that begin in the last layer start reading its weight before the wait: the previous
// kernel, which orders the rows, has itself waited for the kernel that wrote the weight.
template <typename W, int kMTiles, typename RowsOf>
__device__ __forceinline__ int start_fill(const KvFillParams& params, const KvFillRows& rows,
                                          const SkinnyPlan& plan, WeightStream<W, kMTiles>& weight,
                                          const RowsOf& rows_of, int num_layers, int units_of_layer,
                                          bool works, int tiles_of_unit, int64_t first_place) {
  int my_units = 0;
  const auto find_units = [&] {
    if (first_place < rows.counts[num_layers - 1]) {
      const int first_layer =
          max(static_cast<int>(first_skipped(params, rows.order[first_place])), 0);
      my_units = tiles_of_block(plan, (num_layers - first_layer) * units_of_layer);
    }
    weight.end_at(works ? my_units * tiles_of_unit : 0);
  };
  const bool starts_early = blockIdx.y == 0 && static_cast<int>(blockIdx.x) < units_of_layer;
  if (!starts_early) {
    wait_for_previous_kernel();
    find_units();
  }
  weight.start(rows_of);
  wait_for_previous_kernel();  // returns at once the second time
  let_next_kernel_start();
  if (starts_early) find_units();
  return my_units;
}

// Loads where the rows of a group are written, the same for every head.
__device__ __forceinline__ void load_places(const KvFillParams& params, const KvFillRows& rows,
                                            int64_t first_place, int most, Shared<CacheSlot> slots,
                                            Shared<int64_t> angles) {
  const int column = static_cast<int>(threadIdx.x);
  if (column >= most || first_place + column >= rows.counts[params.num_layers - 1]) return;
  const int64_t token = rows.order[first_place + column];
  slots[column] = cache_slot(slot_of(params, token), params.page_size);
  angles[column] = params.positions == nullptr ? 0 : params.positions[token] * params.rotary_dim;
}

// Stores the warp's sums of part `part` of a head in the head's products, unless it has no such
// rows.
template <int kNTiles>
__device__ __forceinline__ void store_products(const SkinnyLane& lane, const HeadPlan& cut,
                                               int part, const float (&sums)[kNTiles][4],
                                               Shared<float> products) {
  const int row_tile = part * cut.group_tiles + lane.group;
  if (row_tile >= cut.row_tiles) return;
  const int slice_stride = 8 * kNTiles * cut.column;
  const Shared<float> mine = products + (lane.slice * slice_stride + 16 * row_tile + lane.row);
#pragma unroll
  for (int n = 0; n < kNTiles; ++n) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      mine[(8 * n + 2 * lane.piece + j % 2) * cut.column + j / 2 * 8] = sums[n][j];
    }
  }
}

// Grid: (blocks that share the heads, groups of 8 * kNTiles rows in order). Dynamic shared memory:
// the ring, then the products of a head. kLeavesKeys: a later kernel norms all key heads at once.
template <typename T, int kNTiles, typename W = T, bool kLeavesKeys = false>
__global__ void __launch_bounds__(kSkinnyThreads,
                                  (kLeavesKeys || sizeof(W) == 1) && kNTiles == 4 ? 1 : 2)
    kv_fill_kernel(KvFillParams params, KvFillRows rows, SkinnyPlan plan, HeadPlan cut) {
  const SkinnyLane lane(plan);
  const int num_layers = static_cast<int>(params.num_layers);
  const int num_heads = 2 * static_cast<int>(params.num_kv_heads);
  const int head_dim = static_cast<int>(params.head_dim);
  const int64_t first_place = static_cast<int64_t>(blockIdx.y) * (8 * kNTiles);

  // Each head in cut.num_parts tiles.
  const auto rows_of = [&](int tile, WeightRow<W>(&weight_rows)[2]) {
    const int of_block = cut.num_parts.quotient(tile);
    const int head = fill_unit(num_layers * num_heads, of_block);
    const int layer = cut.num_heads.quotient(head);
    const W* weight = static_cast<const W*>(params.kv_weight) + layer * params.weight_layer_stride;
    const int64_t* table =
        params.kv_table + layer * params.table_layer_stride;  // where the weight is packed
    const int64_t first_row = (head - layer * num_heads) * params.head_dim;
    const int part = tile - of_block * cut.num_parts.value;
    const int first = (part * cut.group_tiles + lane.group) * 16 + lane.row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first + 8 * i < head_dim ? first + 8 * i : head_dim - 1;
      weight_rows[i] = weight_row<W>(weight, table, first_row + row, params.weight_row_stride);
    }
  };

  const bool works = lane.group < cut.group_tiles;
  WeightStream<W, 1> weight(
      plan, lane, works ? tiles_of_block(plan, num_layers * num_heads) * cut.num_parts.value : 0);
  const int my_heads = start_fill(params, rows, plan, weight, rows_of, num_layers, num_heads, works,
                                  cut.num_parts.value, first_place);

  EECORE_SHARED(CacheSlot, slots, 8 * kNTiles);
  EECORE_SHARED(int64_t, angles, 8 * kNTiles);
  EECORE_SHARED(int64_t, key_table, 1);  // where the tables of a layer begin
  load_places(params, rows, first_place, 8 * kNTiles, slots, angles);

  const Shared<float> products = dynamic_shared<float>(skinny_ring_bytes(plan, 1));
  const int slice_stride = 8 * kNTiles * cut.column;
  for (int i = 0; i < my_heads; ++i) {
    const int unit = fill_unit(num_layers * num_heads, i);
    const int layer = unit / num_heads, head = unit % num_heads;
    const auto x = skinny_rows<kNTiles>(
        static_cast<const T*>(rows.normed) + layer * params.num_tokens * rows.padded_size,
        rows.padded_size, rows.counts[layer], first_place);
    for (int part = 0; works && part < cut.num_parts.value; ++part) {
      float sums[1][kNTiles][4];
      multiply_tile(plan, lane, weight, rows_of, x, sums);
      store_products(lane, cut, part, sums[0], products);
    }
    if (threadIdx.x == 0) key_table[0] = key_table_of(params, layer);
    __syncthreads();
    for (int column = threadIdx.x / 32; column < x.count; column += kSkinnyWarps) {
      write_head<T, W, kLeavesKeys>(params, layer, head, slots[column],
                                    key_table[0] + angles[column], products + column * cut.column,
                                    plan.num_slices, slice_stride, rows, first_place + column);
    }
    __syncthreads();  // all threads read the products before the next head's are written
  }
  cp_async_wait<0>();  // where the last layer was not needed
}

}  // namespace eecore::cuda
