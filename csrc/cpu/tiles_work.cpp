// Compares the machine's matrix tiles with their model: two tiles of different numbers, and those
// of bytes, signed and unsigned.
#include "packed_rows.h"

#if defined(__AVX512BF16__)

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

constexpr int64_t kRowsOfW = 17, kRowsOfX = 18, kColumns = 45;

// out: [kRowsOfX, kTileRows]
template <typename U>
void multiply_some(float* out) {
  using W = Tiled<U>;
  const int64_t stride = packed_stride<W>(kColumns);
  Scratch<BFloat16> w(kRowsOfW * kColumns), x(kRowsOfX * kColumns);
  Scratch<BFloat16> packed(rows_held<W>(kRowsOfX) * stride);
  const auto number = [](int64_t i) { return static_cast<float>(i * 37 % 101 - 50) / 16; };
  for (int64_t i = 0; i < kRowsOfW * kColumns; ++i) from_float(number(i), &w[i]);
  for (int64_t row = 0; row < kRowsOfX; ++row) {
    for (int64_t k = 0; k < kColumns; ++k) {
      from_float(number(row * kColumns + 3 * k + 7), &x[row * kColumns + k]);
    }
  }
  pack_rows<W, BFloat16>([&](int64_t i) { return x.data() + i * kColumns; }, 0, kRowsOfX, kColumns,
                         nullptr, 0.0f, nullptr, stride, packed.data());
  const Unit<W> unit(kRowsOfX);
  const auto rows = weight_rows<W>(w.data(), kColumns, nullptr, nullptr);
  multiply(unit, rows, kRowsOfW, packed.data(), stride, kRowsOfX, kColumns,
           static_cast<const W*>(nullptr), out, kTileRows);
}

bool products_agree() {
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

// out: [kTileSide, kTileSide], of whole numbers, multiplied like panels.
template <typename U, bool kSignedLeft, bool kSignedRight>
void multiply_bytes(const uint8_t* left, const uint8_t* right, int32_t* out) {
  U::begin(panel_tiles(kTileSide));
  U::template load<kLeftTile>(left, kBlockColumns);
  U::template load<kRightTile>(right, kTileRowBytes);
  U::template zero<0>();
  U::template multiply_bytes<0, kLeftTile, kRightTile, kSignedLeft, kSignedRight>();
  U::template store<0>(out);
  U::end();
}

template <bool kSignedLeft, bool kSignedRight>
bool bytes_agree() {
  constexpr int64_t kBytes = kTileSide * kBlockColumns, kSums = kTileSide * kTileSide;
  Scratch<uint8_t> left(kBytes), right(kBytes);
  for (int64_t i = 0; i < kBytes; ++i) {
    left[i] = static_cast<uint8_t>(i * 89 + i / 7);
    right[i] = static_cast<uint8_t>(i * 151 + i / 5);
  }
  Scratch<int32_t> got(kSums), expected(kSums);
  multiply_bytes<TileHardware, kSignedLeft, kSignedRight>(left.data(), right.data(), got.data());
  multiply_bytes<TileModel, kSignedLeft, kSignedRight>(left.data(), right.data(), expected.data());
  return __builtin_memcmp(got.data(), expected.data(), kSums * sizeof(int32_t)) == 0;
}

}  // namespace

bool tiles_work() {
  return products_agree() && bytes_agree<true, true>() && bytes_agree<true, false>() &&
         bytes_agree<false, true>();
}

}  // namespace eecore::cpu::EECORE_CAPABILITY

#endif
