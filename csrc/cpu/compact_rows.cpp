// compact_rows on the CPU: a few hundred rows at most, so one thread. Rows only move up, so in
// ascending order no row is overwritten before it has moved.
#include "kernel.h"

namespace eecore::cpu::EECORE_CAPABILITY {
namespace {

template <typename Element>
void move_element(Element* values, int64_t from, int64_t to) {
  if (values != nullptr) values[to] = values[from];
}

// Strides and size are in bytes.
void move_row(void* rows, int64_t stride, int64_t size, int64_t from, int64_t to) {
  char* base = static_cast<char*>(rows);
  if (rows != nullptr) copy_bytes(base + to * stride, base + from * stride, size);
}

void move_up(const CompactRowsParams& params, int64_t from, int64_t to) {
  constexpr int64_t kEntry = sizeof(int32_t);
  move_element(params.row, from, to);
  move_element(params.positions, from, to);
  move_element(params.slot_mapping, from, to);
  move_element(params.seq_lens, from, to);
  move_element(params.token_ids, from, to);
  move_element(params.cross_seq_lens, from, to);
  move_row(params.page_table, params.page_table_stride * kEntry, params.max_pages * kEntry, from,
           to);
  move_row(params.cross_page_table, params.cross_page_table_stride * kEntry,
           params.max_cross_pages * kEntry, from, to);
  move_row(params.hidden, params.hidden_stride, params.row_bytes, from, to);
}

}  // namespace

void run_compact_rows(const CompactRowsParams& params, const Parallel&) {
  int32_t stay = 0;
  for (int64_t i = 0; i < params.num_active; ++i) {
    if (params.done[params.row[i]]) continue;
    if (i != stay) move_up(params, i, stay);
    ++stay;
  }
  *params.left = stay;
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
