// unpack_weight: rows of a packed weight as float32.
#include "backend.h"
#include "packed_check.h"

namespace eecore {
namespace {

void unpack_weight(const Tensor& packed, const Tensor& table, Tensor out) {
  Checker check("unpack_weight");
  check.written(out, "out", Accept::kFloat32, {"num_rows", "columns"}, 1);
  UnpackWeightParams params{};
  params.table = check_packed(check, packed, "packed", table, "table", {"num_rows"}, "columns");
  params.packed = data<const uint8_t>(packed);
  params.out = data<float>(out);
  params.num_rows = check["num_rows"];
  params.columns = check["columns"];
  params.out_stride = out.stride(0);
  EECORE_RUN(unpack_weight, params, packed);
}

EECORE_OP(unpack_weight, "Tensor packed, Tensor table, Tensor(a!) out")

}  // namespace
}  // namespace eecore
