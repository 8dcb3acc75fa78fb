// Packed weights at the tensor boundary: formats by name, and tables that a kernel can follow.
#pragma once

#include "check.h"

namespace eecore {

// The format of a name such as "Q4_0".
BlockFormat block_format_of(const Checker& check, const std::string& name);

// Checks packed bytes to be uint8 [num_bytes], and their table to be int64 of a shape in which
// every element is the place of a row of `columns`, of a known format, inside the bytes. If the
// name of `columns` is not bound yet, it is bound to the columns of the first row. On CUDA the
// table is not read: the caller guarantees its entries and what require_blocks checks. Returns the
// table's data.
const int64_t* check_packed(Checker& check, const Tensor& packed, const char* name,
                            const Tensor& table, const char* table_name,
                            std::initializer_list<Dim> table_shape, Dim columns);

#ifdef EECORE_BACKEND_CUDA
constexpr int64_t kMaxColumns = int64_t{1} << 26;  // a panel has less than 2 GiB
#else
constexpr int64_t kMaxColumns = kMaxPackedColumns;
#endif
// Checks that the rows of a table consist of whole blocks.
inline void require_blocks(const Checker& check, const char* table_name, int64_t columns) {
  check.require(columns % kBlockColumns == 0 && columns <= kMaxColumns, table_name,
                ": expected rows in blocks of ", kBlockColumns, " columns, at most ", kMaxColumns,
                ", got ", columns);
}

// How a weight is stored other than in its tensor alone; at most one of the two is set.
struct WeightCoding {
  const float* scale;
  const int64_t* table;
};

// Checks a weight [..., rows, columns] to be kModel; with a scale [..., rows] int8
// (Checker::weight), with a table [..., rows] packed bytes.
struct WeightNames {
  const char *weight, *scale, *table;
};
WeightCoding check_weight(Checker& check, const WeightNames& names, const Tensor& weight,
                          std::initializer_list<Dim> shape, const std::optional<Tensor>& scale,
                          const std::optional<Tensor>& table, std::initializer_list<Dim> row_shape);

}  // namespace eecore
