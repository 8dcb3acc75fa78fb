// The peak rates of the machine, measured by the simplest loops: read memory, multiply and add.
// Benchmarks report their share of these, measured in the same run.
#include "tile_unit.h"
#include "vnni_products.h"

namespace eecore::cpu::EECORE_CAPABILITY {

void run_read_ceiling(const ReadCeilingParams& params, const Parallel& parallel) {
  // Each thread reads four streams at once, like kernels that walk several rows: one stream alone
  // does not keep the memory busy. Every line of 64 bytes is prefetched.
  constexpr int64_t kBlock = 1024;
  constexpr int kStreams = 4, kStep = 2 * kWidth, kAhead = 128;
  const float* data = params.data;
  parallel_for(parallel, params.num_floats / kBlock, 64, [&](int64_t begin, int64_t end) {
    const int64_t length = (end - begin) / kStreams * kBlock;
    const float* start = data + begin * kBlock;
    Vec sums[2 * kStreams];
    for (Vec& s : sums) s = zero();
    for (int64_t i = 0; i < length; i += kStep) {
#pragma GCC unroll 4
      for (int stream = 0; stream < kStreams; ++stream) {
        const float* p = start + stream * length + i;
        for (int line = 0; line < kStep; line += 16) __builtin_prefetch(p + line + kAhead);
        sums[2 * stream] = sums[2 * stream] + load(p);
        sums[2 * stream + 1] = sums[2 * stream + 1] + load(p + kWidth);
      }
    }
    Vec total = zero();
    for (const Vec& s : sums) total = total + s;
    if (sum(total) == 1.2345e30f) *params.sink = 1.0f;  // keeps the loads alive
  });
}

// Defined in byte_ceiling.cpp.
double multiply_bytes(int64_t steps, float* sink);

namespace {

// Returns the operations of a step, of which products and sums each are one. Here and in
// byte_ceiling.cpp results are kept alive through `sink`.
double multiply_vectors(int64_t steps, [[maybe_unused]] Product product, float* sink) {
  // Twelve independent chains cover the latency of two multiply-add ports.
  constexpr int kChains = 12;
  double operations = 2.0 * kWidth * kChains;
  Vec chains[kChains];
  // Different starts, or the compiler would merge the chains into one.
  for (int j = 0; j < kChains; ++j) chains[j] = broadcast(1.0f + static_cast<float>(j));
#if defined(__AVX512BF16__)
  if (product == Product::kBFloat16) {
    const __m512bh a = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x3f80));
    const __m512bh b = reinterpret_cast<__m512bh>(_mm512_set1_epi16(0x2edc));
    for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
      for (Vec& c : chains) c.v = _mm512_dpbf16_ps(c.v, a, b);
    }
    operations *= 2;
  } else
#endif
  {
    const Vec a = broadcast(0.999999f), b = broadcast(1e-7f);
    for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 12
      for (Vec& c : chains) c = fma(c, a, b);
    }
  }
  Vec total = zero();
  for (const Vec& c : chains) total = total + c;
  if (sum(total) == 1.2345e30f) *sink = 1.0f;
  return operations;
}

#if defined(__AVX512BF16__)
// Two left tiles by two right ones, into four sums.
template <typename U>
double multiply_tiles(int64_t steps, Product product) {
  alignas(64) uint8_t bytes[kTileSide * kTileRowBytes];
  __builtin_memset(bytes, 1, sizeof(bytes));
  U::begin();
  U::template zero<0>(), U::template zero<1>(), U::template zero<2>(), U::template zero<3>();
  U::template load<4>(bytes, kTileRowBytes), U::template load<5>(bytes, kTileRowBytes);
  U::template load<6>(bytes, kTileRowBytes), U::template load<7>(bytes, kTileRowBytes);
  for (int64_t i = 0; i < steps; ++i) {
    if (product == Product::kInt8) {
      U::template multiply_bytes<0, 4, 6>(), U::template multiply_bytes<1, 4, 7>();
      U::template multiply_bytes<2, 5, 6>(), U::template multiply_bytes<3, 5, 7>();
    } else {
      U::template multiply<0, 4, 6>(), U::template multiply<1, 4, 7>();
      U::template multiply<2, 5, 6>(), U::template multiply<3, 5, 7>();
    }
  }
  U::end();
  const int64_t columns = product == Product::kInt8 ? kTileRowBytes : kTileColumns;
  return 2.0 * 4 * static_cast<double>(kTileSide * kTileSide * columns);
}
#endif

double multiply(int64_t steps, Product product, float* sink) {
#if defined(__AVX512BF16__)
  const Tiles tiles = product == Product::kFloat32 ? Tiles::kNone : tiles_in_use();
  if (tiles == Tiles::kHardware) return multiply_tiles<TileHardware>(steps, product);
  if (tiles == Tiles::kModel) return multiply_tiles<TileModel>(steps, product);
#endif
  if (product == Product::kInt8) return multiply_bytes(steps, sink);
  return multiply_vectors(steps, product, sink);
}

}  // namespace

void run_multiply_ceiling(const MultiplyCeilingParams& params, const Parallel& parallel) {
  parallel_for(parallel, parallel.num_threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; ++thread) {
      const double operations = multiply(params.steps, params.product, params.sink);
      if (thread > 0) continue;
      *params.operations = operations * static_cast<double>(params.steps) * parallel.num_threads;
    }
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
