// pack_weight: packs a weight from the blocks of a GGUF file into the panels that the products
// read.
#include "backend.h"
#include "packed_check.h"

namespace eecore {
namespace {

void pack_weight(const Tensor& blocks, const Text& format, int64_t offset, Tensor packed,
                 Tensor table) {
  Checker check("pack_weight");
  check(blocks, "blocks", Accept::kUint8, {"num_rows", "row_bytes"}, 1);
  check.written(packed, "packed", Accept::kUint8, {"num_bytes"});
  check.written(table, "table", Accept::kInt64, {"num_rows"});
  PackWeightParams params{};
  params.format = block_format_of(check, format);
  const BlockTraits& traits = traits_of(params.format);
  const int64_t row_bytes = check["row_bytes"];
  check.require(row_bytes > 0 && row_bytes % traits.bytes == 0,
                "blocks: expected rows of whole blocks of ", traits.bytes, " bytes, got ",
                row_bytes, " bytes");
  params.columns = row_bytes / traits.bytes * traits.columns;
  check.require(params.columns <= kMaxPackedColumns, "blocks: expected at most ", kMaxPackedColumns,
                " columns, got ", params.columns);
  check.require(offset >= 0 && offset % 64 == 0 && offset / 64 <= INT32_MAX,
                "offset: expected a multiple of 64 from 0 on, got ", offset);
  const int64_t num_panels = (check["num_rows"] + kPanelRows - 1) / kPanelRows;
  const int64_t needed = num_panels * planes_of(params.format, params.columns).bytes;
  check.require(check["num_bytes"] - offset >= needed, "packed: expected ", needed,
                " bytes from offset ", offset, " on, got ", check["num_bytes"], " in all");
  params.blocks = data<const uint8_t>(blocks);
  params.packed = data<uint8_t>(packed);
  params.table = data<int64_t>(table);
  params.num_rows = check["num_rows"];
  params.blocks_stride = blocks.stride(0);
  params.offset = offset;
  EECORE_RUN(pack_weight, params, blocks);
}

EECORE_OP(pack_weight, "Tensor blocks, str format, int offset, Tensor(a!) packed, Tensor(b!) table")

}  // namespace
}  // namespace eecore
