// embed_tokens: rows of an embedding table, by tokens that are given or that an earlier step made.
#include "backend.h"
#include "index_checks.h"
#include "packed_check.h"

namespace eecore {
namespace {

void embed_tokens(const Tensor& token_ids, const Tensor& weight, const std::optional<Tensor>& scale,
                  const std::optional<Tensor>& previous, const std::optional<Tensor>& sources,
                  Tensor out, const std::optional<Tensor>& table, double multiplier) {
  Checker check("embed_tokens");
  check(token_ids, "token_ids", Accept::kInt64, {"num_tokens"});
  EmbedTokensParams params{};
  const WeightCoding coding =
      check_weight(check, {"weight", "scale", "table"}, weight, {"vocab_size", "hidden_size"},
                   scale, table, {"vocab_size"});
  params.scale = coding.scale;
  params.table = coding.table;
  check.all_or_none({{"previous", previous}, {"sources", sources}});
  const bool has_previous = check(previous, "previous", Accept::kInt64, {"num_previous"});
  check(sources, "sources", Accept::kInt32, {"num_tokens"});
  check.written(out, "out", Accept::kModel, {"num_tokens", "hidden_size"}, 1);
  if (table) require_blocks(check, "table", check["hidden_size"]);

  params.token_ids = data<const int64_t>(token_ids);
  params.previous = data_or_null<const int64_t>(previous);
  params.sources = data_or_null<const int32_t>(sources);
  params.weight = data<const void>(weight);
  params.out = data<void>(out);
  params.num_tokens = check["num_tokens"];
  params.hidden_size = check["hidden_size"];
  params.multiplier = static_cast<float>(multiplier);
  params.dtype = check.dtype();
  const int64_t element = size_of(params.dtype);
  params.row_bytes = params.hidden_size * element;
  params.weight_stride = weight.stride(0) * (scale.has_value() ? 1 : element);
  params.out_stride = out.stride(0) * element;
#ifndef EECORE_BACKEND_CUDA
  check_tokens(check, params, has_previous ? check["num_previous"] : 0, check["vocab_size"]);
#endif
  EECORE_RUN(embed_tokens, params, token_ids);
}

EECORE_OP(embed_tokens,
          "Tensor token_ids, Tensor weight, Tensor? scale, Tensor? previous, Tensor? sources, "
          "Tensor(a!) out, Tensor? table=None, float multiplier=1.")

}  // namespace
}  // namespace eecore
