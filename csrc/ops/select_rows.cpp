// select_rows: selects the active rows that a part of a program is for, and packs their states.
#include "backend.h"
#include "index_checks.h"

namespace eecore {
namespace {

void select_rows(const Tensor& hidden, const std::optional<Tensor>& row,
                 const std::optional<Tensor>& kind, int64_t wanted,
                 const std::optional<Tensor>& thresholds, const std::optional<Tensor>& accepted,
                 Tensor index, Tensor count, Tensor states) {
  Checker check("select_rows");
  check(hidden, "hidden", Accept::kModel, {"num_active", "hidden_size"}, 1);
  const bool has_row = check(row, "row", Accept::kInt32, {"num_active"});
  const char* num_rows = has_row ? "num_rows" : "num_active";
  bool bound = !has_row;
  bound |= check(kind, "kind", Accept::kInt32, {num_rows});
  bound |= check(thresholds, "thresholds", Accept::kFloat32, {num_rows});
  bound |= check(accepted, "accepted", Accept::kBool, {num_rows});
  check.require(wanted >= INT32_MIN && wanted <= INT32_MAX,
                "wanted: expected a kind of 32 bits, got ", wanted);
  check.written(index, "index", Accept::kInt32, {"num_active"});
  check.written(count, "count", Accept::kInt32, {1});
  check.written(states, "states", Accept::kModel, {"num_active", "hidden_size"}, 1, "hidden");

  const int64_t element = size_of(check.dtype());
  SelectRowsParams params{};
  params.hidden = data<const void>(hidden);
  params.row = data_or_null<const int32_t>(row);
  params.kind = data_or_null<const int32_t>(kind);
  params.thresholds = data_or_null<const float>(thresholds);
  params.accepted = data_or_null<const uint8_t>(accepted);
  params.index = data<int32_t>(index);
  params.count = data<int32_t>(count);
  params.states = data<void>(states);
  params.num_active = check["num_active"];
  params.row_bytes = check["hidden_size"] * element;
  params.hidden_stride = hidden.stride(0) * element;
  params.states_stride = states.stride(0) * element;
  params.wanted = static_cast<int32_t>(wanted);
  if (has_row && bound) {
    check_range(check, "row", params.row, params.num_active, 0, check["num_rows"]);
  }
  EECORE_RUN(select_rows, params, hidden);
}

EECORE_OP(select_rows,
          "Tensor hidden, Tensor? row, Tensor? kind, int wanted, Tensor? thresholds, "
          "Tensor? accepted, Tensor(a!) index, Tensor(b!) count, Tensor(c!) states")

}  // namespace
}  // namespace eecore
