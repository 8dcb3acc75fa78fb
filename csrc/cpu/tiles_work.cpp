// The machine's matrix tiles against their model: two tiles of numbers that go in different ways.
#include "tile_gemm.h"

#if defined(__AVX512BF16__)

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int64_t kRowsOfW = 17, kRowsOfX = 18, kColumns = 45;

// out: [kRowsOfX, kTileRows]
template <typename U>
void multiply_some(float* out) {
  using W = Tiled<U>;
  const int64_t stride = packed_stride<W>(kColumns);
  Scratch<BFloat16> w(kRowsOfW * kColumns), x(kColumns);
  Scratch<BFloat16> packed(rows_held<W>(kRowsOfX) * stride);
  const auto number = [](int64_t i) { return static_cast<float>(i * 37 % 101 - 50) / 16; };
  for (int64_t i = 0; i < kRowsOfW * kColumns; ++i) from_float(number(i), &w[i]);
  for (int64_t row = 0; row < kRowsOfX; ++row) {
    for (int64_t k = 0; k < kColumns; ++k) from_float(number(row * kColumns + 3 * k + 7), &x[k]);
    pack_row<W>(x.data(), kColumns, row, stride, packed.data());
  }
  const Unit<W> unit;
  const auto rows = weight_rows<W>(w.data(), kColumns, nullptr, nullptr);
  multiply(rows, kRowsOfW, packed.data(), stride, kRowsOfX, kColumns,
           static_cast<const W*>(nullptr), out, kTileRows);
}

}  // namespace

bool tiles_work() {
  Scratch<float> got(kRowsOfX * kTileRows), expected(kRowsOfX * kTileRows);
  multiply_some<TileHardware>(got.data());
  multiply_some<TileModel>(expected.data());
  for (int64_t row = 0; row < kRowsOfX; ++row) {
    for (int64_t i = row * kTileRows; i < row * kTileRows + kRowsOfW; ++i) {
      if (!(__builtin_fabsf(got[i] - expected[i]) <= 1e-3f)) return false;
    }
  }
  return true;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY

#endif
