// The keys and values of a block's rounds on their way from the pages of the cache through a ring
// of stages in shared memory.
#pragma once

#include "eecore/async_copy.cuh"
#include "eecore/attention_tile.cuh"
#include "eecore/cache_slot.cuh"
#include "eecore/float8.cuh"

namespace eecore::cuda {

// The splits of a team as seen by one of its warps. Each warp of the team brings a part of every
// stage, the keys of one step; all of them read all parts. The stages of a round follow those of
// the previous one, so the ring does not run dry while the results of a round are merged. float8
// keys of the cache (type C) are float8 in the ring, and are widened to T in separate memory after
// they arrive.
template <typename T, int kHeadDim, typename C = T>
class KeyStream {
  using Sizes = AttentionSizes<T, kHeadDim, C>;
  static constexpr bool kWidens = Sizes::kWidens;
  static constexpr int kStepKeys = Sizes::kStepKeys, kPieces = Sizes::kCachePieces;
  static constexpr int kPack = Sizes::kCachePack, kRowStride = Sizes::kCacheRowStride;
  static constexpr int kCopies = kStepKeys * kPieces / 32;  // of a lane, of keys and of values each
  static constexpr int kBatch = 4;
  // Whether no keys are requested before the wait: no register is left to tell them apart.
  static constexpr bool kAllWait = kWidens && kHeadDim > 64;

 public:
  // The stages of the block's rounds from `round` on; the first of them takes num_stages at least.
  // `tile` is in shared memory; `offsets` is this warp's own memory, int64 [kStepKeys, 2].
  __device__ __forceinline__ KeyStream(const PagedAttentionParams& params,
                                       const AttentionPlan& plan, Shared<AttentionTile> tile,
                                       int kv_head, int round, Shared<C> ring,
                                       Shared<int64_t> offsets)
      : params_(params),
        plan_(plan),
        tile_(tile),
        k_(static_cast<const C*>(params.k_cache)),
        v_(static_cast<const C*>(params.v_cache)),
        kv_head_(kv_head),
        ring_(ring),
        offsets_(offsets),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32) {
    const AttentionTile now = tile[0];
    team_shift_ = kMaxTeamsShift - now.teams_shift;
    stride_shift_ = plan.step_shift + now.splits_shift;
    enter(now, round);
    left_ = max(left_, plan.num_stages);
  }

  // Requests all stages of the ring but the last. All page-table entries are loaded before the
  // first of them is used. Keys from `first_new` on, which the previous kernel may be about to
  // write, are requested after it has ended.
  __device__ __forceinline__ void start(int first_new) {
    CacheSlot slots[kMaxAttentionStages];
    const int first_key = next_key_, stride = 1 << (stride_shift_ + team_shift_);
#pragma unroll
    for (int i = 0; i < kMaxAttentionStages; ++i) {
      slots[i] = i < plan_.num_stages ? locate() : CacheSlot{-1, 0};
    }
    left_ -= plan_.num_stages;
#pragma unroll 1
    for (int i = 0; i < plan_.num_stages - 1; ++i) {
      const bool is_new = kAllWait || first_key + i * stride + kStepKeys > first_new;
      wait_for_previous_kernel(is_new && __any_sync(kWholeWarp, slots[0].page >= 0));
      copy(slots[0], i);
      cp_async_commit();
#pragma unroll
      for (int j = 0; j < kMaxAttentionStages - 1; ++j) slots[j] = slots[j + 1];
    }
    next_ = slots[0];
  }

  // Memory that is still unused after start(): the ring's last stage, or that of the widened keys.
  __device__ __forceinline__ Shared<T> unused() const {
    if constexpr (kWidens) {
      return wide(warp_);
    } else {
      return part(plan_.num_stages - 1, warp_);
    }
  }

  // Waits for the next stage; the whole team has then read the previous stage, and another one is
  // requested in its place. With teams of several warps, all threads of the block call it.
  __device__ __forceinline__ void advance() {
    cp_async_wait_all_but(plan_.num_stages - 2);
    meet();
    at_ = at_ + 1 == plan_.num_stages ? 0 : at_ + 1;
    copy(next_, at_ == 0 ? plan_.num_stages - 1 : at_ - 1);
    cp_async_commit();
    if (left_ == 0) {
      const AttentionTile now = tile_[0];
      const int round = now.rounds().after(plan_, round_);
      enter(now, min(round, now.rounds().end));
    }
    next_ = locate();
    --left_;
    if constexpr (kWidens) {
      if (filled_ >> at_ & 1) widen();
      meet();
    }
  }

  // A barrier among all warps that read what this warp writes.
  __device__ __forceinline__ void meet() const {
    if (team_shift_ == 0) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  // The memory of the stage, kResultSize for each warp, for other use when all warps of a team have
  // read what one of them has brought, and until the next stage.
  __device__ __forceinline__ Shared<float> reused() const {
    if constexpr (kWidens) {
      return shared_as<float>(wide(0));
    } else {
      return shared_as<float>(part(at_, 0));
    }
  }

  // What warp `of_team` has brought to the stage: keys [kStepKeys, kRowStride], and the values.
  __device__ __forceinline__ Shared<T> keys(int of_team) const {
    const int warp = warp_ - in_team() + of_team;
    if constexpr (kWidens) {
      return wide(warp);
    } else {
      return part(at_, warp);
    }
  }
  __device__ __forceinline__ Shared<T> values(int of_team) const {
    return keys(of_team) + Sizes::kBlockSize;
  }

 private:
  // This warp's place in its team.
  __device__ __forceinline__ int in_team() const { return warp_ & ((1 << team_shift_) - 1); }

  // Turns to the stages of a round: none that has keys if it is the end of the rounds.
  __device__ __forceinline__ void enter(const AttentionTile& tile, int round) {
    const Split split = tile.split(plan_, (round << tile.teams_shift) + (warp_ >> team_shift_));
    round_ = round;
    next_key_ = split.first + (in_team() << stride_shift_);
    next_end_ = split.end;
    left_ = tile.num_stages(plan_, round);
  }

  __device__ __forceinline__ Shared<C> part(int stage, int warp) const {
    return ring_ + (stage * kAttentionWarps + warp) * 2 * Sizes::kCacheBlockSize;
  }

  // Before the ring: keys and values of a stage as T, [kAttentionWarps, 2, kBlockSize].
  __device__ __forceinline__ Shared<T> wide(int warp) const {
    return shared_as<T>(ring_ - Sizes::kWideBytes) + warp * 2 * Sizes::kBlockSize;
  }

  // Widens the keys that this warp has brought to the current stage to T.
  __device__ __forceinline__ void widen() const {
    const Shared<C> from = part(at_, warp_);
    const Shared<T> to = wide(warp_);
#pragma unroll(kHeadDim > 128 ? 1 : 4)
    for (int i = 0; i < 2 * kCopies; ++i) {
      const int row = (i * 32 + lane_) / kPieces, at = (i * 32 + lane_) % kPieces * kPack;
      const WidePacks<T> packs = widen_pack<T>(shared_load16(from + row * kRowStride + at));
#pragma unroll
      for (int j = 0; j < WidePacks<T>::kCount; ++j) {
        shared_store16(to + row * Sizes::kRowStride + at + j * Sizes::kPack, packs.packs[j]);
      }
    }
  }

  // The slot of this lane's key among those that this warp brings to the stage that is requested
  // after the ones so far; page -1: not used.
  __device__ __forceinline__ CacheSlot locate() {
    const int key = next_key_ + lane_ % kStepKeys;
    next_key_ += 1 << (stride_shift_ + team_shift_);
    const AttentionTile now = tile_[0];
    if (key < now.used.begin || key >= next_end_) return {-1, 0};
    const int index = plan_.page_size.quotient(key);
    const int32_t* const pages = params_.page_table + now.seq.index * params_.page_table_stride;
    return {pages[index], key - index * plan_.page_size.value};
  }

  // Starts the copies of the keys that the lanes have located, unless there are none; unused keys
  // become zeros.
  __device__ __forceinline__ void copy(CacheSlot slot, int stage) {
    const bool used = slot.page >= 0, is_filled = __any_sync(kWholeWarp, used);
    if constexpr (kWidens) filled_ = (filled_ & ~(1 << stage)) | int{is_filled} << stage;
    if (!is_filled) return;
    Pack<int64_t> mine = {{-1, -1}};
    if (used) {
      mine = {{cache_offset(params_.k_cache_strides, slot, kv_head_),
               cache_offset(params_.v_cache_strides, slot, kv_head_)}};
    }
    __syncwarp();  // all lanes have read the offsets of the previous stage
    if (lane_ < kStepKeys) shared_store16(offsets_ + lane_ * 2, mine);
    __syncwarp();
    const Shared<C> k_to = part(stage, warp_), v_to = k_to + Sizes::kCacheBlockSize;
    const int head_dim = static_cast<int>(params_.head_dim);
    const auto key_of = [&](int i) { return (i * 32 + lane_) / kPieces; };
    const auto column_of = [&](int i) { return (i * 32 + lane_) % kPieces * kPack; };
    if (__all_sync(kWholeWarp, used && plan_.kv_aligned && head_dim == kHeadDim)) {
      // Offsets first, a few at a time: no load moves up across a copy.
#pragma unroll
      for (int i = 0; i < kCopies; i += kBatch) {
        Pack<int64_t> from[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (i + j < kCopies) from[j] = shared_load16(offsets_ + key_of(i + j) * 2);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          if (i + j >= kCopies) continue;
          const int at = column_of(i + j), to = key_of(i + j) * kRowStride + at;
          cp_async16(k_to + to, k_ + at + from[j].values[0]);
          cp_async16(v_to + to, v_ + at + from[j].values[1]);
        }
      }
      return;
    }
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int key = key_of(i), at = column_of(i);
      const Pack<int64_t> from = shared_load16(offsets_ + key * 2);
      const bool exists = from.values[0] >= 0 && at < head_dim;
      const C* const k_from = exists ? k_ + from.values[0] + at : k_;
      const C* const v_from = exists ? v_ + from.values[1] + at : v_;
      const Shared<C> k_piece = k_to + (key * kRowStride + at);
      const Shared<C> v_piece = v_to + (key * kRowStride + at);
      // A row of float8 may end within a piece.
      const int count = !exists ? 0 : kWidens ? min(kPack, head_dim - at) : kPack;
      if (plan_.kv_aligned) {
        cp_async16(k_piece, k_from, count * int{sizeof(C)});
        cp_async16(v_piece, v_from, count * int{sizeof(C)});
      } else {
        shared_store16(k_piece, load_pack(k_from, count, false));
        shared_store16(v_piece, load_pack(v_from, count, false));
      }
    }
  }

  const PagedAttentionParams& params_;
  const AttentionPlan& plan_;
  Shared<AttentionTile> tile_;
  const C* k_;
  const C* v_;
  int kv_head_;
  Shared<C> ring_;
  Shared<int64_t> offsets_;
  int lane_, warp_, team_shift_, stride_shift_;  // a team has 1 << team_shift warps
  int at_ = -1;                                  // the stage of the ring that is read now
  int filled_ = 0;  // a bit for each stage of the ring to which this warp has brought keys

  // The next stage to be requested: where its keys are, its round, and how many follow in that.
  CacheSlot next_{};
  int round_, next_key_, next_end_, left_;  // the keys are those of the stage that follows it
};

}  // namespace eecore::cuda
