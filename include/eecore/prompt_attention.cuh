// paged_attention for sequences of many queries, by warpgroups (sm_90a): a block holds 128 rows
// (query, head of the group) of a sequence that share a kv head, 64 for each of two warpgroups.
// A warp of a third one copies their keys and values to shared memory, page by page, 128 keys at a
// time.
//
// A warpgroup multiplies the keys of a step while its products with the values of the previous
// step are under way, and weighs them while these go on. The two take turns at starting products,
// so that one weighs while the other multiplies.
//
// Steps begin at multiples of 128 keys, and keys that a row does not see have a weight of exactly
// 0: a row's result depends on its own keys alone, to the bit. NaN and infinity come out as in
// attention_rows.cuh: where rows see different keys, values that are not finite are added row by
// row, and are zeros in shared memory.
#pragma once

#include "eecore/attention_rows.cuh"
#include "eecore/attention_tile.cuh"
#include "eecore/cache_slot.cuh"

namespace eecore::cuda {

constexpr int kPromptGroups = 2;  // warpgroups that multiply
constexpr int kPromptRows = 64 * kPromptGroups;
constexpr int kPromptReaders = 128 * kPromptGroups;   // threads that multiply
constexpr int kPromptThreads = 128 + kPromptReaders;  // the first warpgroup copies
constexpr int kPromptKeys = 128;                      // of a step
constexpr int kPromptSlots = 6;                       // keys or values of a step each

// Registers of a thread that copies and of one that multiplies.
constexpr int kPromptCopyRegisters = 24, kPromptMultiplyRegisters = 240;

// Named barriers: the turn of each warpgroup, and one for both.
constexpr int kPromptTurns = 1, kPromptBoth = kPromptTurns + kPromptGroups;

// Shared memory of a block: the slots, two mbarriers for each, then a mask of keys for each warp
// that multiplies, twice.
template <int kHeadDim>
struct PromptSizes {
  static constexpr int kBox = kPromptKeys * 64;  // elements: 64 columns of a step
  static constexpr int kSlot = kBox * kHeadDim / 64;
  static constexpr int kSlotBytes = 2 * kSlot;
  static constexpr int kBarriersAt = kPromptSlots * kSlotBytes;
  static constexpr int kMasksAt = kBarriersAt + 2 * kPromptSlots * int{sizeof(uint64_t)};
  static constexpr int kMasks = kPromptReaders / 32;
  static constexpr int kBytes = kMasksAt + 2 * kMasks * int{sizeof(uint32_t)};
  static_assert(kHeadDim % 64 == 0 && kMasks * 16 == kPromptKeys);
};

// Rows [first_row, first_row + num_rows) of a sequence, as those of AttentionTile, and the keys
// that they use: num_steps steps from `begin` on.
struct PromptTile {
  QuerySequence seq;
  int kv_head, first_row, num_rows;
  KeyRange first_sees, last_sees;  // of the first row and of the last
  KeyRange used;
  int begin, num_steps;

  __device__ __forceinline__ static PromptTile of_block(const PagedAttentionParams& params,
                                                        const AttentionPlan& plan) {
    PromptTile tile{};
    const int of_heads = plan.kv_heads.quotient(static_cast<int>(blockIdx.x));
    tile.kv_head = static_cast<int>(blockIdx.x) - of_heads * plan.kv_heads.value;
    const int index = plan.num_tiles - 1 - of_heads;  // those with the most keys start first
    const auto first_tile = [&](int seq, int token) {
      return static_cast<int>(int64_t{token} * plan.group_size.value / kPromptRows) + seq;
    };
    tile.seq = find_sequence(params, index, first_tile);
    if (tile.seq.num_queries < plan.min_queries) return tile;
    tile.first_row = (index - first_tile(tile.seq.index, tile.seq.first_token)) * kPromptRows;
    const int left = tile.seq.num_queries * plan.group_size.value - tile.first_row;
    tile.num_rows = max(min(left, kPromptRows), 0);
    const auto seen_by = [&](int row) {
      return visible_keys(params, plan, tile.seq.length, tile.position(plan, row));
    };
    tile.first_sees = seen_by(0);
    tile.last_sees = seen_by(kPromptRows - 1);
    tile.used = {tile.first_sees.begin, min(tile.last_sees.end, plan.max_keys)};
    tile.begin = tile.used.begin / kPromptKeys * kPromptKeys;
    if (tile.used.begin < tile.used.end) {
      tile.num_steps = (tile.used.end - tile.begin + kPromptKeys - 1) / kPromptKeys;
    }
    return tile;
  }

  // The query of a row of the tile; rows past the last repeat it.
  __device__ __forceinline__ int query(const AttentionPlan& plan, int row) const {
    return plan.group_size.quotient(first_row + min(row, num_rows - 1));
  }
  __device__ __forceinline__ int position(const AttentionPlan& plan, int row) const {
    return seq.position(query(plan, row));
  }
  __device__ __forceinline__ int first_key(int step) const { return begin + step * kPromptKeys; }
  // Whether some row does not see all keys of a step.
  __device__ __forceinline__ bool masks(int step) const {
    const int first = first_key(step);
    return first < last_sees.begin || first + kPromptKeys > min(first_sees.end, used.end);
  }
};

// The slots: keys of the first step, then keys of a step and values of the one before it in turns,
// then values of the last one.
template <typename T, int kHeadDim>
class PromptRing {
  using Sizes = PromptSizes<kHeadDim>;

 public:
  __device__ __forceinline__ PromptRing()
      : filled_(swizzled_shared<uint64_t>(Sizes::kBarriersAt)) {}

  // By one thread, before a barrier.
  __device__ __forceinline__ void initialise() const {
    for (int i = 0; i < kPromptSlots; ++i) {
      mbarrier_init(filled_ + i, 1);
      mbarrier_init(filled_ + kPromptSlots + i, kPromptReaders / 32);
    }
    fence_mbarrier_init();
  }

  // The number of the slot that comes next.
  __device__ __forceinline__ int next() {
    const int slot = next_;
    phase_ ^= slot + 1 == kPromptSlots;
    next_ = slot + 1 == kPromptSlots ? 0 : slot + 1;
    return slot;
  }

  __device__ __forceinline__ Shared<T> data(int slot) const {
    return swizzled_shared<T>(slot * Sizes::kSlotBytes);
  }
  __device__ __forceinline__ Shared<uint64_t> filled(int slot) const { return filled_ + slot; }
  __device__ __forceinline__ Shared<uint64_t> empty(int slot) const {
    return filled_ + kPromptSlots + slot;
  }

  // Waits for a slot that next() gave, within as many slots after it.
  __device__ __forceinline__ void wait_until_filled(int slot) const {
    mbarrier_wait(filled(slot), phase_ ^ static_cast<uint32_t>(slot >= next_));
  }
  // The same until the warps that multiply have released what the slot had before, if anything.
  __device__ __forceinline__ void wait_until_empty(int slot) const {
    mbarrier_wait(empty(slot), phase_ ^ static_cast<uint32_t>(slot >= next_) ^ 1);
  }
  // By all lanes of a warp that has read a slot.
  __device__ __forceinline__ void release(int slot) const {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(empty(slot));
  }

 private:
  Shared<uint64_t> filled_;
  int next_ = 0;
  uint32_t phase_ = 0;
};

// Copies the keys and values of a tile, by one warp. A lane has a page of each step, or a piece of
// one; pages without keys that are used are filled with zeros.
template <typename T, int kHeadDim>
__device__ __forceinline__ void copy_pages(const PagedAttentionParams& params,
                                           const AttentionPlan& plan, const PromptTile& tile,
                                           const CUtensorMap& keys, const CUtensorMap& values) {
  using Sizes = PromptSizes<kHeadDim>;
  const int lane = threadIdx.x % 32;
  const int box_keys = min(plan.page_size.value, kPromptKeys);
  const int64_t row = tile.seq.index * params.page_table_stride;
  PromptRing<T, kHeadDim> ring;
  const auto locate = [&](int step) {
    const int key = tile.first_key(step) + lane * box_keys;
    const bool is_used = lane * box_keys < kPromptKeys && step < tile.num_steps &&
                         key + box_keys > tile.used.begin && key < tile.used.end;
    if (!is_used) return CacheSlot{static_cast<int>(params.num_pages), 0};
    const int index = plan.page_size.quotient(key);
    return CacheSlot{params.page_table[row + index], key - index * plan.page_size.value};
  };
  const auto copy = [&](const CUtensorMap& map, CacheSlot from) {
    const int slot = ring.next();
    ring.wait_until_empty(slot);
    if (lane == 0) mbarrier_arrive(ring.filled(slot), Sizes::kSlotBytes);
    __syncwarp();
    if (lane * box_keys >= kPromptKeys) return;
#pragma unroll
    for (int box = 0; box < kHeadDim / 64; ++box) {
      const int at[4] = {64 * box, tile.kv_head, from.offset, from.page};
      tensor_copy(ring.data(slot) + (box * Sizes::kBox + lane * box_keys * 64), map, at,
                  ring.filled(slot));
    }
  };
  CacheSlot of_keys = locate(0), of_values{};
  for (int step = 0; step < tile.num_steps; ++step) {
    const CacheSlot next = locate(step + 1);  // on its way while slots are waited for
    copy(keys, of_keys);
    if (step > 0) copy(values, of_values);
    of_values = of_keys;
    of_keys = next;
  }
  if (tile.num_steps > 0) copy(values, of_values);
}

// 64 rows of a tile in the registers of a warpgroup: as in TensorCoreRows, lane l of a warp has
// rows l / 4 and l / 4 + 8 of its 16.
template <typename T, int kHeadDim>
class PromptRows {
  using Sizes = PromptSizes<kHeadDim>;
  static constexpr int kTiles = kHeadDim / 8, kKeyTiles = kPromptKeys / 8;
  static constexpr int kParts = kHeadDim / 16, kKeyParts = kPromptKeys / 16;

 public:
  __device__ __forceinline__ PromptRows(const PagedAttentionParams& params,
                                        const AttentionPlan& plan, const PromptTile& tile)
      : params_(params),
        plan_(plan),
        tile_(tile),
        masks_(swizzled_shared<uint32_t>(Sizes::kMasksAt)),
        lane_(threadIdx.x % 32),
        warp_(__shfl_sync(kWholeWarp, static_cast<int>(threadIdx.x) / 32, 0) - 4) {}

  __device__ __forceinline__ void attend() {
    for (int i = 0; i < 2; ++i) {
      maximum_[i] = -INFINITY;
      weight_[i] = 0.0f;
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[n][i] = 0.0f;
    }
    if (tile_.num_steps == 0) return;
    load_queries();
    if (group() == 1) pass_turn();
    {
      const int keys = ring_.next();
      ring_.wait_until_filled(keys);
      take_turn();
      multiply_keys(keys);
      pass_turn(0);
      wgmma_wait<0>(scores_, queries_);
      ring_.release(keys);
      weigh(0);
      make_parts();
    }
#pragma unroll 1
    for (int step = 1; step < tile_.num_steps; ++step) {
      const int keys = ring_.next(), values = ring_.next();
      if (tile_.masks(step - 1)) make_finite(values, step - 1);
      ring_.wait_until_filled(keys);
      take_turn();
      multiply_keys(keys);
      ring_.wait_until_filled(values);
      multiply_values(values);
      pass_turn(step);
      wgmma_wait<1>(scores_, queries_);
      ring_.release(keys);
      weigh(step);
      wgmma_wait<0>(sums_, parts_);
      ring_.release(values);
      scale_sums();
      make_parts();
    }
    const int values = ring_.next();
    if (tile_.masks(tile_.num_steps - 1)) make_finite(values, tile_.num_steps - 1);
    ring_.wait_until_filled(values);
    multiply_values(values);
    wgmma_wait<0>(sums_, parts_);
  }

  __device__ __forceinline__ void store() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float weight = reduce_lanes<4>(weight_[i]);
      const float inverse = weight == 0.0f ? 0.0f : 1.0f / weight;
      if (row(i) >= tile_.num_rows) continue;
      T* const out = static_cast<T*>(params_.out) + token(i) * params_.out_token_stride +
                     head(i) * params_.out_head_stride;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int at = 8 * n + lane_ % 4 * 2;
        if (at >= params_.head_dim) continue;
        *reinterpret_cast<uint32_t*>(out + at) =
            pack_pair<T>(sums_[n][2 * i] * inverse, sums_[n][2 * i + 1] * inverse);
      }
    }
  }

 private:
  // The warpgroup's number.
  __device__ __forceinline__ int group() const { return warp_ / 4; }
  // The lane's rows.
  __device__ __forceinline__ int row(int i) const { return 16 * warp_ + lane_ / 4 + 8 * i; }
  __device__ __forceinline__ int token(int i) const {
    return tile_.seq.first_token + tile_.query(plan_, row(i));
  }
  __device__ __forceinline__ int head(int i) const {
    const int of_sequence = tile_.first_row + min(row(i), tile_.num_rows - 1);
    return tile_.kv_head * plan_.group_size.value + plan_.group_size.remainder(of_sequence);
  }
  // The keys that a row sees.
  __device__ __forceinline__ KeyRange seen(int i) const {
    const KeyRange all =
        visible_keys(params_, plan_, tile_.seq.length, tile_.position(plan_, row(i)));
    return {all.begin, min(all.end, tile_.used.end)};
  }

  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const T* const from = static_cast<const T*>(params_.q) + token(i) * params_.q_token_stride +
                            head(i) * params_.q_head_stride;
#pragma unroll
      for (int d = 0; d < 2 * kParts; ++d) {
        const int at = 8 * d + lane_ % 4 * 2;
        queries_[d / 2][d % 2 * 2 + i] =
            at < params_.head_dim ? *reinterpret_cast<const uint32_t*>(from + at) : 0u;
      }
    }
  }

  // Turns at starting products: the first warpgroup has the first.
  __device__ __forceinline__ void take_turn() const {
    named_barrier_wait(kPromptTurns + group(), kPromptReaders);
  }
  __device__ __forceinline__ void pass_turn() const {
    named_barrier_arrive(kPromptTurns + 1 - group(), kPromptReaders);
  }
  __device__ __forceinline__ void pass_turn(int step) const {
    if (group() == 0 || step + 1 < tile_.num_steps) pass_turn();
  }

  // Starts the products of the queries with the keys of a slot.
  __device__ __forceinline__ void multiply_keys(int slot) {
    const Shared<T> keys = ring_.data(slot);
    const auto matrix = [&](int part) {
      return wgmma_matrix(keys + (part / 4 * Sizes::kBox + part % 4 * 16), 0, 1024,
                          Swizzle::k128Bytes);
    };
    wgmma_fence(scores_, queries_);
    wgmma_m64k16<T, false>(scores_, queries_[0], matrix(0));
#pragma unroll
    for (int part = 1; part < kParts; ++part) {
      wgmma_m64k16<T>(scores_, queries_[part], matrix(part));
    }
    wgmma_commit();
  }

  // Starts the products of the weights with the values of a slot.
  __device__ __forceinline__ void multiply_values(int slot) {
    const Shared<T> values = ring_.data(slot);
    wgmma_fence(sums_, parts_);
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
      wgmma_m64k16<T, true, true>(sums_, parts_[part],
                                  wgmma_transposed(values + part * 16 * 64, 2 * Sizes::kBox));
    }
    wgmma_commit();
  }

  // Turns the scores of a step into weights, relative to each row's largest score so far; the sums
  // have to be scaled by factor_.
  __device__ __forceinline__ void weigh(int step) {
    float scores[kKeyTiles][4];
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[j][i] = attention_score(scores_[j][i], plan_.scale);
    }
    if (plan_.soft_cap > 0.0f) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[j][i] = soft_capped(scores[j][i], plan_.soft_cap);
      }
    }
    if (tile_.masks(step)) {
      const int first = tile_.first_key(step) + lane_ % 4 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const KeyRange sees = seen(r);
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const int key = first + 8 * j + i;
            if (key < sees.begin || key >= sees.end) scores[j][2 * r + i] = -INFINITY;
          }
        }
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float largest = maximum_[r];
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        largest = fmaxf(largest, fmaxf(scores[j][2 * r], scores[j][2 * r + 1]));
      }
      largest = reduce_lanes<4>(largest, Max{});
      const float reference = reference_of(largest);
      factor_[r] = exp2_fast(maximum_[r] - reference);
      maximum_[r] = largest;
      weight_[r] *= factor_[r];
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const float weight = exp2_fast(scores[j][2 * r + i] - reference);
          weight_[r] += weight;
          scores_[j][2 * r + i] = weight;
        }
      }
    }
  }

  // Most steps change no maximum.
  __device__ __forceinline__ void scale_sums() {
    if (!__any_sync(kWholeWarp, factor_[0] != 1.0f || factor_[1] != 1.0f)) return;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[n][i] = sums_[n][i] * factor_[i / 2];
    }
  }

  // The weights as A of the products with the values.
  __device__ __forceinline__ void make_parts() {
#pragma unroll
    for (int part = 0; part < kKeyParts; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int j = 2 * part + i / 2;
        parts_[part][i] = pack_pair<T>(scores_[j][i % 2 * 2], scores_[j][i % 2 * 2 + 1]);
      }
    }
  }

  // Replaces values of a step that are not finite by zeros, and adds them to the rows that see
  // them. Both warpgroups call it; a warp looks for them among 16 keys.
  __device__ __forceinline__ void make_finite(int slot, int step) {
    constexpr int kPieces = kHeadDim / 8;  // of 16 bytes, of a key
    constexpr int kAtOnce = 32 / kPieces;  // keys
    const Shared<T> values = ring_.data(slot);
    // Where a piece is. Every piece is visited once, so its place in the order does not count.
    const auto piece_at = [&](int i) {
      const int key = 16 * warp_ + i * kAtOnce + lane_ / kPieces, piece = lane_ % kPieces;
      return shared_as<uint32_t>(values + (piece / 8 * Sizes::kBox + key * 64 + piece % 8 * 8));
    };
    ring_.wait_until_filled(slot);
    uint32_t found = 0;
#pragma unroll 1
    for (int i = 0; i < 16 / kAtOnce; ++i) {
      const Words words = shared_load16(piece_at(i));
      bool is_finite = true;
#pragma unroll
      for (int j = 0; j < 4; ++j) is_finite &= finite_pair<T>(words.values[j]) == words.values[j];
      const uint32_t others = __ballot_sync(kWholeWarp, !is_finite);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const uint32_t of_key = others >> j * kPieces & ((1u << kPieces) - 1);
        if (of_key != 0) found |= 1u << (i * kAtOnce + j);
      }
    }
    const Shared<uint32_t> masks = masks_ + step % 2 * Sizes::kMasks;
    if (lane_ == 0) masks[warp_] = found;
    named_barrier_wait(kPromptBoth, kPromptReaders);
    uint32_t of_all = 0;
#pragma unroll
    for (int i = 0; i < Sizes::kMasks; ++i) of_all |= masks[i];
    if (of_all == 0) return;

    const KeyRange sees[2] = {seen(0), seen(1)};
#pragma unroll 1
    for (int i = 0; i < kPromptKeys; ++i) {
      if ((masks[i / 16] >> i % 16 & 1) == 0) continue;
      const int key = tile_.first_key(step) + i;
#pragma unroll
      for (int n = 0; n < kTiles; ++n) {
        const int at = n / 8 * Sizes::kBox + i * 64 + (n ^ i) % 8 * 8 + lane_ % 4 * 2;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const float value = to_float(T(values[at + j % 2]));
          const KeyRange& range = sees[j / 2];
          if (!is_finite(value) && key >= range.begin && key < range.end) {
            sums_[n][j] = sums_[n][j] + value;
          }
        }
      }
    }
    named_barrier_wait(kPromptBoth, kPromptReaders);
    if (found != 0) {
#pragma unroll 1
      for (int i = 0; i < 16 / kAtOnce; ++i) {
        Words words = shared_load16(piece_at(i));
#pragma unroll
        for (int j = 0; j < 4; ++j) words.values[j] = finite_pair<T>(words.values[j]);
        shared_store16(piece_at(i), words);
      }
    }
    fence_proxy_async();
    named_barrier_wait(kPromptBoth, kPromptReaders);
  }

  const PagedAttentionParams& params_;
  const AttentionPlan& plan_;
  const PromptTile& tile_;
  PromptRing<T, kHeadDim> ring_;
  Shared<uint32_t> masks_;
  int lane_, warp_;  // of those that multiply; the compiler sees that a warp has one number
  WgmmaPart queries_[kParts];
  WgmmaSums<kKeyTiles> scores_;
  WgmmaPart parts_[kKeyParts];
  WgmmaSums<kTiles> sums_;
  float maximum_[2], weight_[2], factor_[2];  // the weight covers this lane's keys alone
};

// Grid: (num_tiles * num_kv_heads), as that of attend_tile. `keys` and `values` have boxes of 64
// columns of a head and the keys of a page, 128 at most.
template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kPromptThreads, 1)
    paged_attention_prompt_kernel(PagedAttentionParams params, AttentionPlan plan,
                                  const __grid_constant__ CUtensorMap keys,
                                  const __grid_constant__ CUtensorMap values) {
#if EECORE_HAS_WGMMA
  if (threadIdx.x == 0) PromptRing<T, kHeadDim>().initialise();
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();
  const PromptTile tile = PromptTile::of_block(params, plan);
  if (tile.num_rows == 0) return;
  if (threadIdx.x < 128) {
    give_registers<kPromptCopyRegisters>();
    if (threadIdx.x < 32) copy_pages<T, kHeadDim>(params, plan, tile, keys, values);
    return;
  }
  take_registers<kPromptMultiplyRegisters>();
  PromptRows<T, kHeadDim> rows(params, plan, tile);
  rows.attend();
  rows.store();
#else
  __trap();  // the launcher asks for a GPU that has wgmma, and for a build for it
#endif
}

}  // namespace eecore::cuda
