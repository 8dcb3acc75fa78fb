// Rows of queries in the registers of a warp, and their online softmax in base 2 over the keys that
// lie in shared memory: 16-bit elements on the tensor cores, float32 on the CUDA cores.
//
// NaN and infinity come out as in softmax(q k) v: they fill the whole row where the query or a key
// that the row sees has them, and a column where a value has them. A weight of 0 does not cancel a
// value of NaN, so where rows see different keys such values are added row by row.
#pragma once

#include "eecore/attention_tile.cuh"
#include "eecore/position_bias.cuh"

namespace eecore::cuda {

// The score of a key before the softmax, in base 2; the only place where a bias is added. The score
// is rounded before anything is subtracted from it, so that steps with and without masked keys have
// the same scores.
__device__ __forceinline__ float attention_score(float dot, float scale) {
  return __fmul_rn(dot, scale);
}
__device__ __forceinline__ float soft_capped(float score, float cap) {
  return __fmul_rn(cap, tanhf(score / cap));
}
__device__ __forceinline__ float attention_score(float dot, float scale, float bias) {
  return fmaf(dot, scale, bias);
}

// A kv head's scale of the stored numbers of a cache of C.
template <typename T, typename C>
__device__ __forceinline__ float scale_of(const float* scales, int kv_head) {
  if constexpr (std::is_same_v<T, C>) return 1.0f;
  return load_or(scales == nullptr ? nullptr : scales + kv_head, 1.0f);
}

// The factor of the products of queries and keys; in float8 each key head has its own.
template <bool kOfHead>
struct ScoreScale {
  __device__ __forceinline__ ScoreScale(const AttentionPlan& plan, float key_scale)
      : scale(plan.scale * key_scale) {}
  __device__ __forceinline__ float of(const AttentionPlan&) const { return scale; }
  float scale;
};
template <>
struct ScoreScale<false> {
  __device__ __forceinline__ ScoreScale(const AttentionPlan&, float) {}
  __device__ __forceinline__ float of(const AttentionPlan& plan) const { return plan.scale; }
};

// A warp's bands of 16 rows on the tensor cores; rows past the tile's last repeat it and are never
// stored. Lane l has rows l / 4 and l / 4 + 8 of each band. A row's sums do not depend on its band.
// C: what the cache holds; where that is not T, scores are scaled by `key_scale` too.
template <typename T, int kHeadDim, bool kBiased, typename C, int kBands>
class TensorCoreRows {
  using Sizes = AttentionSizes<T, kHeadDim, C, kBands>;
  static constexpr int kStepKeys = Sizes::kStepKeys, kRowStride = Sizes::kRowStride;
  static constexpr int kKeptSteps = Sizes::kKeptColumns / 16;

 public:
  __device__ __forceinline__ TensorCoreRows(const PagedAttentionParams& params,
                                            const AttentionPlan& plan, const AttentionTile& tile,
                                            int first_row, Shared<float> bias_table,
                                            float key_scale)
      : params_(params),
        plan_(plan),
        lane_(threadIdx.x % 32),
        length_(tile.seq.length),
        scale_(plan, key_scale) {
    const int last = tile.first_row + tile.num_rows - 1;
    const auto position = [&](int row) {
      return tile.seq.position(plan.group_size.quotient(min(row, last)));
    };
    has_rows_ = first_row <= last;
#pragma unroll
    for (int i = 0; i < 2 * kBands; ++i) {
      const int row = min(first_row + lane_ / 4 + 8 * i, last);
      position_[i] = position(row);
      if constexpr (kBiased) {
        bias_[i] = RowBias(plan, bias_table, plan.group_size.remainder(row), position_[i]);
      }
    }
    first_position_ = position(first_row);
    last_position_ = position(first_row + Sizes::kWarpRows - 1);
  }

  // Loads the queries through this warp's shared memory; `offset` is where row lane % kWarpRows
  // starts. Columns that do not fit in registers stay in `rest`, where one team writes them for
  // all. Where the queries are aligned, a batch of loads is in flight before the first one is
  // waited for.
  __device__ __forceinline__ void load_queries(const T* q, int64_t offset, int64_t head_dim,
                                               bool aligned, Shared<T> shared, Shared<T> rest,
                                               bool writes_rest) {
    constexpr int kTurns = Sizes::kWarpRows * Sizes::kPieces / 32;
    constexpr int kBatch = kTurns / ((kTurns + 7) / 8);
    static_assert(kTurns % kBatch == 0);
    const auto row_of = [&](int turn) { return (turn * 32 + lane_) / Sizes::kPieces; };
    const auto column_of = [&](int turn) {
      return (turn * 32 + lane_) % Sizes::kPieces * Sizes::kPack;
    };
    const auto place = [&](int turn) {
      return q + __shfl_sync(kWholeWarp, offset, row_of(turn)) + column_of(turn);
    };
    const auto keep = [&](int turn, const Pack<T>& pack) {
      const int row = row_of(turn), at = column_of(turn);
      if (at < Sizes::kKeptColumns) {
        shared_store16(shared + row * kRowStride + at, pack);
      } else if (writes_rest) {
        shared_store16(rest + row * Sizes::kRestStride + (at - Sizes::kKeptColumns), pack);
      }
    };
    if (aligned) {
#pragma unroll
      for (int first = 0; first < kTurns; first += kBatch) {
        Pack<T> packs[kBatch] = {};
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const T* const from = place(first + j);
          if (column_of(first + j) < head_dim) packs[j] = load16(from);
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) keep(first + j, packs[j]);
      }
    } else {
#pragma unroll 1
      for (int turn = 0; turn < kTurns; ++turn) {
        keep(turn, load_pack(place(turn), head_dim - column_of(turn), false));
      }
    }
    if constexpr (Sizes::kRestSize > 0) {
      __syncthreads();
    } else {
      __syncwarp();
    }
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int d = 0; d < kKeptSteps; ++d) {
        const int row = b * Sizes::kBandRows + lane_ % 16;
        ldmatrix_x4(q_[b][d], shared + row * kRowStride + lane_ / 16 * 8 + d * 16);
      }
    }
    rest_ = rest + lane_ % 16 * Sizes::kRestStride + lane_ / 16 * 8;
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < 2 * kBands; ++i) {
      maximum_[i] = -INFINITY;
      weight_[i] = 0.0f;
    }
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[b][d][i] = 0.0f;
      }
    }
  }

  // Adds the keys [first_key, first_key + kStepKeys) that lie before `end`.
  __device__ __forceinline__ void attend(Shared<T> k, Shared<T> v, int first_key, int end) {
    // Rows past the tile's last see what it sees, so these bounds hold for all rows of the warp.
    const KeyRange first = visible(first_position_), last = visible(last_position_);
    if (!has_rows_ || first_key >= min(last.end, end) || first_key + kStepKeys <= first.begin)
      return;
    float scores[kBands][kStepKeys / 8][4] = {};
    const int matrix = lane_ / 8, matrix_row = lane_ % 8;
    const Shared<T> k_lane = k + (matrix / 2 * 8 + matrix_row) * kRowStride + matrix % 2 * 8;
#pragma unroll
    for (int d = 0; d < kHeadDim / 16; ++d) {
      uint32_t queries[kBands][4];
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        if (d < kKeptSteps) {
#pragma unroll
          for (int i = 0; i < 4; ++i) queries[b][i] = q_[b][d < kKeptSteps ? d : 0][i];
        } else {
          ldmatrix_x4(queries[b],
                      rest_ + b * Sizes::kBandRows * Sizes::kRestStride + (d - kKeptSteps) * 16);
        }
      }
#pragma unroll
      for (int j = 0; j < kStepKeys / 16; ++j) {
        uint32_t keys[4];
        ldmatrix_x4(keys, k_lane + j * 16 * kRowStride + d * 16);
#pragma unroll
        for (int b = 0; b < kBands; ++b) {
          mma_m16n8k16<T>(scores[b][2 * j], queries[b], {keys[0], keys[1]});
          mma_m16n8k16<T>(scores[b][2 * j + 1], queries[b], {keys[2], keys[3]});
        }
      }
    }

    const bool masks = first_key < last.begin || first_key + kStepKeys > min(first.end, end);
#pragma unroll
    for (int b = 0; b < kBands; ++b) weigh(b, scores[b], first_key, end, masks);

    const Shared<T> v_lane = v + (matrix % 2 * 8 + matrix_row) * kRowStride + matrix / 2 * 8;
    // Keys past the end are zeros.
    const bool all_see_all =
        first_key >= last.begin && min(first_key + kStepKeys, end) <= first.end;
    if (all_see_all) {
      add_values<false>(scores, v_lane);
    } else if (add_values<true>(scores, v_lane)) {
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
        add_infinities<false>(b, v_lane, first_key, end);
        add_infinities<true>(b, v_lane, first_key, end);
      }
    }
  }

  // Stores a band's results: values [kBandRows, kResultStride], (maximum, weight) [kBandRows, 2].
  __device__ __forceinline__ void store(int band, Shared<float> values, Shared<float> stats) {
#pragma unroll
    for (int b = 0; b < kBands; ++b) {
      if (b != band) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = lane_ / 4 + 8 * i;
        const float weight = reduce_lanes<4>(weight_[2 * b + i]);
        if (lane_ % 4 == 0) {
          stats[row * 2] = maximum_[2 * b + i];
          stats[row * 2 + 1] = weight;
        }
#pragma unroll
        for (int d = 0; d < kHeadDim / 8; ++d) {
          const Shared<float> to = values + row * Sizes::kResultStride + d * 8 + lane_ % 4 * 2;
          to[0] = sums_[b][d][2 * i];
          to[1] = sums_[b][d][2 * i + 1];
        }
      }
    }
  }

 private:
  __device__ __forceinline__ KeyRange visible(int position) const {
    return visible_keys(params_, plan_, length_, position);
  }

  // Turns a band's products with the keys of a step into weights, relative to each row's largest
  // score so far, to which its sums are scaled.
  __device__ __forceinline__ void weigh(int b, float (&scores)[kStepKeys / 8][4], int first_key,
                                        int end, bool masks) {
    if constexpr (kBiased) {
      add_bias(b, scores, first_key);
    } else {
#pragma unroll
      for (int j = 0; j < kStepKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[j][i] = attention_score(scores[j][i], scale_.of(plan_));
      }
      if (plan_.soft_cap > 0.0f) {
#pragma unroll
        for (int j = 0; j < kStepKeys / 8; ++j) {
#pragma unroll
          for (int i = 0; i < 4; ++i) scores[j][i] = soft_capped(scores[j][i], plan_.soft_cap);
        }
      }
    }
    if (masks) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const KeyRange seen = visible(position_[2 * b + i / 2]);
#pragma unroll
        for (int j = 0; j < kStepKeys / 8; ++j) {
          const int key = key_of(first_key, j, i);
          if (key < seen.begin || key >= min(seen.end, end)) scores[j][i] = -INFINITY;
        }
      }
    }

    // Online softmax. Most steps change no maximum.
    float* const maximum = maximum_ + 2 * b;
    float* const weight = weight_ + 2 * b;
    float largest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      largest[i] = maximum[i];
#pragma unroll
      for (int j = 0; j < kStepKeys / 8; ++j) {
        largest[i] = fmaxf(largest[i], fmaxf(scores[j][2 * i], scores[j][2 * i + 1]));
      }
      largest[i] = reduce_lanes<4>(largest[i], Max{});
    }
    if (__any_sync(kWholeWarp, largest[0] != maximum[0] || largest[1] != maximum[1])) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        factor[i] = exp2_fast(maximum[i] - reference_of(largest[i]));
        maximum[i] = largest[i];
        weight[i] *= factor[i];
      }
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[b][d][i] *= factor[i / 2];
      }
    }
    const float reference[2] = {reference_of(maximum[0]), reference_of(maximum[1])};
#pragma unroll
    for (int j = 0; j < kStepKeys / 8; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[j][i] = exp2_fast(scores[j][i] - reference[i / 2]);
        weight[i / 2] += scores[j][i];
      }
    }
  }

  // Adds weights times values; kFinite: only finite values. Returns whether any value of the warp
  // was left out.
  template <bool kFinite>
  __device__ __forceinline__ bool add_values(const float (&scores)[kBands][kStepKeys / 8][4],
                                             Shared<T> v_lane) {
    bool left_out = false;
#pragma unroll
    for (int j = 0; j < kStepKeys / 16; ++j) {
      uint32_t weights[kBands][4];
#pragma unroll
      for (int b = 0; b < kBands; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float (&keys)[4] = scores[b][2 * j + i / 2];
          weights[b][i] = pack_pair<T>(keys[i % 2 * 2], keys[i % 2 * 2 + 1]);
        }
      }
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
        uint32_t values[4];
        ldmatrix_x4_transposed(values, v_lane + j * 16 * kRowStride + d * 16);
        if constexpr (kFinite) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const uint32_t finite = finite_pair<T>(values[i]);
            left_out |= finite != values[i];
            values[i] = finite;
          }
        }
#pragma unroll
        for (int b = 0; b < kBands; ++b) {
          mma_m16n8k16<T>(sums_[b][2 * d], weights[b], {values[0], values[1]});
          mma_m16n8k16<T>(sums_[b][2 * d + 1], weights[b], {values[2], values[3]});
        }
      }
    }
    return kFinite && __any_sync(kWholeWarp, left_out);
  }

  // Adds the infinities of a step's values to the rows of a band that see them; NaN counts as both
  // infinities. Rarely called: a barrier keeps the loads of one piece from moving ahead of the
  // previous piece, which would take the registers of the whole kernel.
  template <bool kNegative>
  __device__ __forceinline__ void add_infinities(int b, Shared<T> v_lane, int first_key, int end) {
    const KeyRange seen[2] = {visible(position_[2 * b]), visible(position_[2 * b + 1])};
    const auto sees = [&](int j, int i) {
      const int key = key_of(first_key, j, i);
      return key >= seen[i / 2].begin && key < min(seen[i / 2].end, end) ? 1.0f : 0.0f;
    };
#pragma unroll
    for (int j = 0; j < kStepKeys / 16; ++j) {
      uint32_t rows[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        rows[i] = pack_pair<T>(sees(2 * j + i / 2, i % 2 * 2), sees(2 * j + i / 2, i % 2 * 2 + 1));
      }
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d) {
        __syncwarp();
        uint32_t values[4];
        ldmatrix_x4_transposed(values, v_lane + j * 16 * kRowStride + d * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) values[i] = infinite_pair<T, kNegative>(values[i]);
        float counts[2][4] = {};
        mma_m16n8k16<T>(counts[0], rows, {values[0], values[1]});
        mma_m16n8k16<T>(counts[1], rows, {values[2], values[3]});
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (counts[i / 4][i % 4] > 0.0f) {
            sums_[b][2 * d + i / 4][i % 4] += kNegative ? -INFINITY : INFINITY;
          }
        }
      }
    }
  }

  // The key of this lane's score [j][i] of a step.
  __device__ __forceinline__ int key_of(int first_key, int j, int i) const {
    return first_key + j * 8 + lane_ % 4 * 2 + i % 2;
  }

  // Adds the biases to the products of a step. Most steps of a long context are far from all rows.
  __device__ __forceinline__ void add_bias(int b, float (&scores)[kStepKeys / 8][4],
                                           int first_key) {
    const auto add = [&](const auto& bias_of) {
#pragma unroll
      for (int j = 0; j < kStepKeys / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[j][i] = attention_score(scores[j][i], scale_.of(plan_), bias_of(j, i));
        }
      }
    };
    if (has_one_bias(plan_, first_key, kStepKeys, first_position_, last_position_)) {
      const float bias[2] = {bias_[2 * b].of(plan_, first_key),
                             bias_[2 * b + 1].of(plan_, first_key)};
      add([&](int, int i) { return bias[i / 2]; });
    } else {
      const int first = key_of(first_key, 0, 0);
      const Shared<float> bias[2] = {bias_[2 * b].from(first), bias_[2 * b + 1].from(first)};
      add([&](int j, int i) { return float{bias[i / 2][j * 8 + i % 2]}; });
    }
  }

  const PagedAttentionParams& params_;
  const AttentionPlan& plan_;
  int lane_, length_;
  ScoreScale<Sizes::kWidens> scale_;
  bool has_rows_;
  int position_[2 * kBands];            // of this lane's rows
  int first_position_, last_position_;  // of the warp's
  RowBias bias_[2 * kBands];
  uint32_t q_[kBands][kKeptSteps][4];
  Shared<T> rest_;
  float sums_[kBands][kHeadDim / 8][4];
  float maximum_[2 * kBands], weight_[2 * kBands];  // the weight covers this lane's keys alone
};

// A warp's 4 rows of float32 on the CUDA cores. kLanes neighbouring lanes share a key, kGroups keys
// are in flight at a time, and each group has a softmax of its own until the end.
template <int kHeadDim, bool kBiased, typename C>
class PlainRows {
  using Sizes = AttentionSizes<float, kHeadDim, C>;
  static constexpr int kRows = Sizes::kWarpRows;
  static constexpr int kLanes = kHeadDim > 128 ? 16 : 8;
  static constexpr int kGroups = 32 / kLanes;
  static constexpr int kGroupKeys = Sizes::kStepKeys / kGroups;
  static constexpr int kLanePieces = (Sizes::kPieces + kLanes - 1) / kLanes;

 public:
  __device__ __forceinline__ PlainRows(const PagedAttentionParams& params,
                                       const AttentionPlan& plan, const AttentionTile& tile,
                                       int first_row, Shared<float> bias_table, float key_scale)
      : params_(params),
        plan_(plan),
        lane_(threadIdx.x % kLanes),
        group_(threadIdx.x % 32 / kLanes),
        length_(tile.seq.length),
        scale_(plan, key_scale) {
    const int last = tile.first_row + tile.num_rows - 1;
    has_rows_ = first_row <= last;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int row = min(first_row + r, last);
      position_[r] = tile.seq.position(plan.group_size.quotient(row));
      if constexpr (kBiased) {
        bias_[r] = RowBias(plan, bias_table, plan.group_size.remainder(row), position_[r]);
      }
    }
  }

  __device__ __forceinline__ void load_queries(const float* q, int64_t offset, int64_t head_dim,
                                               bool aligned, Shared<float>, Shared<float>, bool) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int64_t from = __shfl_sync(kWholeWarp, offset, r);
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        const int at = (i * kLanes + lane_) * 4;
        const Pack<float> pack = load_pack(q + from + at, head_dim - at, aligned);
#pragma unroll
        for (int e = 0; e < 4; ++e) q_[r][i][e] = pack.values[e];
      }
    }
  }

  __device__ __forceinline__ void start() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      maximum_[r] = -INFINITY;
      weight_[r] = 0.0f;
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_[r][i][e] = 0.0f;
      }
    }
  }

  __device__ __forceinline__ void attend(Shared<float> k, Shared<float> v, int first_key, int end) {
    if (!has_rows_ || first_key >= min(visible(position_[kRows - 1]).end, end) ||
        first_key + Sizes::kStepKeys <= visible(position_[0]).begin) {
      return;
    }
    float scores[kGroupKeys][kRows] = {};
#pragma unroll
    for (int j = 0; j < kGroupKeys; ++j) {
      const Shared<float> row = k + (j * kGroups + group_) * Sizes::kRowStride;
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        if (!has_piece(i)) continue;
        const Pack<float> keys = shared_load16(row + (i * kLanes + lane_) * 4);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            scores[j][r] = fmaf(q_[r][i][e], keys.values[e], scores[j][r]);
          }
        }
      }
    }
    float largest[kRows];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      largest[r] = maximum_[r];
      const KeyRange seen = visible(position_[r]);
#pragma unroll
      for (int j = 0; j < kGroupKeys; ++j) {
        const int key = first_key + j * kGroups + group_;
        const float dot = reduce_lanes<kLanes>(scores[j][r]);
        if constexpr (kBiased) {
          scores[j][r] = attention_score(dot, scale_.of(plan_), bias_[r].of(plan_, key));
        } else {
          scores[j][r] = attention_score(dot, scale_.of(plan_));
          if (plan_.soft_cap > 0.0f) scores[j][r] = soft_capped(scores[j][r], plan_.soft_cap);
        }
        if (key < seen.begin || key >= min(seen.end, end)) scores[j][r] = -INFINITY;
        largest[r] = fmaxf(largest[r], scores[j][r]);
      }
      const float reference = reference_of(largest[r]);
      const float factor = exp2_fast(maximum_[r] - reference);
      maximum_[r] = largest[r];
      weight_[r] *= factor;
#pragma unroll
      for (int j = 0; j < kGroupKeys; ++j) {
        scores[j][r] = exp2_fast(scores[j][r] - reference);
        weight_[r] += scores[j][r];
      }
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sums_[r][i][e] *= factor;
      }
    }
#pragma unroll
    for (int j = 0; j < kGroupKeys; ++j) {
      const int key = first_key + j * kGroups + group_;
      bool sees[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const KeyRange seen = visible(position_[r]);
        sees[r] = key >= seen.begin && key < min(seen.end, end);
      }
      const Shared<float> row = v + (j * kGroups + group_) * Sizes::kRowStride;
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        if (!has_piece(i)) continue;
        const Pack<float> values = shared_load16(row + (i * kLanes + lane_) * 4);
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (sees[r]) sums_[r][i][e] = fmaf(scores[j][r], values.values[e], sums_[r][i][e]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void store(int, Shared<float> values, Shared<float> stats) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int distance = kLanes; distance < 32; distance *= 2) {
        const float other = __shfl_xor_sync(kWholeWarp, maximum_[r], distance);
        const float other_weight = __shfl_xor_sync(kWholeWarp, weight_[r], distance);
        const float largest = fmaxf(maximum_[r], other);
        const float mine = exp2_fast(maximum_[r] - reference_of(largest));
        const float theirs = exp2_fast(other - reference_of(largest));
        maximum_[r] = largest;
        weight_[r] = fmaf(other_weight, theirs, weight_[r] * mine);
#pragma unroll
        for (int i = 0; i < kLanePieces; ++i) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float sum = __shfl_xor_sync(kWholeWarp, sums_[r][i][e], distance);
            sums_[r][i][e] = fmaf(sum, theirs, sums_[r][i][e] * mine);
          }
        }
      }
      if (group_ != 0) continue;
      if (lane_ == 0) {
        stats[r * 2] = maximum_[r];
        stats[r * 2 + 1] = weight_[r];
      }
#pragma unroll
      for (int i = 0; i < kLanePieces; ++i) {
        if (!has_piece(i)) continue;
        Pack<float> pack;
#pragma unroll
        for (int e = 0; e < 4; ++e) pack.values[e] = sums_[r][i][e];
        shared_store16(values + r * Sizes::kResultStride + (i * kLanes + lane_) * 4, pack);
      }
    }
  }

 private:
  // Whether this lane also has the last pieces, which some lanes lack.
  __device__ __forceinline__ bool has_piece(int i) const {
    return (i + 1) * kLanes <= Sizes::kPieces || i * kLanes + lane_ < Sizes::kPieces;
  }

  __device__ __forceinline__ KeyRange visible(int position) const {
    return visible_keys(params_, plan_, length_, position);
  }

  const PagedAttentionParams& params_;
  const AttentionPlan& plan_;
  int lane_, group_, length_;
  ScoreScale<Sizes::kWidens> scale_;
  bool has_rows_;
  int position_[kRows];
  RowBias bias_[kRows];
  float q_[kRows][kLanePieces][4];
  float sums_[kRows][kLanePieces][4];
  float maximum_[kRows], weight_[kRows];
};

}  // namespace eecore::cuda
