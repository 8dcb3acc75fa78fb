// kv_fill of heads without a norm: a unit of work is a few rows of the weight of a layer, so that a
// fill of one layer occupies most of a GPU. One thread has both elements that are rotated together,
// however the heads are cut.
#pragma once

#include "eecore/head_pairs.cuh"
#include "eecore/kv_fill.cuh"

namespace eecore::cuda {

// Grid: (blocks that share the tiles of all layers, groups of 8 * kNTiles rows in order).
// plan.num_tiles counts the tiles of one layer. Dynamic shared memory: the ring, then the exchange.
template <typename T, int kMTiles, int kNTiles, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, kMTiles == 1 ? 2 : 1)
    kv_fill_pairs_kernel(KvFillParams params, KvFillRows rows, SkinnyPlan plan, HeadTiles tiles,
                         Divisor units_of_layer) {
  const SkinnyLane lane(plan);
  const int num_layers = static_cast<int>(params.num_layers);
  const int num_kv_heads = static_cast<int>(params.num_kv_heads);
  const int head_dim = static_cast<int>(params.head_dim);
  const int64_t first_place = static_cast<int64_t>(blockIdx.y) * (8 * kNTiles);

  const auto first_tile = [&](int unit) {  // in its layer, the first of the warp's 16 rows
    return unit * (skinny_tile_rows(plan, kMTiles) / 16) + lane.group * kMTiles;
  };
  const auto rows_of = [&](int i, const W*(&weight_rows)[2 * kMTiles]) {
    const int unit = fill_unit(num_layers * plan.num_tiles, i);
    const int layer = units_of_layer.quotient(unit);
    const W* weight = static_cast<const W*>(params.kv_weight) + layer * params.weight_layer_stride;
    paired_rows<kMTiles>(tiles, first_tile(unit - layer * plan.num_tiles), lane, weight,
                         params.weight_row_stride, weight_rows);
  };
  WeightStream<W, kMTiles> weight(plan, lane, tiles_of_block(plan, num_layers * plan.num_tiles));
  const int my_units = start_fill(params, rows, plan, weight, rows_of, num_layers, plan.num_tiles,
                                  true, 1, first_place);

  EECORE_SHARED(CacheSlot, slots, 8 * kNTiles);
  EECORE_SHARED(int64_t, angles, 8 * kNTiles);
  load_places(params, rows, first_place, 8 * kNTiles, slots, angles);
  if (plan.num_slices == 1) __syncthreads();  // else the exchange has a barrier

  const Shared<float> exchange = dynamic_shared<float>(skinny_ring_bytes(plan, kMTiles));
  int turn = 0;
  for (int i = 0; i < my_units; ++i) {
    const int unit = fill_unit(num_layers * plan.num_tiles, i);
    const int layer = units_of_layer.quotient(unit);
    const auto x = skinny_rows<kNTiles>(
        static_cast<const T*>(rows.normed) + layer * params.num_tokens * rows.padded_size,
        rows.padded_size, rows.counts[layer], first_place);
    float sums[kMTiles][kNTiles][4];
    multiply_tile(plan, lane, weight, rows_of, x, sums);

    const T* bias = static_cast<const T*>(params.kv_bias);
    if (bias != nullptr) bias += layer * params.bias_layer_stride;
    const float* scale = params.kv_scale;
    if constexpr (kHasScales<W>) scale += layer * params.scale_layer_stride;
    for_each_pair(
        plan, lane, exchange, turn, sums,
        [&](int m, int row, int column, int, float first_sum, float second_sum) {
          const int tile = first_tile(unit - layer * plan.num_tiles) + m;
          if (column >= x.count || tile >= tiles.count) return;
          const HeadTile at(tiles, tile);
          const int first = at.first + row, second = at.second + row;
          const bool is_key = at.head < num_kv_heads, is_turned = at.is_rotary && is_key;
          float cosine = 0.0f, sine = 0.0f;
          if (is_turned) {
            const float* cos_sin = key_angles(params, layer) + (angles[column] + first);
            cosine = cos_sin[0];
            sine = cos_sin[tiles.half];
          }
          const int base = at.head * head_dim;
          // Rounded as a model of dtype T rounds a projection, then once more where it is stored.
          float a = to_float(projected<T, W>(first_sum, scale, bias, base + first));
          float b = to_float(projected<T, W>(second_sum, scale, bias, base + second));
          if (is_turned) turn_pair(a, b, cosine, sine);
          const CacheSlot slot = slots[column];
          const int kv_head = is_key ? at.head : at.head - num_kv_heads;
          const int64_t to = is_key ? layer * params.k_cache_layer_stride +
                                          cache_offset(params.k_cache_strides, slot, kv_head)
                                    : layer * params.v_cache_layer_stride +
                                          cache_offset(params.v_cache_strides, slot, kv_head);
          void* const cache = is_key ? params.k_cache : params.v_cache;
          const CacheFormat& format = params.cache_format;
          if (format.is_float8) {
            const float factor = float8_factor(is_key ? format.key_scales : format.value_scales,
                                               layer * num_kv_heads + kv_head);
            static_cast<Float8*>(cache)[to + first] = float_to_float8(__fmul_rn(a, factor));
            static_cast<Float8*>(cache)[to + second] = float_to_float8(__fmul_rn(b, factor));
          } else {
            static_cast<T*>(cache)[to + first] = from_float<T>(a);
            static_cast<T*>(cache)[to + second] = from_float<T>(b);
          }
        });
  }
  cp_async_wait<0>();  // where the last layer was not needed
}

}  // namespace eecore::cuda
