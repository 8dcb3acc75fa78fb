// Products of int8 weights, compiled once for all ops.
#include "tile_gemm.h"

namespace eecore::cpu::EECORE_CAPABILITY {

void multiply_int8(const Int8Product& product) {
#if defined(EECORE_HANDS_OVER)
  switch (active_capability()) {
    case Capability::kAvxVnni:
      return avx_vnni::multiply_int8(product);
    case Capability::kAvxVnniModel:
      return avx_vnni_model::multiply_int8(product);
    default:
      break;
  }
#endif
  const WeightRows<Int8> w{product.w, product.w_stride, product.scales};
  multiply<Int8>(Unit<Int8>(product.num_batch), w, product.num_rows, product.x, product.x_stride,
                 product.num_batch, product.columns, product.next, product.out, product.out_stride);
}

#if defined(__AVX512BF16__)

namespace {

// Sums of 16 rows of a weight with the upper and with the lower bytes of 16 rows of x, as floats of
// their whole: [rows of x, rows of w].
inline void join_bytes(const int32_t* upper, const int32_t* lower, __m512i (&sums)[kTileSide]) {
#pragma GCC unroll 16
  for (int i = 0; i < kTileSide; ++i) {
    const __m512i u = _mm512_load_si512(upper + i * kTileSide);
    const __m512i l = _mm512_load_si512(lower + i * kTileSide);
    // 256 * u + l = 65536 * high + low, which is rounded once.
    const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(u, _mm512_srai_epi32(l, 8)), 8);
    const __m512i low =
        _mm512_and_si512(_mm512_add_epi32(_mm512_slli_epi32(u, 8), l), _mm512_set1_epi32(0xffff));
    const Vec whole =
        fma({_mm512_cvtepi32_ps(high)}, broadcast(65536.0f), {_mm512_cvtepi32_ps(low)});
    sums[i] = _mm512_castps_si512(whole.v);
  }
  transpose(sums);
}

template <typename U>
void multiply_with(const WeightRows<TiledInt8>& w, int64_t num_rows, const uint8_t* x,
                   int64_t x_stride, int64_t num_batch, int64_t n, const TiledInt8* next,
                   float* out, int64_t out_stride) {
  constexpr int64_t kMaxSteps = Format<Int8>::kMaxColumns / kTileRowBytes;
  const LeftRows left{reinterpret_cast<const uint8_t*>(w.data), w.stride, num_rows, n};
  const int64_t group = kTileSide * x_stride, num_steps = ceil_div(n, kTileRowBytes);
  const RightTiles right{x + Format<TiledInt8>::kHeaderBytes, 2 * kTileBytes, kTileBytes, group,
                         2 * ceil_div(num_batch, kTileSide)};
  const auto finish = [&](int64_t pair, int64_t tile, const SumTile<int32_t>* sums,
                          int64_t first_step, int64_t last_step) {
    const int64_t r = tile / 2 * kTileSide, b = pair * kTileSide;
    if (tile % 2 == 0 || r >= num_rows) return;
    __m512i v[kTileSide];
    join_bytes(sums[tile - 1].v, sums[tile].v, v);
    const int64_t lanes = min_of(num_rows - r, kTileSide), count = min_of(num_batch - b, kTileSide);
    const auto* x_scales = reinterpret_cast<const float*>(x + pair * group);
    const Vec scales = load_partial(w.scales + r, lanes);
    float* to = out + b * out_stride + r;
#pragma GCC unroll 16
    for (int i = 0; i < kTileSide; ++i) {
      if (i >= count) continue;
      Vec sum{_mm512_castsi512_ps(v[i])};
      if (first_step > 0) sum = load_partial(to + i * out_stride, lanes) + sum;
      if (last_step == num_steps) sum = sum * (broadcast(x_scales[i]) * scales);
      store_partial(to + i * out_stride, sum, lanes);
    }
  };
  multiply_pairs<U, TileProduct::kBytesSS, TileProduct::kBytesSU, int32_t,
                 kMaxTileBatch / kTileSide>(left, right, kMaxSteps,
                                            reinterpret_cast<const uint8_t*>(next), finish);
}

}  // namespace

void multiply_int8_on_tiles(Tiles tiles, const WeightRows<TiledInt8>& w, int64_t num_rows,
                            const uint8_t* x, int64_t x_stride, int64_t num_batch, int64_t n,
                            const TiledInt8* next, float* out, int64_t out_stride) {
  const auto multiply =
      tiles == Tiles::kHardware ? multiply_with<TileHardware> : multiply_with<TileModel>;
  multiply(w, num_rows, x, x_stride, num_batch, n, next, out, out_stride);
}

#endif

}  // namespace eecore::cpu::EECORE_CAPABILITY
