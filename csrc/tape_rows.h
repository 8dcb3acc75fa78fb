// Which of an op's parameters count its rows: what a tape sets before it replays a call.
#pragma once

#include <array>
#include <cstdint>

#include "eecore/params.h"

namespace eecore {

// Null where there are fewer.
struct RowCounts {
  std::array<int64_t*, 4> tokens;
  std::array<int64_t*, 2> seqs;
  bool runs_empty = false;  // without tokens too: it writes how many there are
};

// An op without a line below cannot be recorded.
template <typename Params>
RowCounts row_counts(Params& params) = delete;

inline RowCounts row_counts(AcceptMaskParams& p) { return {{&p.num_seqs}, {}}; }
inline RowCounts row_counts(AcceptRoundParams& p) { return {{&p.num_rows}, {}}; }
inline RowCounts row_counts(AppendDraftsParams& p) { return {{&p.num_active}, {}, true}; }
inline RowCounts row_counts(AppendKvParams& p) { return {{&p.num_tokens}, {}}; }
inline RowCounts row_counts(BeginRoundParams& p) { return {{&p.num_rows}, {}, true}; }
inline RowCounts row_counts(BeginVerificationParams& p) { return {{&p.num_rows}, {}, true}; }
inline RowCounts row_counts(CompactRowsParams& p) { return {{&p.num_active}, {}}; }
inline RowCounts row_counts(DecoderLayersParams& p) {
  return {{&p.num_tokens, &p.append.num_tokens, &p.attend.num_tokens, &p.cross.num_tokens},
          {&p.attend.num_seqs, &p.cross.num_seqs}};
}
inline RowCounts row_counts(EmbedTokensParams& p) { return {{&p.num_tokens}, {}}; }
inline RowCounts row_counts(ExitConfidenceCosineParams& p) { return {{&p.num_seqs}, {}}; }
inline RowCounts row_counts(ExitConfidenceMlpParams& p) { return {{&p.num_seqs}, {}}; }
inline RowCounts row_counts(ExitConfidenceSoftmaxParams& p) { return {{&p.num_seqs}, {}}; }
inline RowCounts row_counts(ExitRowsParams& p) { return {{&p.num_active}, {&p.num_asked}, true}; }
inline RowCounts row_counts(GatherStatesParams& p) { return {{&p.max_tokens}, {&p.num_seqs}}; }
inline RowCounts row_counts(KvFillParams& p) { return {{&p.num_tokens}, {}}; }
inline RowCounts row_counts(PackWeightParams&) { return {}; }
inline RowCounts row_counts(PagedAttentionParams& p) { return {{&p.num_tokens}, {&p.num_seqs}}; }
inline RowCounts row_counts(PlaceHeadParams& p) { return {{&p.num_selected}, {}}; }
inline RowCounts row_counts(QuantiseWeightParams&) { return {}; }
inline RowCounts row_counts(SampleTokensParams& p) { return {{&p.num_rows}, {}}; }
inline RowCounts row_counts(SelectRowsParams& p) { return {{&p.num_active}, {}, true}; }
inline RowCounts row_counts(SkinnyGatedLinearParams& p) { return {{&p.num_tokens}, {}}; }
inline RowCounts row_counts(SkinnyLinearParams& p) { return {{&p.num_tokens}, {}}; }
inline RowCounts row_counts(SpeculativeAcceptParams&) { return {}; }
inline RowCounts row_counts(UnpackWeightParams&) { return {}; }

}  // namespace eecore
