// paged_attention for sequences of many queries, by warpgroups (sm_90a): a block holds 128 rows
// (query, head of the group) of a sequence that share a kv head, 64 for each of two warpgroups.
// A warp of a third one copies their keys and values to shared memory, page by page, 128 keys at a
// time. Keys and values in float8 are widened there by all warps of that warpgroup.
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
#include "eecore/float8.cuh"

namespace eecore::cuda {

constexpr int kPromptGroups = 2;  // warpgroups that multiply
constexpr int kPromptRows = 64 * kPromptGroups;
constexpr int kPromptReaders = 128 * kPromptGroups;   // threads that multiply
constexpr int kPromptThreads = 128 + kPromptReaders;  // the first warpgroup copies
constexpr int kPromptKeys = 128;                      // of a step

// Registers of a thread that copies, and may widen, and of one that multiplies.
constexpr int kPromptCopyRegisters = 40, kPromptMultiplyRegisters = 232;

// Named barriers: the turn of each warpgroup, and one for both.
constexpr int kPromptTurns = 1, kPromptBoth = kPromptTurns + kPromptGroups;

// Slots of shared memory, which warps fill and others read in turns: keys of the first step, then
// keys of a step and values of the one before it, then values of the last one. A slot of kSlot
// elements of E has two mbarriers: one counts the kFillers arrivals, and bytes, that fill it, the
// other the kReaders warps that have read it.
template <typename E, int kSlots, int kSlot, int kDataAt, int kBarriersAt, int kFillers,
          int kReaders>
class PromptRing {
 public:
  static constexpr int kSlotBytes = kSlot * int{sizeof(E)};
  static constexpr int kBarriersEnd = kBarriersAt + 2 * kSlots * int{sizeof(uint64_t)};

  __device__ __forceinline__ PromptRing() : filled_(swizzled_shared<uint64_t>(kBarriersAt)) {}

  // By one thread, before a barrier.
  __device__ __forceinline__ void initialise() const {
    for (uint32_t i = 0; i < kSlots; ++i) {
      mbarrier_init(filled(i), kFillers);
      mbarrier_init(empty(i), kReaders);
    }
    fence_mbarrier_init();
  }

  // The number of the turn that comes next: turn i takes slot i % kSlots.
  __device__ __forceinline__ uint32_t next() { return turn_++; }

  __device__ __forceinline__ Shared<E> data(uint32_t turn) const {
    return swizzled_shared<E>(kDataAt + static_cast<int>(turn % kSlots) * kSlotBytes);
  }
  __device__ __forceinline__ Shared<uint64_t> filled(uint32_t turn) const {
    return filled_ + static_cast<int>(turn % kSlots);
  }
  __device__ __forceinline__ Shared<uint64_t> empty(uint32_t turn) const {
    return filled(turn) + kSlots;
  }

  __device__ __forceinline__ void wait_until_filled(uint32_t turn) const {
    mbarrier_wait(filled(turn), turn / kSlots % 2);
  }
  // Waits until the warps that read have released what the slot had before, if anything.
  __device__ __forceinline__ void wait_until_empty(uint32_t turn) const {
    mbarrier_wait(empty(turn), turn / kSlots % 2 ^ 1);
  }
  // By all lanes of a warp that has filled a slot, or read it.
  __device__ __forceinline__ void fill(uint32_t turn) const { arrive(filled(turn)); }
  __device__ __forceinline__ void release(uint32_t turn) const { arrive(empty(turn)); }

 private:
  __device__ __forceinline__ static void arrive(Shared<uint64_t> barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(barrier);
  }

  Shared<uint64_t> filled_;
  uint32_t turn_ = 0;
};

// Shared memory of a block: the slots that products read, and those of copies where their elements
// C are not T, as many as fit; their mbarriers; then a mask of keys for each warp that multiplies,
// twice.
template <typename T, int kHeadDim, typename C>
struct PromptSizes {
  static constexpr bool kWidens = !std::is_same_v<T, C>;
  static constexpr int kBox = kPromptKeys * 64;  // elements: 64 columns of a step
  static constexpr int kSlot = kBox * kHeadDim / 64;
  static constexpr int kSlots = kWidens ? 5 : 6, kCopySlots = 4;
  static constexpr int kMasks = kPromptReaders / 32, kWideners = 4;  // warps
  static constexpr int kCopiesAt = kSlots * kSlot * int{sizeof(T)};
  static constexpr int kBarriersAt =
      kCopiesAt + (kWidens ? kCopySlots * kSlot * int{sizeof(C)} : 0);
  using Ring = PromptRing<T, kSlots, kSlot, 0, kBarriersAt, kWidens ? kWideners : 1, kMasks>;
  using WidenedCopies =
      PromptRing<C, kCopySlots, kSlot, kCopiesAt, Ring::kBarriersEnd, 1, kWideners>;
  using Copies = std::conditional_t<kWidens, WidenedCopies, Ring>;
  static constexpr int kMasksAt = Copies::kBarriersEnd;
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

// Copies the keys and values of a tile, by one warp. A lane has a page of each step, or a piece of
// one; pages without keys that are used are filled with zeros.
template <typename T, int kHeadDim, typename C>
class PromptCopies {
  using Sizes = PromptSizes<T, kHeadDim, C>;
  static constexpr int kColumns = Sizes::kWidens ? kHeadDim : 64;  // of a box

 public:
  __device__ __forceinline__ PromptCopies(const PagedAttentionParams& params,
                                          const AttentionPlan& plan, const PromptTile& tile,
                                          const CUtensorMap& keys, const CUtensorMap& values)
      : params_(params),
        plan_(plan),
        tile_(tile),
        keys_(keys),
        values_(values),
        at_(static_cast<int>(threadIdx.x) % 32 * box_keys()) {
    of_keys_ = page_of(0);
  }

  // Copies the keys of a step and the values of the one before it. Steps follow each other from 0
  // to tile.num_steps.
  __device__ __forceinline__ void start(int step) {
    const int next = page_of(step + 1);  // on its way while slots are waited for
    if (step < tile_.num_steps) copy(keys_, max(2 * step - 1, 0), step, of_keys_);
    if (step > 0) copy(values_, min(2 * step, 2 * tile_.num_steps - 1), step - 1, of_values_);
    of_values_ = of_keys_;
    of_keys_ = next;
  }

 private:
  __device__ __forceinline__ int box_keys() const {
    return min(plan_.page_size.value, kPromptKeys);
  }
  __device__ __forceinline__ int first_key(int step) const { return tile_.first_key(step) + at_; }

  // The page of the lane's keys of a step; out of bounds if none of them is used.
  __device__ __forceinline__ int page_of(int step) const {
    const int key = first_key(step);
    const bool is_used = at_ < kPromptKeys && step < tile_.num_steps &&
                         key + box_keys() > tile_.used.begin && key < tile_.used.end;
    if (!is_used) return static_cast<int>(params_.num_pages);
    const int64_t row = tile_.seq.index * params_.page_table_stride;
    return params_.page_table[row + plan_.page_size.quotient(key)];
  }

  __device__ __forceinline__ void copy(const CUtensorMap& map, uint32_t turn, int step, int page) {
    ring_.wait_until_empty(turn);
    if (at_ == 0) mbarrier_arrive(ring_.filled(turn), Sizes::Copies::kSlotBytes);
    __syncwarp();
    if (at_ >= kPromptKeys) return;
    const int offset = plan_.page_size.remainder(first_key(step));
#pragma unroll
    for (int box = 0; box < kHeadDim / kColumns; ++box) {
      const int at[4] = {kColumns * box, tile_.kv_head, offset, page};
      tensor_copy(ring_.data(turn) + (box * kPromptKeys + at_) * kColumns, map, at,
                  ring_.filled(turn));
    }
  }

  const PagedAttentionParams& params_;
  const AttentionPlan& plan_;
  const PromptTile& tile_;
  const CUtensorMap& keys_;
  const CUtensorMap& values_;
  typename Sizes::Copies ring_;
  int at_;                       // where the lane's keys are in a step
  int of_keys_, of_values_ = 0;  // the pages
};

// Widens slots of float8, by four warps: a thread has 8 elements of one of kKeys keys, at the same
// place of the 8 rows of a swizzle each time.
template <typename T, int kHeadDim>
class PromptWidener {
  using Sizes = PromptSizes<T, kHeadDim, Float8>;
  static constexpr int kPieces = kHeadDim / 8, kKeys = 128 / kPieces;
  static constexpr int kBatch = 4;  // loads that are in flight at a time
  static_assert(kKeys % 8 == 0 && kPromptKeys % (kKeys * kBatch) == 0);

 public:
  __device__ __forceinline__ PromptWidener()
      : from_(threadIdx.x), to_(place(threadIdx.x / kPieces, threadIdx.x % kPieces)) {}

  // Widens the slot of a turn.
  __device__ __forceinline__ void widen(uint32_t turn) const {
    copies_.wait_until_filled(turn);
    ring_.wait_until_empty(turn);
    const Shared<uint64_t> from = shared_as<uint64_t>(copies_.data(turn)) + from_;
    const Shared<uint32_t> to = shared_as<uint32_t>(ring_.data(turn) + to_);
#pragma unroll 1
    for (int i = 0; i < kPromptKeys / kKeys; i += kBatch) {
      uint64_t bytes[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) bytes[j] = from[(i + j) * 128];
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        shared_store16(to + (i + j) * kKeys * 32, widen_eight<T>(bytes[j]));
      }
    }
    copies_.release(turn);
    fence_proxy_async();
    ring_.fill(turn);
  }

 private:
  // Where 8 elements of a key are, in elements.
  __device__ __forceinline__ static int place(int key, int piece) {
    return piece / 8 * Sizes::kBox + key * 64 + (piece ^ key) % 8 * 8;
  }

  typename Sizes::Copies copies_;
  typename Sizes::Ring ring_;
  int from_, to_;
};

// 64 rows of a tile in the registers of a warpgroup: as in TensorCoreRows, lane l of a warp has
// rows l / 4 and l / 4 + 8 of its 16. Scores and results are multiplied by the scales of a cache of
// float8.
template <typename T, int kHeadDim, typename C>
class PromptRows {
  using Sizes = PromptSizes<T, kHeadDim, C>;
  static constexpr int kTiles = kHeadDim / 8, kKeyTiles = kPromptKeys / 8;
  static constexpr int kParts = kHeadDim / 16, kKeyParts = kPromptKeys / 16;

 public:
  __device__ __forceinline__ PromptRows(const PagedAttentionParams& params,
                                        const AttentionPlan& plan, const PromptTile& tile)
      : params_(params),
        plan_(plan),
        tile_(tile),
        scale_(plan, scale_of<T, C>(params.cache_format.key_scales, tile.kv_head)),
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
      const uint32_t keys = ring_.next();
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
      const uint32_t keys = ring_.next(), values = ring_.next();
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
    const uint32_t values = ring_.next();
    if (tile_.masks(tile_.num_steps - 1)) make_finite(values, tile_.num_steps - 1);
    ring_.wait_until_filled(values);
    multiply_values(values);
    wgmma_wait<0>(sums_, parts_);
  }

  __device__ __forceinline__ void store() {
    const float scale = scale_of<T, C>(params_.cache_format.value_scales, tile_.kv_head);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float weight = reduce_lanes<4>(weight_[i]);
      const float inverse = weight == 0.0f ? 0.0f : scale / weight;
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
  __device__ __forceinline__ void multiply_keys(uint32_t turn) {
    const Shared<T> keys = ring_.data(turn);
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
  __device__ __forceinline__ void multiply_values(uint32_t turn) {
    const Shared<T> values = ring_.data(turn);
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
      for (int i = 0; i < 4; ++i) scores[j][i] = attention_score(scores_[j][i], scale_.of(plan_));
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
        // Compared with constants: 32 keys of their own would take as many registers.
        const int begin = sees.begin - first, end = sees.end - first;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            if (8 * j + i < begin || 8 * j + i >= end) scores[j][2 * r + i] = -INFINITY;
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
  __device__ __forceinline__ void make_finite(uint32_t turn, int step) {
    constexpr int kPieces = kHeadDim / 8;  // of 16 bytes, of a key
    constexpr int kAtOnce = 32 / kPieces;  // keys
    const Shared<T> values = ring_.data(turn);
    // Where a piece is. Every piece is visited once, so its place in the order does not count.
    const auto piece_at = [&](int i) {
      const int key = 16 * warp_ + i * kAtOnce + lane_ / kPieces, piece = lane_ % kPieces;
      return shared_as<uint32_t>(values + (piece / 8 * Sizes::kBox + key * 64 + piece % 8 * 8));
    };
    ring_.wait_until_filled(turn);
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
  ScoreScale<Sizes::kWidens> scale_;
  typename Sizes::Ring ring_;
  Shared<uint32_t> masks_;
  int lane_, warp_;  // of those that multiply; the compiler sees that a warp has one number
  WgmmaPart queries_[kParts];
  WgmmaSums<kKeyTiles> scores_;
  WgmmaPart parts_[kKeyParts];
  WgmmaSums<kTiles> sums_;
  float maximum_[2], weight_[2], factor_[2];  // the weight covers this lane's keys alone
};

// Grid: (num_tiles * num_kv_heads), as that of attend_tile. C: the element type of the cache, T or
// float8. `keys` and `values` have boxes of the keys of a page, 128 at most: of 64 columns of a
// head in the order of Swizzle::k128Bytes, or of kHeadDim columns of float8 in order.
template <typename T, int kHeadDim, typename C>
__global__ void __launch_bounds__(kPromptThreads, 1)
    paged_attention_prompt_kernel(PagedAttentionParams params, AttentionPlan plan,
                                  const __grid_constant__ CUtensorMap keys,
                                  const __grid_constant__ CUtensorMap values) {
#if EECORE_HAS_WGMMA
  using Sizes = PromptSizes<T, kHeadDim, C>;
  if (threadIdx.x == 0) {
    typename Sizes::Ring().initialise();
    if constexpr (Sizes::kWidens) typename Sizes::Copies().initialise();
  }
  wait_for_previous_kernel();
  let_next_kernel_start();
  __syncthreads();
  const PromptTile tile = PromptTile::of_block(params, plan);
  if (tile.num_rows == 0) return;
  if (threadIdx.x < 128) {
    give_registers<kPromptCopyRegisters>();
    if (tile.num_steps == 0) return;
    PromptCopies<T, kHeadDim, C> copies(params, plan, tile, keys, values);
    if constexpr (Sizes::kWidens) {
      // The copies of two turns are under way while those before them are widened.
      const PromptWidener<T, kHeadDim> widener;
#pragma unroll 1
      for (int turn = -3; turn < 2 * tile.num_steps; ++turn) {
        const int step = (turn >> 1) + 2;
        if (threadIdx.x < 32 && turn & 1 && step <= tile.num_steps) copies.start(step);
        if (turn >= 0) widener.widen(turn);
      }
    } else {
#pragma unroll 1
      for (int step = 0; threadIdx.x < 32 && step <= tile.num_steps; ++step) copies.start(step);
    }
    return;
  }
  take_registers<kPromptMultiplyRegisters>();
  PromptRows<T, kHeadDim, C> rows(params, plan, tile);
  rows.attend();
  rows.store();
#else
  __trap();  // the launcher asks for a GPU that has wgmma, and for a build for it
#endif
}

}  // namespace eecore::cuda
