// The schemas of every op. Implementations register themselves in csrc/ops, once per backend.
#include <torch/csrc/stable/library.h>

#ifndef EECORE_NAMESPACE
#define EECORE_NAMESPACE eecore
#endif
#define EECORE_LIBRARY(space, module) STABLE_TORCH_LIBRARY(space, module)

EECORE_LIBRARY(EECORE_NAMESPACE, m) {
  m.def(
      "accept_mask(Tensor confidence, Tensor thresholds, int layer, Tensor(a!) status, "
      "Tensor(b!) exit_layer, Tensor(c!) survivors, Tensor(d!) num_survivors, "
      "Tensor(e!) all_accepted) -> ()");
  m.def(
      "begin_round(Tensor token_ids, Tensor start, Tensor tokens_left, Tensor max_drafts, "
      "Tensor page_table, int page_size, Tensor? sources, Tensor? next_token, "
      "Tensor? next_position, Tensor? next_left, Tensor? drafts, Tensor? num_given, "
      "Tensor(a!) first_position, Tensor(b!) left, "
      "Tensor(c!) round_slots, Tensor(d!) tokens, Tensor(e!) num_drafted, Tensor(f!) most, "
      "Tensor(g!) done, Tensor(h!) all_done, Tensor(i!) row, Tensor(j!) active_token_ids, "
      "Tensor(k!) positions, Tensor(l!) slot_mapping, Tensor(m!) seq_lens) -> ()");
  m.def(
      "append_drafts(Tensor? hidden, Tensor token, Tensor confidence, int step, "
      "Tensor thresholds, Tensor stop_tokens, Tensor most, Tensor round_slots, Tensor row, "
      "Tensor(a!)? states, Tensor(b!) tokens, Tensor(c!) confidences, Tensor(d!) num_drafted, "
      "Tensor(e!) done, Tensor(f!) all_done, Tensor(g!) active_token_ids, Tensor(h!) positions, "
      "Tensor(i!) slot_mapping, Tensor(j!) seq_lens) -> ()");
  m.def(
      "begin_verification(Tensor first_position, Tensor round_slots, Tensor tokens, "
      "Tensor num_drafted, Tensor most, Tensor(a!) last_tokens, Tensor(b!) last_positions, "
      "Tensor(c!) last_slots, Tensor(d!) last_seq_lens, Tensor(e!) token_ids, "
      "Tensor(f!) positions, Tensor(g!) slot_mapping, Tensor(h!) sequence, Tensor(i!) seq_lens, "
      "Tensor(j!) query_start_loc, Tensor(k!) num_tokens) -> ()");
  m.def(
      "gather_states(Tensor states, Tensor last, Tensor sequence, Tensor query_start_loc, "
      "Tensor num_tokens, Tensor(a!) out) -> ()");
  m.def(
      "accept_round(Tensor tokens, Tensor num_drafted, Tensor most, Tensor first_position, "
      "Tensor left, Tensor query_start_loc, Tensor target, Tensor(a!) next_token, "
      "Tensor(b!) next_position, Tensor(c!) next_left, Tensor(d!) num_accepted, "
      "Tensor? sampled, Tensor? draft_probs, Tensor? target_probs, Tensor? uniform, "
      "Tensor(e!)? last_row) -> ()");
  m.def(
      "compact_rows(Tensor leaving, Tensor(a!) row, Tensor(b!) positions, "
      "Tensor(c!) slot_mapping, Tensor(d!) seq_lens, Tensor(e!) page_table, "
      "Tensor(f!) num_active, Tensor(g!)? token_ids, Tensor(h!)? cross_page_table, "
      "Tensor(i!)? cross_seq_lens, Tensor(j!)? hidden) -> ()");
  m.def(
      "embed_tokens(Tensor token_ids, Tensor weight, Tensor? scale, Tensor? previous, "
      "Tensor? sources, Tensor(a!) out, Tensor? table=None) -> ()");
  m.def(
      "exit_rows(Tensor hidden, int layer, Tensor? confidence, Tensor? token, Tensor? top_logit, "
      "Tensor? logsumexp, Tensor? thresholds, Tensor? asked, bool decide, Tensor leave_after, "
      "Tensor together, Tensor fills, Tensor kind, Tensor(a!) accepted, Tensor(b!) gone, "
      "Tensor(c!) exit_layer, Tensor(d!) fill_from, Tensor(e!) measured_at, "
      "Tensor(f!) final_confidence, Tensor(g!) final_token, Tensor(h!) final_logprob, "
      "Tensor(i!) token_at, Tensor(j!) pending, Tensor(k!) final_hidden, Tensor(l!) all_gone, "
      "Tensor row, Tensor(m!) slot_mapping, Tensor(n!) seq_lens) -> ()");
  m.def(
      "place_head(Tensor confidence, Tensor token, Tensor logsumexp, Tensor top_logit, "
      "Tensor? index, Tensor? kind, int wanted, Tensor? measured_at, Tensor? exit_layer, "
      "bool as_probability, Tensor? vocabulary, Tensor(a!) out_token, "
      "Tensor(b!) out_confidence, Tensor(c!) out_logprob) -> ()");
  m.def(
      "select_rows(Tensor hidden, Tensor? row, Tensor? kind, int wanted, Tensor? thresholds, "
      "Tensor? accepted, Tensor(a!) index, Tensor(b!) count, Tensor(c!) states) -> ()");
  m.def(
      "exit_confidence_softmax(Tensor hidden, Tensor? norm_weight, Tensor lm_head, "
      "Tensor? lm_head_scale, float eps, "
      "Tensor(a!) confidence, Tensor(b!) token, Tensor(c!)? logsumexp, "
      "Tensor(d!)? top_logit, Tensor? lm_head_table=None) -> ()");
  m.def(
      "exit_confidence_cosine(Tensor previous, Tensor hidden, Tensor(a!) confidence, "
      "Tensor? thresholds=None, int layer=0, Tensor(b!)? status=None, "
      "Tensor(c!)? exit_layer=None, Tensor(d!)? survivors=None, "
      "Tensor(e!)? num_survivors=None, Tensor(f!)? all_accepted=None) -> ()");
  m.def(
      "exit_confidence_mlp(Tensor hidden, Tensor weight1, Tensor? bias1, Tensor? weight2, "
      "Tensor? bias2, Tensor(a!) confidence, Tensor? thresholds=None, int layer=0, "
      "Tensor(b!)? status=None, Tensor(c!)? exit_layer=None, Tensor(d!)? survivors=None, "
      "Tensor(e!)? num_survivors=None, Tensor(f!)? all_accepted=None) -> ()");
  m.def(
      "append_kv(Tensor(a!)? q, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, "
      "Tensor slot_mapping, Tensor? positions, Tensor? cos_sin, Tensor? q_norm_weight, "
      "Tensor? k_norm_weight, float eps) -> ()");
  m.def(
      "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, "
      "Tensor seq_lens, Tensor query_start_loc, Tensor(a!) out, float scale, bool causal, "
      "int sliding_window, int fixed_split_size, Tensor? position_bias=None, "
      "int max_distance=128, bool bidirectional=False, Tensor(b!)? arrivals=None) -> ()");
  m.def(
      "sample_tokens(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, "
      "Tensor repetition_penalty, Tensor seed, Tensor seen, Tensor? presence_penalty, "
      "Tensor? frequency_penalty, Tensor? generated, Tensor? bias_ids, Tensor? bias, "
      "Tensor? allowed, int purpose, Tensor positions, "
      "Tensor? index, Tensor? row, Tensor? kind, int wanted, Tensor? round_tokens, "
      "Tensor? first_position, bool as_probability, int probs_by_step, Tensor(a!) token, "
      "Tensor(b!) confidence, Tensor(c!) logprob, Tensor(d!) logsumexp, Tensor(e!)? probs, "
      "Tensor(f!)? uniform, Tensor(g!)? top_ids, Tensor(h!)? top_logprobs) -> ()");
  m.def(
      "kv_fill(Tensor hidden, Tensor exit_layer, Tensor norm_weight, Tensor kv_weight, "
      "Tensor? kv_bias, Tensor? kv_scale, Tensor? k_norm_weight, Tensor? positions, "
      "Tensor? cos_sin, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, float eps, "
      "Tensor? kv_table=None) -> ()");
  m.def(
      "skinny_linear(Tensor x, Tensor? norm_weight, float eps, Tensor weight, "
      "Tensor? weight_scale, Tensor? bias, Tensor? residual, Tensor(a!) out, "
      "str? activation=None, Tensor? weight_table=None, bool constant_weight=False) -> ()");
  m.def(
      "skinny_gated_linear(Tensor x, Tensor? norm_weight, float eps, Tensor weight, "
      "Tensor? weight_scale, Tensor? bias, Tensor(a!) out, str activation='silu', "
      "Tensor? weight_table=None, bool constant_weight=False) -> ()");
  m.def(
      "decoder_layers(Tensor hidden, Tensor attention_norm, Tensor qkv_weight, Tensor? qkv_bias, "
      "Tensor? qkv_scale, Tensor? q_norm, Tensor? k_norm, Tensor o_weight, Tensor? o_bias, "
      "Tensor? o_scale, Tensor mlp_norm, Tensor gate_up_weight, Tensor? gate_up_bias, "
      "Tensor? gate_up_scale, Tensor down_weight, Tensor? down_bias, Tensor? down_scale, "
      "Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, Tensor? positions, "
      "Tensor? cos_sin, Tensor page_table, Tensor seq_lens, Tensor query_start_loc, "
      "Tensor? sliding_window, Tensor? skip_attention, Tensor? skip_mlp, Tensor(c!) out, "
      "int begin_layer, int end_layer, float scale, float eps, int fixed_split_size, "
      "Tensor? cross_norm=None, Tensor? cross_q_weight=None, Tensor? cross_q_bias=None, "
      "Tensor? cross_q_scale=None, Tensor? cross_o_weight=None, Tensor? cross_o_bias=None, "
      "Tensor? cross_o_scale=None, Tensor? cross_page_table=None, "
      "Tensor? cross_seq_lens=None, Tensor? position_bias=None, int max_distance=128, "
      "str activation='silu', Tensor? qkv_table=None, Tensor? o_table=None, "
      "Tensor? gate_up_table=None, Tensor? down_table=None, Tensor? cross_q_table=None, "
      "Tensor? cross_o_table=None) -> ()");
  m.def(
      "pack_weight(Tensor blocks, str format, int offset, Tensor(a!) packed, Tensor(b!) table) "
      "-> ()");
  m.def("quantise_weight(Tensor weight, str format, Tensor(a!) blocks) -> ()");
  m.def("unpack_weight(Tensor packed, Tensor table, Tensor(a!) out) -> ()");
  m.def(
      "speculative_accept(Tensor draft_tokens, Tensor draft_start_loc, Tensor? target_tokens, "
      "Tensor? draft_probs, Tensor? target_probs, Tensor? uniform, Tensor(a!) num_accepted, "
      "Tensor(b!) next_token) -> ()");
}
