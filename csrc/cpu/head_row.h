// One head of queries or keys as a float32 row in cache: loaded from any storage, normed, rotated,
// and rounded once when it is written; and the place of a head of a slot in a cache. append_kv and
// kv_fill share these functions, so that a key is the same from either.
#pragma once

#include "rms_norm.h"

namespace eecore::cpu::EECORE_CAPABILITY {

struct CacheSlot {
  int64_t page, offset;
};

// The place of a slot of slot_mapping that is not -1.
inline CacheSlot cache_slot(int64_t slot, int64_t page_size) {
  return {slot / page_size, slot % page_size};
}

// Elements from the start of a layer's cache to a head of a slot.
inline int64_t cache_offset(const CacheStrides& strides, CacheSlot slot, int64_t head) {
  return slot.page * strides.page + slot.offset * strides.slot + head * strides.head;
}

// Loads row[0..head_dim) in float32 from any storage.
template <typename T>
inline void load_row(const T* in, int64_t head_dim, float* row) {
  int64_t i = 0;
  for (; i + kWidth <= head_dim; i += kWidth) store(row + i, load(in + i));
  if (i < head_dim) store_partial(row + i, load_partial(in + i, head_dim - i), head_dim - i);
}

template <typename T>
inline void store_row(const float* row, int64_t head_dim, T* out) {
  int64_t i = 0;
  for (; i + kWidth <= head_dim; i += kWidth) store(out + i, load(row + i));
  if (i < head_dim) store_partial(out + i, load_partial(row + i, head_dim - i), head_dim - i);
}

// row = row * factor * weight
template <typename T>
inline void scale_head(float* row, const T* weight, int64_t head_dim, float factor) {
  const Vec scale = broadcast(factor);
  for (int64_t i = 0; i < head_dim; i += kWidth) {
    const int64_t n = min_of(kWidth, head_dim - i);
    store_partial(row + i, load_partial(row + i, n) * scale * load_partial(weight + i, n), n);
  }
}

// 1 / rms over num_heads heads, head_stride apart.
template <typename T>
inline float inverse_rms_of_heads(const T* heads, int64_t num_heads, int64_t head_stride,
                                  int64_t head_dim, float eps) {
  Vec squares = zero();
  for (int64_t head = 0; head < num_heads; ++head) {
    const T* first = heads + head * head_stride;
    for (int64_t i = 0; i < head_dim; i += kWidth) {
      const Vec x = load_partial(first + i, min_of(kWidth, head_dim - i));
      squares = fma(x, x, squares);
    }
  }
  const float size = static_cast<float>(num_heads * head_dim);
  return 1.0f / __builtin_sqrtf(sum(squares) / size + eps);
}

// Rotates the pairs (i, i + half) by the angles whose cosines, then sines, are given.
inline void rotate_row(float* row, const float* cos_sin, int64_t half) {
  for (int64_t i = 0; i < half; i += kWidth) {
    const int64_t n = min_of(kWidth, half - i);
    const Vec x = load_partial(row + i, n), y = load_partial(row + half + i, n);
    const Vec cosine = load_partial(cos_sin + i, n), sine = load_partial(cos_sin + half + i, n);
    store_partial(row + i, fma(x, cosine, zero() - y * sine), n);
    store_partial(row + half + i, fma(y, cosine, x * sine), n);
  }
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
