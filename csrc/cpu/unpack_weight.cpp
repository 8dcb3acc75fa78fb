// unpack_weight on the CPU: row by row; threads share the rows.
#include "panel_rows.h"

namespace eecore::cpu::EECORE_CAPABILITY {

void run_unpack_weight(const UnpackWeightParams& params, const Parallel& parallel) {
  const int64_t grain = parallel.bytes_per_range / (params.columns + 1) + 1;
  parallel_for(parallel, params.num_rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const RowPlace place = row_place(params.table[row]);
      unpack_row(params.packed + place.offset, place, params.out + row * params.out_stride);
    }
  });
}

}  // namespace eecore::cpu::EECORE_CAPABILITY
