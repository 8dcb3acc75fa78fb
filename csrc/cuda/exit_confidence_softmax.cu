// exit_confidence_softmax on CUDA: one pass over the LM head for each group of rows, except for
// groups whose results are unused, and one small kernel that merges the blocks' summaries. That
// kernel also places rows, and lets rows exit if they are few. Rows that must be made ready are
// made by each block or, if they are many, by an earlier kernel.
#include "eecore/exit_confidence_softmax.cuh"
#include "skinny_launch.cuh"

namespace eecore::cuda {
namespace {

// Tiles of 8 rows in a pass whose warps read x from memory themselves: one pass over 64 rows takes
// longer than two over 32 (615 us and 233, of 128,256 x 2,048 in bfloat16 on an H100).
constexpr int kHeadMaxTiles = 4;
constexpr int64_t kReservedBytes = 512;                     // of static shared memory
constexpr int64_t kExitingRows = 2 * kSummaryExitingWarps;  // rows whose summaries one block merges

// One block for each multiprocessor, however many rows there are.
int64_t num_blocks(const ExitConfidenceSoftmaxParams& params, int device) {
  return std::min(ceil_div(params.vocab_size, kHeadTileRows * kSkinnyWarps),
                  resident_skinny_blocks(kHeadMTiles, device));
}

int64_t summary_bytes(const ExitConfidenceSoftmaxParams& params, int device) {
  return params.num_seqs * num_blocks(params, device) * int64_t{sizeof(LogitSummary)};
}

// Runs the kernel whose blocks share ready rows of x, if there are more rows than a pass of the
// other kernel takes and shared memory has room for enough chunks of them together with those of
// the head; returns whether it did. Groups of rows come first in the grid, so that blocks that read
// the same rows of the head run together.
template <typename T>
bool measure_many(const ExitConfidenceSoftmaxParams& params, SkinnyPlan plan, HeadProduct product,
                  LogitSummary* summaries, Stream stream) {
  constexpr int64_t kEnoughStages = 3;
  const int64_t stage_bytes = kHeadMTiles * plan.stage_bytes + kManyStageBytes<T>;
  const int64_t room = static_cast<int64_t>(device_properties(stream.device).max_shared_bytes) -
                       kReservedBytes - head_summary_bytes(kManyTiles);
  const int64_t stages = std::min<int64_t>(room / stage_bytes, kSkinnyMaxStages);
  if (params.num_seqs <= 8 * kHeadMaxTiles || stages < kEnoughStages || !plan.aligned) return false;
  plan.num_stages = static_cast<int>(stages);
  const RowForm form = row_form(product);
  if (needs_rows(form, product.x, product.x_stride, product.norm_weight)) {
    make_rows<T>(form, product.num_tokens, product.norm_weight, product.eps, product.workspace,
                 product.x, product.x_stride, stream);
    product.constant_weight = true;  // the kernel that makes rows has waited for writes of the head
  }
  plan.early_weight = product.constant_weight;
  plan.num_blocks = Divisor::of(num_blocks(params, stream.device));
  ExitConfidenceSoftmaxParams given = params;
  given.hidden = product.x;
  given.hidden_stride = product.x_stride;
  const dim3 grid(static_cast<unsigned>(ceil_div(params.num_seqs, 8 * kManyTiles)),
                  static_cast<unsigned>(plan.num_blocks.value));
  launch("exit_confidence_softmax", exit_confidence_softmax_many_kernel<T>,
         {grid, dim3(kSkinnyThreads),
          static_cast<size_t>(stages * stage_bytes + head_summary_bytes(kManyTiles)),
          Launch::kAfterPrevious},
         stream, given, plan, summaries);
  return true;
}

template <typename T, typename W, int kNTiles>
void measure(const ExitConfidenceSoftmaxParams& params, Stream stream) {
  SkinnyPlan plan = make_plan<W>(params.lm_head, params.lm_head_stride, params.hidden_size);
  plan.num_tiles = static_cast<int>(ceil_div(params.vocab_size, kHeadTileRows));
  const int64_t blocks = num_blocks(params, stream.device);
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(ceil_div(params.num_seqs, 8 * kNTiles)));
  auto* const summaries = static_cast<LogitSummary*>(params.workspace);
  HeadProduct product = head_product(params);
  product.workspace = static_cast<char*>(params.workspace) + summary_bytes(params, stream.device);
  product.constant_weight = may_be_unwanted(params);  // the kernel itself has then waited
  if constexpr (kNTiles == kHeadMaxTiles && std::is_same_v<T, W> && sizeof(T) == 2) {
    if (measure_many<T>(params, plan, product, summaries, stream)) return;
  }
  with_ready_rows<T, W, kNTiles>(
      product, plan, kHeadMTiles, blocks, stream,
      [&](const HeadProduct& ready, const SkinnyPlan& whole_plan, size_t shared_bytes,
          auto makes_rows) {
        ExitConfidenceSoftmaxParams given = params;
        given.hidden = ready.x;
        given.hidden_stride = ready.x_stride;
        launch("exit_confidence_softmax",
               exit_confidence_softmax_kernel<T, kNTiles, makes_rows(), W>,
               {grid, dim3(kSkinnyThreads), shared_bytes, Launch::kAfterPrevious}, stream, given,
               whole_plan, summaries);
      },
      head_summary_bytes(kNTiles));
}

}  // namespace

// Summaries, then rows.
int64_t exit_confidence_softmax_workspace(const ExitConfidenceSoftmaxParams& params, int device) {
  return summary_bytes(params, device) + ready_rows_bytes(head_product(params));
}

void run_exit_confidence_softmax(const ExitConfidenceSoftmaxParams& params, Stream stream) {
  if (params.num_seqs == 0) {
    if (params.exit.all_exited != nullptr) run_exit_rows(params.exit, stream);
    return;
  }
  dispatch_product<kHeadMaxTiles>("exit_confidence_softmax", head_product(params),
                                  [&](auto tag, auto weight_tag, auto n_tiles) {
                                    using T = typename decltype(tag)::type;
                                    using W = typename decltype(weight_tag)::type;
                                    measure<T, W, n_tiles()>(params, stream);
                                  });
  // Rows that one block handles it also lets exit; else that is a separate launch.
  const bool lets_exit = params.exit.all_exited != nullptr;
  const bool in_one_block = lets_exit && params.num_seqs <= kExitingRows;
  const int64_t warps = in_one_block ? kSummaryExitingWarps : kSummaryWarps;
  const int64_t blocks = in_one_block ? 1 : ceil_div(params.num_seqs, warps);
  launch("exit_confidence_softmax", logit_summary_kernel,
         {dim3(static_cast<unsigned>(blocks)), dim3(static_cast<unsigned>(32 * warps)), 0,
          Launch::kAfterPrevious},
         stream, params, static_cast<const LogitSummary*>(params.workspace),
         static_cast<int>(num_blocks(params, stream.device)), in_one_block);
  if (lets_exit && !in_one_block) run_exit_rows(params.exit, stream);
}

}  // namespace eecore::cuda
