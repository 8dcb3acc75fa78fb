// paged_attention on CUDA: one launch, and a second one where several blocks share a tile's keys
// and either the call has no counters for the blocks' arrivals or their partial results are large.
// The grid is an upper bound from the shapes; lengths are known only on the device.
#include <algorithm>
#include <bit>

#include "dispatch.h"
#include "eecore/paged_attention.cuh"
#include "launch.cuh"

namespace eecore::cuda {
namespace {

constexpr int64_t kReservedSharedBytes = 1024;  // of each block, taken by the system

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

bool is_aligned(const void* pointer, std::initializer_list<int64_t> strides, DType dtype) {
  const int64_t pack = dtype == DType::kFloat32 ? 4 : 8;
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 &&
         std::all_of(strides.begin(), strides.end(), [&](int64_t s) { return s % pack == 0; });
}

bool is_aligned(const void* cache, const CacheStrides& strides, int64_t element_size) {
  const auto whole = [&](int64_t stride) { return stride * element_size % 16 == 0; };
  return reinterpret_cast<uintptr_t>(cache) % 16 == 0 && whole(strides.page) &&
         whole(strides.slot) && whole(strides.head);
}

// A kernel's dtype, head dimension and cache type, whether it has a bias, and bands of rows a warp.
template <typename T_, int kHeadDim_, bool kBiased_, typename C_, int kBands = 1>
struct Kernel {
  using T = T_;
  using C = C_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kBiased = kBiased_;
  using Sizes = AttentionSizes<T, kHeadDim, C, kBands>;

  static constexpr auto function() {
    if constexpr (kBands > 1) {
      return paged_attention_wide_kernel<T, kHeadDim, C>;
    } else if constexpr (Sizes::kWidens) {
      return paged_attention_float8_kernel<T, kHeadDim>;
    } else {
      return paged_attention_kernel<T, kHeadDim, kBiased>;
    }
  }
};

// Rows of a sequence, if all sequences have equally many queries.
int64_t rows_of(const PagedAttentionParams& params, int64_t group_size) {
  return ceil_div(params.num_tokens, params.num_seqs) * group_size;
}

// Calls body for a kernel without a bias: with two bands of rows a warp where the rows of a
// sequence fill more than one and their results do not depend on it.
template <typename T, int kHeadDim, typename C, typename Body>
void dispatch_bands(const PagedAttentionParams& params, Body&& body) {
  if constexpr (sizeof(T) == 2 && kHeadDim <= 128) {
    const int64_t group_size = params.num_q_heads / params.num_kv_heads;
    if (rows_of(params, group_size) > AttentionSizes<T, kHeadDim, C>::kBandRows &&
        rows_of(params, 1) <= kMaxRepeatedQueries && params.fixed_split_size > 0) {
      return body(Kernel<T, kHeadDim, false, C, 2>{});
    }
  }
  body(Kernel<T, kHeadDim, false, C>{});
}

// Calls body(Kernel<...>{}) for a call. Kernels with a bias or float8 caches, which few models
// have, exist in fewer sizes.
template <typename Body>
void dispatch(const PagedAttentionParams& params, Body&& body) {
  constexpr const char* kOp = "paged_attention";
  const bool is_float8 = params.cache_format.is_float8;
  if (is_float8 && params.position_bias != nullptr) {
    throw std::runtime_error(
        "paged_attention: expected caches in the model's dtype with a position_bias on CUDA, got "
        "float8_e4m3fn");
  }
  dispatch_dtype(params.dtype, kOp, [&](auto type) {
    using T = typename decltype(type)::type;
    if (params.position_bias == nullptr && !is_float8) {
      return dispatch_head_dim(params.head_dim, kOp, [&](auto head_dim) {
        dispatch_bands<T, head_dim(), T>(params, body);
      });
    }
    dispatch_at_least<64, 128, 256>(params.head_dim, kOp, "head_dim", [&](auto head_dim) {
      if (is_float8) return dispatch_bands<T, head_dim(), Float8>(params, body);
      body(Kernel<T, head_dim(), true, T>{});
    });
  });
}

// The work of a call as far as its shapes tell, in units of a tile and a kv head.
template <typename Sizes>
int64_t units_of(const PagedAttentionParams& params, int64_t group_size) {
  const int64_t tiles = ceil_div(rows_of(params, group_size), Sizes::kTileRows);
  return tiles * std::min(params.num_seqs, params.num_tokens) * params.num_kv_heads;
}

// The fewest blocks per unit, from `least` to `most`, that keep nearly as many of the `resident`
// blocks busy as any number does. `least` gives way if there would be too many waves of blocks.
int64_t blocks_per_unit(int64_t units, int64_t resident, int64_t least, int64_t most) {
  constexpr int64_t kMaxWaves = 4;
  constexpr double kNearly = 0.95;
  most = std::min(most, std::max<int64_t>(kMaxWaves * resident / units, 1));
  least = std::min(least, most);
  const auto busy = [&](int64_t blocks) {
    const int64_t all = units * blocks;
    return static_cast<double>(all) / static_cast<double>(ceil_div(all, resident) * resident);
  };
  double best = 0.0;
  for (int64_t blocks = least; blocks <= most; ++blocks) best = std::max(best, busy(blocks));
  int64_t blocks = least;
  while (busy(blocks) < kNearly * best) ++blocks;
  return blocks;
}

// Plans how many blocks share a tile's keys, and the number of partial results of each row.
template <typename Sizes>
void plan_splits(const PagedAttentionParams& params, int64_t num_multiprocessors,
                 AttentionPlan& plan) {
  constexpr int64_t kMinBlockKeys = 512;  // worth merging the result of a block
  constexpr int64_t kMaxBlockKeys =
      16384;  // so that one long sequence does not occupy a few blocks for long
  constexpr int64_t kMaxBlocks = 256;  // of a tile
  constexpr int64_t kMaxWorkspace = int64_t{256} << 20;
  constexpr double kBusyEnough = 0.8;
  const int64_t units = units_of<Sizes>(params, plan.group_size.value);
  const int64_t resident = num_multiprocessors * kAttentionBlocksPerMultiprocessor;
  if (params.fixed_split_size == 0) {
    const int64_t most = std::clamp<int64_t>(plan.max_keys / kMinBlockKeys, 1, kMaxBlocks);
    const int64_t least = std::max<int64_t>(ceil_div(plan.max_keys, kMaxBlockKeys), 1);
    const int64_t blocks = blocks_per_unit(units, resident, least, most);
    plan.num_blocks = Divisor::of(blocks);
    plan.num_partials = blocks > 1 ? static_cast<int32_t>(blocks) : 0;
    return;
  }
  // A block that takes all spans of a tile merges them itself, in the same order.
  const int64_t span_keys = int64_t{kAttentionWarps} * plan.fixed_split_size;
  const int64_t spans = std::max<int64_t>(ceil_div(plan.max_keys, span_keys), 1);
  const int64_t partial_bytes = spans * params.num_tokens * params.num_q_heads *
                                (params.head_dim + 2) * static_cast<int64_t>(sizeof(float));
  const double busy =
      static_cast<double>(units) / static_cast<double>(ceil_div(units, resident) * resident);
  int64_t blocks = 1;
  if (busy < kBusyEnough && partial_bytes <= kMaxWorkspace) {
    blocks = blocks_per_unit(units, resident, 1, std::min(spans, kMaxBlocks));
  }
  // A single block has one partial result for the spans so far and one for a part of a span, unless
  // it has only one round: one span with a team for each of its splits.
  const bool has_rounds =
      spans > 1 || (params.num_tokens * plan.group_size.value > Sizes::kWarpRows &&
                    plan.max_keys > Sizes::kStepKeys);
  plan.num_blocks = Divisor::of(blocks);
  plan.num_partials = blocks > 1 ? static_cast<int32_t>(spans) : has_rounds ? 2 : 0;
}

// Whether the last block of a tile merges the partial results, rather than the blocks of a second
// kernel: where they are too small to be worth a launch.
template <typename Sizes>
bool last_block_merges(const PagedAttentionParams& params, const AttentionPlan& plan) {
  constexpr int64_t kMaxBytes = 16 << 10;
  if (plan.num_blocks.value == 1 || params.arrivals == nullptr ||
      plan.num_tiles * params.num_kv_heads > params.num_arrivals) {
    return false;
  }
  const int64_t rows = std::min<int64_t>(rows_of(params, plan.group_size.value), Sizes::kTileRows);
  return rows * plan.num_partials * params.head_dim * int64_t{sizeof(float)} <= kMaxBytes;
}

// Bytes of the table into which a block spreads the position bias, 0 without one; stores its reach
// in the plan. No key is further from a query than the number of keys and queries.
template <typename Sizes>
int64_t plan_bias(const PagedAttentionParams& params, int64_t max_keys, AttentionPlan& plan) {
  if (params.position_bias == nullptr) return 0;
  const PositionBuckets& buckets = params.buckets;
  if (buckets.num_sided < 2 || buckets.num_sided > kMaxSidedBuckets) {
    throw std::runtime_error("paged_attention: expected 2 to " + std::to_string(kMaxSidedBuckets) +
                             " buckets of a side, got " + std::to_string(buckets.num_sided));
  }
  const int64_t reach =
      std::min<int64_t>(buckets.starts[buckets.num_sided - 1], max_keys + params.num_tokens);
  plan.bias_before = static_cast<int32_t>(reach);
  plan.bias_ahead = buckets.bidirectional ? plan.bias_before : 0;
  const int64_t origin = reach + kPositionBiasMargin<Sizes>;
  const int64_t width = origin + 1 + plan.bias_ahead + kPositionBiasMargin<Sizes>;
  plan.bias_origin = static_cast<int32_t>(origin);
  plan.bias_width = static_cast<int32_t>(width);
  return plan.group_size.value * width * int64_t{sizeof(float)};
}

// The part of a plan that all kernels have, for tiles of `tile_rows` rows.
AttentionPlan plan_rows(const PagedAttentionParams& params, int64_t tile_rows) {
  AttentionPlan plan{};
  plan.group_size = Divisor::of(params.num_q_heads / params.num_kv_heads);
  plan.kv_heads = Divisor::of(params.num_kv_heads);
  plan.page_size = Divisor::of(params.page_size);
  const int64_t rows = params.num_tokens * plan.group_size.value;
  const int64_t num_tiles = rows / tile_rows + params.num_seqs;
  if (rows > INT32_MAX || num_tiles * params.num_kv_heads > INT32_MAX) {
    throw std::runtime_error(
        "paged_attention: expected fewer than 2^31 queries times heads of a group, got " +
        std::to_string(rows));
  }
  plan.num_tiles = static_cast<int32_t>(num_tiles);
  const int64_t max_keys = params.max_pages_per_seq * params.page_size;
  plan.max_keys = static_cast<int32_t>(std::min<int64_t>(max_keys, INT32_MAX));
  // A window that no query is far enough into to notice has no effect.
  const int64_t max_window = max_keys + params.num_tokens;
  if (params.sliding_window < std::min<int64_t>(max_window, INT32_MAX)) {
    plan.sliding_window = static_cast<int32_t>(params.sliding_window);
  }
  plan.scale = params.scale * kLog2E;
  plan.soft_cap = params.soft_cap * kLog2E;
  return plan;
}

bool has_aligned_q(const PagedAttentionParams& params) {
  return is_aligned(params.q, {params.q_token_stride, params.q_head_stride}, params.dtype);
}
bool has_aligned_out(const PagedAttentionParams& params) {
  return is_aligned(params.out, {params.out_token_stride, params.out_head_stride}, params.dtype);
}
bool has_aligned_caches(const PagedAttentionParams& params, int64_t element_size) {
  return is_aligned(params.k_cache, params.k_cache_strides, element_size) &&
         is_aligned(params.v_cache, params.v_cache_strides, element_size);
}

struct Call {
  AttentionPlan plan;
  LaunchShape shape;
};

template <typename Kernel>
Call plan_call(const PagedAttentionParams& params, int device) {
  using Sizes = typename Kernel::Sizes;
  const DeviceProperties& properties = device_properties(device);
  AttentionPlan plan = plan_rows(params, Sizes::kTileRows);
  const int64_t max_keys = params.max_pages_per_seq * params.page_size;
  plan.step_shift = std::bit_width(unsigned{Sizes::kStepKeys}) - 1;
  plan.fixed_split_size =
      static_cast<int32_t>(std::min<int64_t>(params.fixed_split_size, kMaxSplitKeys));
  plan.fixed_span = Divisor::of(std::max(kAttentionWarps * plan.fixed_split_size, 1));
  plan.early_places = params.constant_places;
  plan.q_aligned = has_aligned_q(params);
  plan.kv_aligned = has_aligned_caches(params, sizeof(typename Kernel::C));
  plan.out_aligned = has_aligned_out(params);
  const int64_t bias_bytes = plan_bias<Sizes>(params, max_keys, plan);
  plan_splits<Sizes>(params, properties.num_multiprocessors, plan);
  plan.last_merges = kLastBlockMerges<typename Kernel::T, Kernel::kBiased> &&
                     last_block_merges<Sizes>(params, plan);

  // Stages: for two blocks on a multiprocessor, or for one and the next kernel, which can then
  // start early.
  const auto stages_of = [&](int64_t blocks_per_multiprocessor) {
    const int64_t all = static_cast<int64_t>(properties.max_shared_bytes) + kReservedSharedBytes;
    const int64_t taken = kReservedSharedBytes + Sizes::kFixedBytes + Sizes::kRestBytes +
                          Sizes::kWideBytes + bias_bytes;
    return (all / blocks_per_multiprocessor - taken) / Sizes::kStageBytes;
  };
  int64_t stages = stages_of(kAttentionBlocksPerMultiprocessor);
  if (stages < kMinAttentionStages) stages = stages_of(1);
  if (bias_bytes > 0 && stages < kMinAttentionStages) {
    throw std::runtime_error(
        "paged_attention: expected a position_bias that fits into shared memory, got " +
        std::to_string(plan.group_size.value) + " query heads of a kv head with distances below " +
        std::to_string(plan.bias_before));
  }
  stages = std::clamp<int64_t>(stages, kMinAttentionStages, kMaxAttentionStages);
  plan.num_stages = static_cast<int32_t>(stages);
  LaunchShape shape{dim3(static_cast<unsigned>(plan.num_tiles * params.num_kv_heads),
                         static_cast<unsigned>(plan.num_blocks.value)),
                    dim3(kAttentionThreads),
                    static_cast<size_t>(Sizes::kRestBytes + Sizes::kWideBytes +
                                        stages * Sizes::kStageBytes + bias_bytes),
                    Launch::kAfterPrevious};
  return {plan, shape};
}

bool is_empty(const PagedAttentionParams& params) {
  return params.num_tokens == 0 || params.num_seqs == 0 || params.num_q_heads == 0;
}

}  // namespace

int64_t paged_attention_workspace(const PagedAttentionParams& params, int device) {
  if (is_empty(params)) return 0;
  int64_t num_partials = 0;
  dispatch(params, [&](auto kernel) {
    num_partials = plan_call<decltype(kernel)>(params, device).plan.num_partials;
  });
  return num_partials * params.num_tokens * params.num_q_heads * (params.head_dim + 2) *
         static_cast<int64_t>(sizeof(float));
}

void run_paged_attention(const PagedAttentionParams& params, Stream stream) {
  if (is_empty(params)) return;
  dispatch(params, [&](auto kernel) {
    using T = typename decltype(kernel)::T;
    using Sizes = typename decltype(kernel)::Sizes;
    const auto [plan, shape] = plan_call<decltype(kernel)>(params, stream.device);
    launch("paged_attention", kernel.function(), shape, stream, params, plan);
    if (plan.num_blocks.value == 1 || plan.last_merges) return;
    const int64_t pieces = params.num_q_heads * params.head_dim / kMergedSize;
    launch("paged_attention", paged_attention_combine_kernel<T, Sizes::kBandRows>,
           {dim3(static_cast<unsigned>(params.num_tokens),
                 static_cast<unsigned>(ceil_div(pieces, kAttentionCombineThreads))),
            dim3(kAttentionCombineThreads), 0, Launch::kAfterPrevious},
           stream, params, plan);
  });
}

}  // namespace eecore::cuda
