// Shared by the launchers of the skinny products: the plan of a launch, and rows of x made ready.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "dispatch.h"
#include "eecore/rms_norm.cuh"
#include "eecore/skinny_rows.cuh"
#include "launch.cuh"

namespace eecore::cuda {

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}
inline bool is_aligned(const void* pointer, int64_t stride, int64_t element_bytes) {
  return is_aligned(pointer) && stride * element_bytes % 16 == 0;
}

// Throws if the kernels of an op do not have an activation.
inline void check_activation(const char* op, Activation activation,
                             std::initializer_list<Activation> known) {
  if (std::find(known.begin(), known.end(), activation) != known.end()) return;
  throw std::runtime_error(std::string(op) + ": unknown activation " +
                           std::to_string(static_cast<int>(activation)));
}

// ---- Rows of x ----

// Rows of x in the form that the products with a weight read: whole chunks of it, or blocks of a
// packed one.
struct RowForm {
  int64_t size;  // elements
  DType dtype;
  // The scale and table of the weight: a scale means int8, a table means packed.
  const float* scale;
  const int64_t* table;

  // Elements of a row in the workspace.
  int64_t padded_size() const {
    const int64_t chunk = table != nullptr           ? kBlockColumns
                          : scale != nullptr         ? kChunkSize<int8_t>
                          : dtype == DType::kFloat32 ? kChunkSize<float>
                                                     : kChunkSize<BFloat16>;
    return ceil_div(size, chunk) * chunk;
  }
  int64_t padded_bytes() const { return padded_size() * size_of(dtype); }
};

// Whether the products cannot read x in place.
inline bool needs_rows(const RowForm& form, const void* x, int64_t stride,
                       const void* norm_weight) {
  return norm_weight != nullptr || !is_aligned(x, stride, size_of(form.dtype)) ||
         form.padded_size() != form.size;
}

// Makes rows of x ready in `out`, and sets x to them.
template <typename T>
void make_rows(const RowForm& form, int64_t num_rows, const void* norm_weight, float eps, void* out,
               const void*& x, int64_t& x_stride, Stream stream) {
  const int64_t padded_size = form.padded_size();
  const RmsNormRows rows{x,
                         norm_weight,
                         out,
                         form.size,
                         padded_size,
                         x_stride,
                         eps,
                         is_aligned(x, x_stride, sizeof(T)),
                         is_aligned(norm_weight)};
  launch("rms_norm", rms_norm_kernel<T>,
         {dim3(static_cast<unsigned>(num_rows)), dim3(kRmsNormThreads), 0, Launch::kAfterPrevious},
         stream, rows);
  x = out;
  x_stride = padded_size;
}

// ---- The plan ----

// Blocks that share a multiprocessor, with 16 or 32 rows to a warp.
constexpr int skinny_blocks_per_multiprocessor(int m_tiles) { return m_tiles == 1 ? 2 : 1; }

// Blocks that run at the same time.
inline int64_t resident_skinny_blocks(int m_tiles, int device) {
  return int64_t{skinny_blocks_per_multiprocessor(m_tiles)} *
         device_properties(device).num_multiprocessors;
}

// Stages that keep enough of the weight in flight with `num_blocks` blocks at work. More stages
// would only take L1 cache from x.
inline int64_t wanted_stages(SkinnyPlan plan, int m_tiles, int64_t num_blocks, int device) {
  constexpr int64_t kWantedBytes = 96 << 10;  // per multiprocessor
  plan.num_stages = 1;
  const int64_t bytes = num_blocks * skinny_ring_bytes(plan, m_tiles);
  return 1 + ceil_div(kWantedBytes * device_properties(device).num_multiprocessors, bytes);
}

// Stages that shared memory has room for in addition to a block's `other_bytes`, where `sharing`
// blocks share a multiprocessor.
inline int64_t fitting_stages(SkinnyPlan plan, int m_tiles, int sharing, int64_t other_bytes,
                              int device) {
  plan.num_stages = 1;
  const int64_t block_bytes =
      static_cast<int64_t>(device_properties(device).max_shared_bytes) / sharing - 1024;
  return (block_bytes - other_bytes) / skinny_ring_bytes(plan, m_tiles);
}

// Sets the wanted number of stages, or as many as fit.
inline void set_stages(SkinnyPlan& plan, int m_tiles, int sharing, int64_t num_blocks,
                       int64_t other_bytes, int device) {
  const int64_t stages = std::min(wanted_stages(plan, m_tiles, num_blocks, device),
                                  fitting_stages(plan, m_tiles, sharing, other_bytes, device));
  plan.num_stages = static_cast<int>(std::clamp<int64_t>(stages, 2, kSkinnyMaxStages));
}

// Warps that share 16 rows: as few as give each multiprocessor two blocks to run. It depends only
// on the shape of the weight, so that a row's result does not depend on its batch.
inline int choose_slices(int64_t num_rows, int num_chunks, int device) {
  const int64_t wanted = 2 * int64_t{device_properties(device).num_multiprocessors};
  int slices = 1;
  while (slices < kSkinnyWarps && 2 * slices <= num_chunks &&
         ceil_div(num_rows, 16 * kSkinnyWarps / slices) < wanted) {
    slices *= 2;
  }
  return slices;
}

// `slices` is a power of two.
inline void set_slices(SkinnyPlan& plan, int slices) {
  plan.num_slices = slices;
  plan.slices_shift = std::countr_zero(static_cast<unsigned>(slices));
}

// The plan for a weight [.., row_size] of elements W. The op still sets its own fields.
template <typename W>
SkinnyPlan make_plan(const void* weight, int64_t weight_stride, int64_t row_size) {
  SkinnyPlan plan{};
  plan.row_size = static_cast<int>(row_size);
  plan.num_chunks = static_cast<int>(ceil_div(row_size, kChunkSize<W>));
  set_slices(plan, 1);
  plan.stage_bytes = kStageBytes<W>;
  plan.aligned = is_aligned(weight, weight_stride, sizeof(W));
  return plan;
}

// Calls body(number of 8-row tiles of x), with a constant: float32 has no matrix instructions, and
// takes at most 16 rows.
template <typename T, int kMax, typename Body>
void dispatch_tokens(int64_t num_tokens, Body&& body) {
  if (num_tokens <= 8) return body(std::integral_constant<int, 1>{});
  if constexpr (std::is_same_v<T, float> || kMax == 2) {
    body(std::integral_constant<int, 2>{});
  } else {
    if (num_tokens <= 16) return body(std::integral_constant<int, 2>{});
    if constexpr (kMax > 4) {
      if (num_tokens > 32) return body(std::integral_constant<int, kMax>{});
    }
    body(std::integral_constant<int, 4>{});
  }
}

// Calls body(TypeTag<W>{}) for the elements of a weight that is multiplied with an x of type T:
// int8 with scales, Panel with a table.
template <typename T, typename Body>
void dispatch_weight(const float* scale, const int64_t* table, Body&& body) {
  if (table != nullptr) return body(TypeTag<Panel>{});
  if (scale != nullptr) return body(TypeTag<int8_t>{});
  body(TypeTag<T>{});
}

// The form of the rows of x of a product whose Params has x, norm_weight, in_features, weight_scale
// and weight_table.
template <typename Params>
RowForm row_form(const Params& params) {
  return {params.in_features, params.dtype, params.weight_scale, params.weight_table};
}

// Bytes of its workspace: the rows of x, where they must be made ready and an earlier kernel may
// have to do so.
template <typename Params>
int64_t ready_rows_bytes(const Params& params) {
  const RowForm form = row_form(params);
  return needs_rows(form, params.x, params.x_stride, params.norm_weight)
             ? params.num_tokens * form.padded_bytes()
             : 0;
}

// Whether the blocks of a product make its rows ready themselves, up to kMaxSharedRows: if shared
// memory then still has room for the ring's wanted stages, or for a sufficient number. With more
// than a few rows two stages suffice: they are 32 KiB in flight to each multiprocessor, and another
// kernel would cost more.
template <typename T, typename W>
bool blocks_make_rows(const SkinnyPlan& plan, int64_t num_tokens, int m_tiles, int64_t num_blocks,
                      int64_t exchange_bytes, int device) {
  if (num_tokens > kMaxSharedRows<T, W>) return false;
  const int64_t enough_stages = num_tokens > kFewRows ? 2 : 3;
  const int64_t other_bytes = exchange_bytes + shared_rows_bytes<T, W>(num_tokens, plan.num_chunks);
  const int64_t enough = std::min(wanted_stages(plan, m_tiles, num_blocks, device), enough_stages);
  const int sharing = skinny_blocks_per_multiprocessor(m_tiles);
  return fitting_stages(plan, m_tiles, sharing, other_bytes, device) >= enough;
}

// Calls start(params, plan, shared_bytes, makes_rows) with the stages for `num_blocks` blocks. The
// rows of x are ready or, if makes_rows() is true, each block makes them ready. Otherwise an
// earlier kernel makes them in the workspace if necessary. A block has `own_bytes` more shared
// memory, between the exchange and the rows.
template <typename T, typename W, int kNTiles, typename Params, typename Start>
void with_ready_rows(Params params, SkinnyPlan plan, int m_tiles, int64_t num_blocks, Stream stream,
                     Start&& start, int64_t own_bytes = 0) {
  const auto start_with = [&](int64_t other_bytes, auto makes_rows) {
    set_stages(plan, m_tiles, skinny_blocks_per_multiprocessor(m_tiles), num_blocks, other_bytes,
               stream.device);
    start(params, plan, static_cast<size_t>(skinny_ring_bytes(plan, m_tiles) + other_bytes),
          makes_rows);
  };
  const int64_t exchange_bytes =
      skinny_exchange_floats(plan, m_tiles) * int64_t{sizeof(float)} + own_bytes;
  plan.num_blocks = Divisor::of(num_blocks);
  plan.early_weight = params.constant_weight;
  const RowForm form = row_form(params);
  if (needs_rows(form, params.x, params.x_stride, params.norm_weight)) {
    if constexpr (8 * kNTiles <= kMaxSharedRows<T, W>) {
      if (blocks_make_rows<T, W>(plan, params.num_tokens, m_tiles, num_blocks, exchange_bytes,
                                 stream.device)) {
        plan.x_aligned = is_aligned(params.x, params.x_stride, sizeof(T));
        plan.norm_aligned = is_aligned(params.norm_weight);
        return start_with(
            exchange_bytes + shared_rows_bytes<T, W>(params.num_tokens, plan.num_chunks),
            std::true_type{});
      }
    }
    make_rows<T>(form, params.num_tokens, params.norm_weight, params.eps, params.workspace,
                 params.x, params.x_stride, stream);
    plan.early_weight =
        true;  // the kernel that makes rows has waited for the kernel that wrote the weight
  }
  start_with(exchange_bytes, std::false_type{});
}

// Calls body(TypeTag<T>{}, TypeTag<W>{}, n_tiles) for a product's dtype, the elements of its weight
// and its number of 8-row tiles of x.
template <int kMaxTiles = 8, typename Params, typename Body>
void dispatch_product(const char* op, const Params& params, Body&& body) {
  dispatch_dtype(params.dtype, op, [&](auto tag) {
    using T = typename decltype(tag)::type;
    dispatch_weight<T>(params.weight_scale, params.weight_table, [&](auto weight_tag) {
      dispatch_tokens<T, kMaxTiles>(params.num_tokens,
                                    [&](auto n_tiles) { body(tag, weight_tag, n_tiles); });
    });
  });
}

}  // namespace eecore::cuda
