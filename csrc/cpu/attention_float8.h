// A block of keys in float8 as one of the model's dtype, which holds every such number exactly:
// what follows knows of no other.
#pragma once

#include "attention_pairs.h"
#include "attention_rows.h"
#include "float8.h"

namespace eecore::cpu::EECORE_CAPABILITY {

inline void widen_float8_row(const Float8* in, int64_t n, float* out) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(in + i));
  if (i < n) store(out + i, load_partial(in + i, n - i));
}
inline void widen_float8_row(const Float8* in, int64_t n, BFloat16* out) {
#if defined(__AVX512F__)
  for (int64_t i = 0; i < n; i += 32)
    _mm512_storeu_si512(out + i, load_float8_words(in + i, n - i));
#else
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(in + i));
  if (i < n) store(out + i, load_partial(in + i, n - i));
#endif
}

// The block's rows as T in the scratch, to which `rows` point; those of `next` are asked for. Past
// the last key stands the last.
template <typename T>
HeadBlock<T> widened(const HeadBlock<Float8>& block, const HeadBlock<Float8>& next, Range keys,
                     int64_t head_dim, TileScratch& scratch, BlockRows<T>& rows) {
  const int64_t width = row_width(head_dim), num_keys = keys.end - keys.begin;
  T* k = reinterpret_cast<T*>(scratch.k_widened);
  T* v = reinterpret_cast<T*>(scratch.v_widened);
  for (int64_t j = 0; j < kMaxBlock; ++j) {
    if (j < num_keys) {
      if (next.exists()) {
        prefetch_row(next.k[j], head_dim);
        prefetch_row(next.v[j], head_dim);
      }
      widen_float8_row(block.k[j], head_dim, k + j * width);
      widen_float8_row(block.v[j], head_dim, v + j * width);
    }
    rows.k[j] = k + min_of(j, num_keys - 1) * width;
    rows.v[j] = v + min_of(j, num_keys - 1) * width;
  }
  return {{rows.k, 0}, {rows.v, 0}};
}

// attend_block for a cache of the model's dtype T, and for one in float8, whose rows as T `rows`
// are for. Rows of float32 lie side by side then, as gathered ones do.
template <typename T>
void attend_cached(TileScratch& scratch, int64_t num_rows, int64_t at, int64_t head_dim,
                   float scale, Range keys, const HeadBlock<T>& block, const HeadBlock<T>& next,
                   BlockRows<T>&) {
  attend_block(scratch, num_rows, at, head_dim, scale, keys, block, next);
}
inline void attend_cached(TileScratch& scratch, int64_t num_rows, int64_t at, int64_t head_dim,
                          float, Range keys, const HeadBlock<Float8>& block,
                          const HeadBlock<Float8>& next, BlockRows<float>& rows) {
  const HeadBlock<float> wide = widened(block, next, keys, head_dim, scratch, rows);
  attend_head(scratch, num_rows, at, head_dim, keys, RowBlock<float>{&wide, nullptr});
}
inline void attend_cached(TileScratch& scratch, int64_t num_rows, int64_t at, int64_t head_dim,
                          float scale, Range keys, const HeadBlock<Float8>& block,
                          const HeadBlock<Float8>& next, BlockRows<BFloat16>& rows) {
  const HeadBlock<BFloat16> wide = widened(block, next, keys, head_dim, scratch, rows);
  attend_block(scratch, num_rows, at, head_dim, scale, keys, wide, HeadBlock<BFloat16>{});
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
