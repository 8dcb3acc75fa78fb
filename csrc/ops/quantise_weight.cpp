// quantise_weight: converts a weight of floats into the blocks of a GGUF file.
#include "backend.h"
#include "packed_check.h"

namespace eecore {
namespace {

void quantise_weight(const Tensor& weight, const Text& format, Tensor blocks) {
  Checker check("quantise_weight");
  check(weight, "weight", Accept::kModel, {"num_rows", "columns"}, 1);
  check.written(blocks, "blocks", Accept::kUint8, {"num_rows", "row_bytes"}, 1);
  QuantiseWeightParams params{};
  params.format = block_format_of(check, format);
  check.require(params.format == BlockFormat::kQ4_1 || params.format == BlockFormat::kQ5_1 ||
                    params.format == BlockFormat::kQ8_0,
                "format: expected one of Q4_1, Q5_1, Q8_0, got ", format.c_str());
  params.num_rows = check["num_rows"];
  params.columns = check["columns"];
  check.require(params.columns > 0 && params.columns % kBlockColumns == 0 &&
                    params.columns <= kMaxPackedColumns,
                "weight: expected rows of whole blocks of ", kBlockColumns, " columns, at most ",
                kMaxPackedColumns, ", got ", params.columns);
  const int64_t row_bytes = params.columns / kBlockColumns * traits_of(params.format).bytes;
  check.require(check["row_bytes"] == row_bytes, "blocks: expected rows of ", row_bytes,
                " bytes, got ", check["row_bytes"]);
  params.weight = data<const void>(weight);
  params.blocks = data<uint8_t>(blocks);
  params.weight_stride = weight.stride(0);
  params.blocks_stride = blocks.stride(0);
  params.dtype = check.dtype();
  EECORE_RUN(quantise_weight, params, weight);
}

EECORE_OP(quantise_weight, "Tensor weight, str format, Tensor(a!) blocks")

}  // namespace
}  // namespace eecore
