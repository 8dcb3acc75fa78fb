// Packed weights at the tensor boundary: formats by name, and tables that a kernel can follow.
#pragma once

#include "check.h"

namespace eecore {

// The format of a name, "Q4_0" for one.
BlockFormat block_format_of(const Checker& check, const std::string& name);

// Holds packed bytes to uint8 [num_bytes], and their table to int64 of a shape whose every element
// is the place of a row of `columns`, of a known format, inside the bytes. A name of `columns` that
// is not bound yet is bound to what the first row has. On CUDA, where the table is not looked at,
// that is left to the caller, as is require_blocks then. Returns the table's data.
const int64_t* check_packed(Checker& check, const Tensor& packed, const char* name,
                            const Tensor& table, const char* table_name,
                            std::initializer_list<Dim> table_shape, Dim columns);

#ifdef EECORE_BACKEND_CUDA
constexpr int64_t kMostColumns = int64_t{1} << 26;  // a panel has less than 2 GiB
#else
constexpr int64_t kMostColumns = kMaxPackedColumns;
#endif
// Holds the rows of a table to whole blocks.
inline void require_blocks(const Checker& check, const char* table_name, int64_t columns) {
  check.require(columns % kBlockColumns == 0 && columns <= kMostColumns, table_name,
                ": expected rows in blocks of ", kBlockColumns, " columns, at most ", kMostColumns,
                ", got ", columns);
}

// What a weight is stored in besides its tensor; at most one of the two is there.
struct WeightCoding {
  const float* scale;
  const int64_t* table;
};

// Holds a weight [..., rows, columns] to kModel; where there is a scale [..., rows] to int8
// (Checker::weight), where there is a table [..., rows] to packed bytes.
struct WeightNames {
  const char *weight, *scale, *table;
};
WeightCoding check_weight(Checker& check, const WeightNames& names, const Tensor& weight,
                          std::initializer_list<Dim> shape, const std::optional<Tensor>& scale,
                          const std::optional<Tensor>& table, std::initializer_list<Dim> row_shape);

}  // namespace eecore
