// compact_rows: moves the active rows that stay up into the places of rows that exit.
#include "backend.h"
#include "index_checks.h"

namespace eecore {
namespace {

void compact_rows(const Tensor& done, Tensor row, Tensor positions, Tensor slot_mapping,
                  Tensor seq_lens, Tensor page_table, Tensor num_active,
                  std::optional<Tensor> token_ids, std::optional<Tensor> cross_page_table,
                  std::optional<Tensor> cross_seq_lens, std::optional<Tensor> hidden) {
  Checker check("compact_rows");
  check(done, "done", Accept::kBool, {"num_rows"});
  check.written(row, "row", Accept::kInt32, {"num_active"});
  check.written(positions, "positions", Accept::kInt64, {"num_active"});
  check.written(slot_mapping, "slot_mapping", Accept::kInt64, {"num_active"});
  check.written(seq_lens, "seq_lens", Accept::kInt32, {"num_active"});
  check.written(page_table, "page_table", Accept::kInt32, {"num_active", "max_pages"}, 1);
  check.written(num_active, "num_active", Accept::kInt32, {1});
  check.written(token_ids, "token_ids", Accept::kInt64, {"num_active"});
  const bool has_cross = check.written(cross_page_table, "cross_page_table", Accept::kInt32,
                                       {"num_active", "max_cross_pages"}, 1);
  check.written(cross_seq_lens, "cross_seq_lens", Accept::kInt32, {"num_active"});
  const bool has_hidden =
      check.written(hidden, "hidden", Accept::kModel, {"num_active", "hidden_size"}, 1);

  CompactRowsParams params{};
  params.done = data<const uint8_t>(done);
  params.row = data<int32_t>(row);
  params.positions = data<int64_t>(positions);
  params.slot_mapping = data<int64_t>(slot_mapping);
  params.seq_lens = data<int32_t>(seq_lens);
  params.page_table = data<int32_t>(page_table);
  params.left = data<int32_t>(num_active);
  params.token_ids = data_or_null<int64_t>(token_ids);
  params.cross_page_table = data_or_null<int32_t>(cross_page_table);
  params.cross_seq_lens = data_or_null<int32_t>(cross_seq_lens);
  params.hidden = data_or_null(hidden);
  params.num_active = check["num_active"];
  params.max_pages = check["max_pages"];
  params.max_cross_pages = has_cross ? check["max_cross_pages"] : 0;
  params.page_table_stride = page_table.stride(0);
  params.cross_page_table_stride = has_cross ? cross_page_table->stride(0) : 0;
  if (has_hidden) {
    const int64_t element = size_of(check.dtype());
    params.row_bytes = check["hidden_size"] * element;
    params.hidden_stride = hidden->stride(0) * element;
  }
  check_range(check, "row", params.row, params.num_active, 0, check["num_rows"]);
  EECORE_RUN(compact_rows, params, done);
}

EECORE_OP(compact_rows,
          "Tensor done, Tensor(a!) row, Tensor(b!) positions, Tensor(c!) slot_mapping, "
          "Tensor(d!) seq_lens, Tensor(e!) page_table, Tensor(f!) num_active, "
          "Tensor(g!)? token_ids, Tensor(h!)? cross_page_table, Tensor(i!)? cross_seq_lens, "
          "Tensor(j!)? hidden")

}  // namespace
}  // namespace eecore
