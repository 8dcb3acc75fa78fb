// gated_delta: a gated delta rule whose state stays with the text.
#include "backend.h"
#include "index_checks.h"

namespace eecore {
namespace {

void gated_delta(const Tensor& qkvz, const Tensor& ba, Tensor state, Tensor rows, Tensor applied,
                 const Tensor& states, const Tensor& taps, const Tensor& log_rate,
                 const Tensor& dt_bias, const Tensor& norm, const Tensor& seq_lens,
                 const Tensor& query_start_loc, const std::optional<Tensor>& slot_mapping,
                 const std::optional<Tensor>& exit_layer, int64_t layer, bool has_tiled_heads,
                 double eps, std::optional<Tensor> out) {
  Checker check("gated_delta");
  check.written(state, "state", Accept::kFloat32,
                {"num_states", "num_value_heads", "num_tiles", "key_dim", kDeltaTile});
  check.written(applied, "applied", Accept::kInt32, {"num_states", "num_key_heads"});
  check(norm, "norm", Accept::kModel, {"value_dim"});
  check(log_rate, "log_rate", Accept::kFloat32, {"num_value_heads"});
  check(dt_bias, "dt_bias", Accept::kFloat32, {"num_value_heads"});
  const int64_t key_dim = check["key_dim"], value_dim = check["value_dim"];
  const int64_t key_heads = check["num_key_heads"], value_heads = check["num_value_heads"];
  check.require(1 <= key_dim && key_dim <= kMaxDeltaDim, "state: expected key_dim in [1, ",
                kMaxDeltaDim, "], got ", key_dim);
  check.require(1 <= value_dim && value_dim <= kMaxDeltaDim, "norm: expected value_dim in [1, ",
                kMaxDeltaDim, "], got ", value_dim);
  const int64_t num_tiles = (value_dim + kDeltaTile - 1) / kDeltaTile;
  check.require(check["num_tiles"] == num_tiles, "state: expected ", num_tiles,
                " tiles for value_dim=", value_dim, ", got ", check["num_tiles"]);
  check.require(key_heads >= 1 && value_heads % key_heads == 0,
                "state: expected num_value_heads a multiple of num_key_heads=", key_heads, ", got ",
                value_heads);
  const int64_t conv_size = 2 * key_heads * key_dim + value_heads * value_dim;
  check(qkvz, "qkvz", Accept::kModel, {"num_tokens", conv_size + value_heads * value_dim}, 1);
  check(ba, "ba", Accept::kModel, {"num_tokens", 2 * value_heads}, 1);
  check.written(rows, "rows", Accept::kModel,
                {"num_states", "num_kept", conv_size + 2 * value_heads});
  check(states, "states", Accept::kInt32, {"num_seqs", 2}, 1);
  check(taps, "taps", Accept::kModel, {"num_taps", conv_size});
  check.require(check["num_taps"] >= 1 && check["num_taps"] <= kMaxDeltaTaps,
                "taps: expected 1 to ", kMaxDeltaTaps, " taps, got ", check["num_taps"]);
  check.require(check["num_kept"] >= 2 * kMaxDeltaTaps,
                "rows: expected num_kept >= ", 2 * kMaxDeltaTaps, ", got ", check["num_kept"]);
  check(seq_lens, "seq_lens", Accept::kInt32, {"num_seqs"});
  check(query_start_loc, "query_start_loc", Accept::kInt32, {check["num_seqs"] + 1});
  check(slot_mapping, "slot_mapping", Accept::kInt64, {"num_tokens"});
  check(exit_layer, "exit_layer", Accept::kInt32, {"num_tokens"});
  check.written(out, "out", Accept::kModel, {"num_tokens", value_heads * value_dim}, 1);
  check.require(out.has_value() != exit_layer.has_value(), "exit_layer: expected ",
                out ? "None with out, got a tensor" : "a tensor without out, got None");
  check.require(eps >= 0, "eps: expected a number >= 0, got ", eps);

  GatedDeltaParams params{};
  params.qkvz = data<const void>(qkvz);
  params.ba = data<const void>(ba);
  params.state = data<float>(state);
  params.rows = data<void>(rows);
  params.applied = data<int32_t>(applied);
  params.states = data<const int32_t>(states);
  params.taps = data<const void>(taps);
  params.log_rate = data<const float>(log_rate);
  params.dt_bias = data<const float>(dt_bias);
  params.norm = data<const void>(norm);
  params.seq_lens = data<const int32_t>(seq_lens);
  params.query_start_loc = data<const int32_t>(query_start_loc);
  params.slot_mapping = data_or_null<const int64_t>(slot_mapping);
  params.exit_layer = data_or_null<const int32_t>(exit_layer);
  params.out = data_or_null(out);
  params.num_tokens = check["num_tokens"];
  params.num_seqs = check["num_seqs"];
  params.num_key_heads = key_heads;
  params.num_value_heads = value_heads;
  params.key_dim = key_dim;
  params.value_dim = value_dim;
  params.num_taps = check["num_taps"];
  params.num_kept = check["num_kept"];
  params.qkvz_stride = qkvz.stride(0);
  params.ba_stride = ba.stride(0);
  params.states_stride = states.stride(0);
  params.out_stride = out ? out->stride(0) : 0;
  params.layer = layer;
  params.has_tiled_heads = has_tiled_heads;
  params.eps = static_cast<float>(eps);
  params.dtype = check.dtype();
#ifndef EECORE_BACKEND_CUDA
  check_texts(check, params, check["num_states"]);
#endif
  EECORE_RUN(gated_delta, params, qkvz);
}

EECORE_OP(gated_delta,
          "Tensor qkvz, Tensor ba, Tensor(a!) state, Tensor(b!) rows, Tensor(c!) applied, "
          "Tensor states, Tensor taps, Tensor log_rate, Tensor dt_bias, Tensor norm, "
          "Tensor seq_lens, Tensor query_start_loc, Tensor? slot_mapping, Tensor? exit_layer, "
          "int layer, bool has_tiled_heads, float eps, Tensor(d!)? out")

}  // namespace
}  // namespace eecore
