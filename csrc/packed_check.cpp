#include "packed_check.h"

#include <cstring>

namespace eecore {
namespace {

#ifndef EECORE_BACKEND_CUDA
// Checks that an entry of a table is a row of `columns` inside `num_bytes`.
void check_place(const Checker& check, const char* table_name, int64_t entry, int64_t columns,
                 int64_t num_bytes) {
  const RowPlace place = row_place(entry);
  const int format = static_cast<int>(place.format);
  check.require(entry >= 0 && format < kNumBlockFormats, table_name,
                ": expected places that pack_weight wrote, got ", entry);
  const BlockTraits& traits = traits_of(place.format);
  check.require(place.columns == columns && columns % traits.columns == 0, table_name,
                ": expected rows of ", columns, " columns in blocks of ", traits.columns, ", got ",
                place.columns);
  const int64_t end = place.offset + planes_of(place.format, columns).bytes;
  check.require(end <= num_bytes, table_name, ": expected rows within ", num_bytes,
                " packed bytes, got one that ends at ", end);
}

// Calls function(row) with every row of the table [..., num_rows], pointers to contiguous entries.
template <typename Function>
void for_each_row(const Tensor& table, const Function& function) {
  const int64_t* entries = data<const int64_t>(table);
  if (table.dim() == 1) return function(entries);
  for (int64_t i = 0; i < table.size(0); ++i) function(entries + i * table.stride(0));
}
#endif

}  // namespace

BlockFormat block_format_of(const Checker& check, const std::string& name) {
  std::string names;
  for (int i = 0; i < kNumBlockFormats; ++i) {
    if (name == kBlockTraits[i].name) return static_cast<BlockFormat>(i);
    names += (i ? ", " : "") + std::string(kBlockTraits[i].name);
  }
  check.fail("format: expected one of " + names + ", got " + name);
}

const int64_t* check_packed(Checker& check, const Tensor& packed, const char* name,
                            const Tensor& table, const char* table_name,
                            std::initializer_list<Dim> table_shape, Dim columns) {
  check(packed, name, Accept::kUint8, {packed.numel()});
  check.apart(table, table_name, Accept::kInt64, table_shape, 1);
#ifdef EECORE_BACKEND_CUDA
  const auto past = reinterpret_cast<uintptr_t>(data<const uint8_t>(packed)) % 16;
  check.require(past == 0, name,
                ": expected packed bytes that begin at a multiple of 16, got bytes ", past,
                " after one");
  if (columns.name == nullptr) {
    require_blocks(check, table_name, columns.size);
  } else if (check.has(columns.name)) {
    require_blocks(check, table_name, check[columns.name]);
  }
#else
  if (table.numel() == 0) return data<const int64_t>(table);
  const int64_t num_rows = table.size(table.dim() - 1);
  int64_t wanted = columns.size;
  if (columns.name != nullptr) {
    if (!check.has(columns.name)) {
      check.bind(columns.name, row_place(data<const int64_t>(table)[0]).columns);
    }
    wanted = check[columns.name];
  }
  for_each_row(table, [&](const int64_t* entries) {
    for (int64_t row = 0; row < num_rows; ++row) {
      // The rows of a panel follow each other.
      const bool follows =
          row > 0 && entries[row] == entries[row - 1] + 1 && entries[row] % kPanelRows != 0;
      if (!follows) check_place(check, table_name, entries[row], wanted, packed.numel());
    }
  });
#endif
  return data<const int64_t>(table);
}

WeightCoding check_weight(Checker& check, const WeightNames& names, const Tensor& weight,
                          std::initializer_list<Dim> shape, const std::optional<Tensor>& scale,
                          const std::optional<Tensor>& table,
                          std::initializer_list<Dim> row_shape) {
  if (!table.has_value()) {
    return {check.weight(weight, names.weight, shape, scale, names.scale, row_shape), nullptr};
  }
  check.require(!scale.has_value(), names.scale, ": expected None with ", names.table,
                ", got a tensor");
  const Dim columns = *(shape.end() - 1);
  return {nullptr,
          check_packed(check, weight, names.weight, *table, names.table, row_shape, columns)};
}

}  // namespace eecore
