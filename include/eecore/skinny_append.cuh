// skinny_linear whose results are heads of q, k and v, which are processed as in append_kv: as soon
// as they are summed, q is rotated in place, k is rotated, and k and v are written to their cache
// slots.
#pragma once

#include "eecore/cache_slot.cuh"
#include "eecore/head_pairs.cuh"
#include "eecore/skinny_rows.cuh"

namespace eecore::cuda {

// The maximum number of rows of x.
template <typename T>
constexpr int kMaxAppendedRows = sizeof(T) == 2 ? 32 : 8;

// The rotation of two elements of a head.
struct Rotation {
  float cosine, sine;
};

// What the blocks of a product do with the heads that they sum.
template <typename T, typename W>
class AppendedHeads {
 public:
  // `slots` and `angles` have room for a place of each token.
  __device__ __forceinline__ AppendedHeads(const SkinnyLinearParams& params, const HeadTiles& tiles,
                                           Shared<CacheSlot> slots, Shared<int64_t> angles,
                                           int num_tokens)
      : params_(params),
        tiles_(tiles),
        slots_(slots),
        angles_(angles),
        num_tokens_(num_tokens),
        num_q_heads_(static_cast<int>(params.append.num_q_heads)),
        num_kv_heads_(static_cast<int>(params.append.num_kv_heads)) {}

  // Where each row's heads are written, and where their angles begin: read before the previous
  // kernel has ended if that kernel does not write them.
  __device__ __forceinline__ void load_places() const {
    const AppendKvParams& append = params_.append;
    const int column = static_cast<int>(threadIdx.x);
    if (column >= num_tokens_) return;
    const int slot = static_cast<int>(append.slot_mapping[column]);  // fewer than 2^31
    const int page = tiles_.page_size.quotient(max(slot, 0));
    slots_[column] =
        slot < 0 ? CacheSlot{-1, 0} : CacheSlot{page, slot - page * tiles_.page_size.value};
    angles_[column] = tiles_.rotary > 0 ? append.positions[column] * append.rotary_dim : 0;
  }

  // The rotation of rows `row` (0 to 7) and row + 8 of a tile, for a token.
  __device__ __forceinline__ Rotation rotation_of(int tile, int row, int token) const {
    const AppendKvParams& append = params_.append;
    if (token >= num_tokens_ || tile >= tiles_.count) return Rotation{};
    const HeadTile at(tiles_, tile);
    if (!at.is_rotary || at.head >= num_q_heads_ + num_kv_heads_) return Rotation{};
    const bool is_query = at.head < num_q_heads_ && append.q_cos_sin != nullptr;
    const float* cos_sin = is_query ? append.q_cos_sin : append.cos_sin;
    cos_sin += angles_[token] + (at.first + row);
    return Rotation{cos_sin[0], cos_sin[tiles_.half]};
  }

  // Writes the two elements that these products are.
  __device__ __forceinline__ void append(int tile, int row, int token, float first_sum,
                                         float second_sum, const Rotation& angle) const {
    const AppendKvParams& append = params_.append;
    if (token >= num_tokens_ || tile >= tiles_.count) return;
    const HeadTile at(tiles_, tile);
    const int kv_head = at.head - num_q_heads_;
    const int first = at.first + row, second = at.second + row;
    const bool is_turned = at.is_rotary && kv_head < num_kv_heads_;

    const T* bias = static_cast<const T*>(params_.bias);
    const int base = at.head * static_cast<int>(append.head_dim);
    const T a = projected<T, W>(first_sum, params_.weight_scale, bias, base + first);
    const T b = projected<T, W>(second_sum, params_.weight_scale, bias, base + second);
    T turned_a = a, turned_b = b;
    if (is_turned) {
      turn_pair(turned_a, turned_b, angle.cosine, angle.sine);
    }
    T* out = static_cast<T*>(params_.out) + (token * params_.out_stride + base);
    out[first] = kv_head < 0 ? turned_a : a;
    out[second] = kv_head < 0 ? turned_b : b;
    const CacheSlot slot = slots_[token];
    if (kv_head < 0 || slot.page < 0) return;
    T* cache =
        kv_head < num_kv_heads_
            ? static_cast<T*>(append.k_cache) + cache_offset(append.k_cache_strides, slot, kv_head)
            : static_cast<T*>(append.v_cache) +
                  cache_offset(append.v_cache_strides, slot, kv_head - num_kv_heads_);
    cache[first] = turned_a;
    cache[second] = turned_b;
  }

 private:
  const SkinnyLinearParams& params_;
  const HeadTiles& tiles_;
  Shared<CacheSlot> slots_;
  Shared<int64_t> angles_;
  int num_tokens_;
  int num_q_heads_, num_kv_heads_;
};

// Grid: the blocks that share the tiles of out_features. Otherwise like skinny_linear_kernel, with
// up to 8 * kNTiles tokens.
template <typename T, int kMTiles, int kNTiles, bool kMakesRows, typename W = T>
__global__ void __launch_bounds__(kSkinnyThreads, kMTiles == 1 && kNTiles <= 2 ? 2 : 1)
    skinny_append_kernel(SkinnyLinearParams params, SkinnyPlan plan, HeadTiles tiles) {
  const SkinnyLane lane(plan);
  const int tiles_at_a_time = skinny_tile_rows(plan, kMTiles) / 16;
  const int my_tiles = tiles_of_block(plan, plan.num_tiles);
  const auto first_tile = [&](int tile) {
    const int block = static_cast<int>(blockIdx.x), num_blocks = static_cast<int>(gridDim.x);
    return (block + tile * num_blocks) * tiles_at_a_time + lane.group * kMTiles;
  };
  const auto rows_of = [&](int tile, const W*(&rows)[2 * kMTiles]) {
    paired_rows<kMTiles>(tiles, first_tile(tile), lane, static_cast<const W*>(params.weight),
                         params.weight_stride, rows);
  };

  EECORE_SHARED(CacheSlot, slots, 8 * kNTiles);
  EECORE_SHARED(int64_t, angles, 8 * kNTiles);
  const AppendedHeads<T, W> heads(params, tiles, slots, angles,
                                  static_cast<int>(params.num_tokens));
  if (plan.early_places) heads.load_places();
  WeightStream<W, kMTiles> weight(plan, lane, my_tiles);
  const int ring_bytes = skinny_ring_bytes(plan, kMTiles);
  const int rows_at =
      ring_bytes + skinny_exchange_floats(plan, kMTiles) * static_cast<int>(sizeof(float));
  const auto x = start_product<T, kNTiles, kMakesRows>(params, plan, weight, rows_of, 0, rows_at);
  if (!plan.early_places) heads.load_places();
  __syncthreads();

  const Shared<float> exchange = dynamic_shared<float>(ring_bytes);
  int turn = 0;
  for (int tile = 0; tile < my_tiles; ++tile) {
    // Where a thread finishes only one pair of each 8 columns: the rotation of that pair, loaded
    // while the tile is multiplied.
    Rotation early[kNTiles];
    const bool is_early = plan.num_slices >= kSlicesOfOneEach;
    if (is_early) {
      const int e = thread_of_slices(lane);
      const PairPlace pair(e);
#pragma unroll
      for (int n = 0; n < kNTiles; ++n) {
        const int column = e < 64 * kMTiles ? 8 * n + pair.column : x.count;
        early[n] = heads.rotation_of(first_tile(tile) + pair.m, pair.row, column);
      }
    }
    float sums[kMTiles][kNTiles][4];
    multiply_tile(plan, lane, weight, rows_of, x, sums);
    for_each_pair(plan, lane, exchange, turn, sums,
                  [&](int m, int row, int column, int n, float first_sum, float second_sum) {
                    const int tile_of_head = first_tile(tile) + m;
                    const Rotation angle =
                        is_early ? early[n] : heads.rotation_of(tile_of_head, row, column);
                    heads.append(tile_of_head, row, column, first_sum, second_sum, angle);
                  });
  }
}

}  // namespace eecore::cuda
