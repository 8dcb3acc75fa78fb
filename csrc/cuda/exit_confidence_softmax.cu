// exit_confidence_softmax on CUDA: rows made ready where they must be, one pass over the LM head
// for each group of rows, and one small kernel that merges what the blocks know. There rows
// are placed too, and a few leave.
#include "eecore/exit_confidence_softmax.cuh"
#include "skinny_launch.cuh"

namespace eecore::cuda {
namespace {

constexpr int kTileRows = 16 * kHeadMTiles * kSkinnyWarps;
constexpr int64_t kLeavingRows = 2 * kSummaryLeavingWarps;  // that one block merges summaries of

// One block for each multiprocessor, whatever the rows.
int64_t num_blocks(const ExitConfidenceSoftmaxParams& params, int device) {
  return std::min(ceil_div(params.vocab_size, kTileRows),
                  resident_skinny_blocks(kHeadMTiles, device));
}

int64_t summary_bytes(const ExitConfidenceSoftmaxParams& params, int device) {
  return params.num_seqs * num_blocks(params, device) * int64_t{sizeof(LogitSummary)};
}

RowForm row_form(const ExitConfidenceSoftmaxParams& params) {
  return {params.hidden_size, params.dtype, params.lm_head_scale, params.lm_head_table};
}

bool makes_rows(const ExitConfidenceSoftmaxParams& params) {
  return needs_rows(row_form(params), params.hidden, params.hidden_stride, params.norm_weight);
}

template <typename T, typename W, int kNTiles>
void measure(const ExitConfidenceSoftmaxParams& params, LogitSummary* summaries, bool early_weight,
             Stream stream) {
  SkinnyPlan plan = make_plan<W>(params.lm_head, params.lm_head_stride, params.hidden_size);
  plan.early_weight = early_weight;
  plan.num_tiles = static_cast<int>(ceil_div(params.vocab_size, kTileRows));
  const int64_t blocks = num_blocks(params, stream.device);
  set_stages(plan, kHeadMTiles, blocks, kSkinnyWarps * 8 * kNTiles * int64_t{sizeof(LogitSummary)},
             stream.device);
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(ceil_div(params.num_seqs, 8 * kNTiles)));
  launch("exit_confidence_softmax", exit_confidence_softmax_kernel<T, kNTiles, W>,
         {grid, dim3(kSkinnyThreads), static_cast<size_t>(skinny_ring_bytes(plan, kHeadMTiles)),
          Launch::kAfterPrevious},
         stream, params, plan, summaries);
}

}  // namespace

// Summaries, then rows.
int64_t exit_confidence_softmax_workspace(const ExitConfidenceSoftmaxParams& params, int device) {
  const int64_t rows = makes_rows(params) ? params.num_seqs * row_form(params).padded_bytes() : 0;
  return summary_bytes(params, device) + rows;
}

void run_exit_confidence_softmax(const ExitConfidenceSoftmaxParams& params, Stream stream) {
  if (params.num_seqs == 0) {
    if (params.leave.all_gone != nullptr) run_exit_rows(params.leave, stream);
    return;
  }
  auto* summaries = static_cast<LogitSummary*>(params.workspace);
  dispatch_dtype(params.dtype, "exit_confidence_softmax", [&](auto tag) {
    using T = typename decltype(tag)::type;
    ExitConfidenceSoftmaxParams ready = params;
    if (makes_rows(params)) {
      make_rows<T>(row_form(params), params.num_seqs, params.norm_weight, params.eps,
                   static_cast<char*>(params.workspace) + summary_bytes(params, stream.device),
                   ready.hidden, ready.hidden_stride, stream);
    }
    dispatch_weight<T>(params.lm_head_scale, params.lm_head_table, [&](auto weight_tag) {
      using W = typename decltype(weight_tag)::type;
      dispatch_tokens<T, 8>(params.num_seqs, [&](auto n_tiles) {
        measure<T, W, n_tiles()>(ready, summaries, makes_rows(params), stream);
      });
    });
  });
  // Rows that one block gets done, it can also let leave; else that is a launch of its own.
  const bool leaves = params.leave.all_gone != nullptr;
  const bool in_one_block = leaves && params.num_seqs <= kLeavingRows;
  ExitConfidenceSoftmaxParams ending = params;
  if (!in_one_block) ending.leave = {};
  const int64_t warps = in_one_block ? kSummaryLeavingWarps : kSummaryWarps;
  const int64_t blocks = in_one_block ? 1 : ceil_div(params.num_seqs, warps);
  launch("exit_confidence_softmax", logit_summary_kernel,
         {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(32 * warps)), 0,
          Launch::kAfterPrevious},
         stream, ending, const_cast<const LogitSummary*>(summaries),
         static_cast<int>(num_blocks(params, stream.device)));
  if (leaves && !in_one_block) run_exit_rows(params.leave, stream);
}

}  // namespace eecore::cuda
