"""Values, and arguments that belong together: refusals that no schema says.

``test_op_refusals.py`` has the dtypes, shapes and strides of all tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from test_op_refusals import assert_refused
from torch import Tensor

import op_calls
from op_calls import Call

NAN, INF = float("nan"), float("inf")
# What takes an argument's place, of the tensor that a call has there, or a value.
Change = Callable[[Tensor, Call], Any]
Changes = dict[str, Any]


def with_last(tensor: Tensor, value: float) -> Tensor:
    """The tensor with another last number."""
    made = tensor.clone()
    made[tuple(size - 1 for size in made.shape)] = value
    return made


def last(value: float) -> Change:
    return lambda tensor, _: with_last(tensor, value)


def beyond(name: str, axis: int = 0) -> Change:
    """The tensor whose last number is the first that is no index of another one."""
    return lambda tensor, call: with_last(tensor, call.tensors[name].shape[axis])


def after_the_cache(tensor: Tensor, call: Call) -> Tensor:
    """Slots, the last one after the cache."""
    pages, page_size = call.tensors["k_cache"].shape[-4:-2]
    return with_last(tensor, pages * page_size)


def full(value: float) -> Change:
    return lambda tensor, _: torch.full_like(tensor, value)


def cut(size: int, axis: int = -1) -> Change:
    """The tensor with the first numbers along an axis."""
    return lambda tensor, _: tensor.narrow(axis, 0, size).contiguous()


def again(axis: int) -> Change:
    """The tensor nine times along an axis."""
    return lambda tensor, _: torch.cat([tensor] * 9, axis)


def zeros(*shape: int) -> Change:
    return lambda tensor, _: tensor.new_zeros(shape)


ONE = torch.ones(1)
# The changes, the error after the op's name, and arguments that the call also has, or has not
# ("-name").
Refused = tuple[tuple[Changes, str] | tuple[Changes, str, str], ...]
OF_CROSS = ("cross_q_weight", "cross_o_weight", "cross_page_table", "cross_seq_lens")
OF_PRODUCTS: Refused = (
    ({"eps": -1.0}, "eps: expected a number >= 0, got -1"),
    ({"activation": "tanh"}, "activation: expected .*, got tanh", "-k_cache"),
    ({"x": cut(0), "weight": cut(0)},
     "x: expected in_features >= 1, got 0", "-norm_weight -weight_scale -weight_table"),
    ({"weight_scale": ONE},
     "weight: expected int8 .* got (float32|bfloat16)", "-weight_scale -weight_table"),
    ({"weight_scale": None}, r"weight: expected .*, got int8", "weight_scale"),
    ({"weight_scale": ONE}, "weight_scale: expected None with weight_table, got", "weight_table"),
    ({"weight_table": last(-1)}, "weight_table: expected places that pack_weight wrote, got"),
    ({"weight": cut(64)}, "weight_table: expected rows within 64 packed bytes", "weight_table"),
)  # fmt: skip
REFUSED: dict[str, Refused] = {
    "accept_mask": (
        ({"layer": 0}, r"layer: expected a positive number .* got 0"),
    ),
    "accept_round": (
        ({"uniform": None}, "uniform: .*, got sampled, draft_probs, target_probs$", "uniform"),
        ({"uniform": full(1.0)}, r"uniform: expected numbers in \[0, 1\), got 1.0", "tokens"),
        ({"uniform": full(NAN)}, r"uniform: .* got -?nan", "tokens"),
        ({"num_drafted": beyond("tokens", 1)}, r"num_drafted: expected values in \[0, \d+\), got"),
        ({"query_start_loc": lambda t, _: t + 999},
         r"query_start_loc: .* below max_tokens=", "tokens"),
    ),
    "add_normed": (
        ({"eps": -1.0}, "eps: expected a number >= 0, got -1"),
    ),
    "append_drafts": (
        ({"step": 99}, r"step: expected 0..num_steps-1=\d, got 99"),
        ({"step": -1}, r"step: expected 0..num_steps-1=\d, got -1"),
        ({"states": None}, "states: expected all or none of hidden, states, got hidden$", "hidden"),
        ({"row": beyond("thresholds")}, r"row: expected values in \[0, \d+\), got \d+ at row"),
    ),
    "append_kv": (
        ({"slot_mapping": after_the_cache}, r"slot_mapping: expected values in \[-1, \d+\), got"),
        ({"slot_mapping": last(-2)}, r"slot_mapping: .* got -2 at row \d"),
        ({"positions": last(30)}, r"positions: expected values in \[0, 30\), got 30 at row"),
        ({"positions": last(-1)}, r"positions: .* got -1 at row \d"),
        ({"cos_sin": None}, r"cos_sin: expected float32 .* with positions, got None", "positions"),
        ({"cos_sin": cut(1)}, r"cos_sin: expected an even rotary_dim .* got 1"),
        ({"cos_sin": zeros(30, 514)}, r"cos_sin: expected an even rotary_dim .* got 514"),
        ({"key_scales": last(0)}, "key_scales: expected positive .* got 0.0* at"),
        ({"value_scales": last(-1)}, "value_scales: expected positive .* got -1.0* at"),
        ({"key_scales": last(NAN)}, "key_scales: expected positive .* got nan at"),
        ({"value_scales": last(INF)}, "value_scales: expected positive .* got inf at"),
        ({"v_cache": lambda t, _: t.float()},
         "v_cache: expected the dtype of k_cache, .* got float32", "key_scales"),
    ),
    "begin_round": (
        ({"num_given": None},
         "num_given: expected all or none of .*, got drafts$", "drafts -ahead_tokens"),
        ({"drafts": None},
         "drafts: expected all or none of .*, got num_given$", "num_given -ahead_tokens"),
        ({"drafts": None, "num_given": None},
         "ahead_tokens: .* with them, got no drafts", "ahead_tokens"),
        ({"num_ahead": None},
         "num_ahead: .*, got ahead_tokens, ahead_probabilities, thresholds$", "ahead_tokens"),
        ({"page_size": 0}, "page_size: expected a number of 1 to 2147483647, got 0"),
        ({"sources": beyond("next_token")},
         r"sources: expected values in \[-1, \d\), got \d at row"),
        ({"sources": None}, "sources: .*, got next_token, next_position, next_left$", "sources"),
        ({"page_table": cut(0)}, "page_table: expected max_pages >= 1, got 0"),
    ),
    "begin_verification": (
        ({"num_drafted": beyond("tokens", 1)}, r"num_drafted: expected values in \[0, \d+\), got"),
        ({name: cut(1) for name in ("token_ids", "positions", "slot_mapping", "sequence")},
         r"token_ids: expected at least num_rows \* \(num_steps \+ 1\)=\d+ rows, got 1", "tokens"),
    ),
    "compact_rows": (
        ({"row": beyond("done")}, r"row: expected values in \[0, \d+\), got"),
    ),
    "decoder_layers": (
        ({"slot_mapping": after_the_cache}, r"slot_mapping: expected values in \[-1, \d+\), got"),
        ({"positions": last(30)}, r"positions: expected values in \[0, 30\), got 30"),
        ({"cos_sin": None}, r"cos_sin: expected float32 .* with positions, got None", "positions"),
        ({"cos_sin": zeros(30, 66)},
         "cos_sin: expected an even rotary_dim of at most", "-layer_ropes"),
        ({"layer_ropes": last(2)}, r"layer_ropes: expected values in \[0, 2\), got 2"),
        ({"page_table": cut(0)}, r"seq_lens: expected values in \[0, max_pages"),
        ({"seq_lens": last(9999)}, r"seq_lens: expected values in .* got 9999"),
        ({"query_start_loc": last(99)}, r"query_start_loc: .* end at num_tokens"),
        ({"sliding_window": last(-1)}, r"sliding_window: .* -1 for layer \d"),
        ({"begin_layer": -1}, r"begin_layer, end_layer: expected 0 <= .* got -1 and"),
        ({"begin_layer": 2, "end_layer": 1}, r"begin_layer, end_layer: .* got 2 and 1"),
        ({"end_layer": 9}, r"begin_layer, end_layer: expected .*, got \d and 9"),
        ({"eps": -1.0}, r"eps: expected a number >= 0, got -1"),
        ({"soft_cap": -1.0}, r"soft_cap: expected a number >= 0, got -1"),
        ({"fixed_split_size": -1}, r"fixed_split_size: expected 0 or more keys, got -1"),
        ({"activation": "gelu"}, "activation: expected silu or gelu_tanh or relu, got gelu"),
        ({"position_bias": cut(1, 0)}, r"position_bias: expected 2 to 128 buckets .* got 1"),
        ({"max_distance": 2}, r"max_distance: .* got 2", "position_bias"),
        ({"qkv_scale": ONE}, r"qkv_weight: expected int8 .* got float32", "-qkv_scale -qkv_table"),
        ({"o_scale": None}, r"o_weight: expected float32 .* got int8", "o_scale"),
        ({"cross_norm": None},
         "cross_q_weight: expected None without cross_norm, got a ten", "cross_norm"),
        *(({name: None}, f"{name}: expected a tensor with cross_norm, got None", name)
          for name in OF_CROSS),
        ({"cross_seq_lens": last(9999)}, "cross_seq_lens: .* got 9999"),
    ),
    "embed_tokens": (
        ({"token_ids": beyond("weight")},
         r"token_ids: expected tokens in \[-1, .*, got \d+ for row", "-sources -table"),
        ({"token_ids": last(-2)}, "token_ids: expected tokens .* got -2 for row", "-sources"),
        ({"previous": zeros(1), "sources": last(1)}, r"sources: expected values in \[-1, 1\)"),
        ({"previous": full(-7)}, "previous: expected tokens .* got -7", "sources"),
        ({"sources": None}, "sources: expected all or none of .*, got previous$", "previous"),
        ({"previous": None}, "previous: expected all or none of .*, got sources$", "sources"),
        ({"scale": ONE}, "weight: expected int8 .* got (float32|bfloat16)", "-scale -table"),
        ({"scale": None}, "weight: expected .* got int8", "scale"),
    ),
    "exit_confidence_cosine": (
        ({"status": None}, "status: .* got thresholds, exit_layer", "status"),
        ({"layer": 0}, "layer: .* got 0", "status"),
    ),
    "exit_confidence_mlp": (
        ({"layer": 0}, "layer: .* got 0", "status"),
        ({"weight2": None},
         r"weight1: expected inner_size=2 without weight2 .* got", "weight2 -bias2"),
        ({"bias2": torch.zeros(2)}, "bias2: expected only together", "-weight2"),
        ({"weight1": cut(0, 0), "weight2": cut(0)}, "weight1: e.* >= 1", "-bias1"),
    ),
    "exit_confidence_softmax": (
        ({"lm_head": cut(1, 0)},
         "lm_head: expected vocab_size of 2 to .* got 1", "-lm_head_scale -lm_head_table"),
        ({"eps": -1.0}, r"eps: expected a number >= 0, got -1"),
        ({"eps": NAN}, r"eps: expected a number >= 0, got nan"),
        ({"hidden": cut(0), "lm_head": cut(0)},
         "hidden: expected hidden_size >= 1, got 0", "-norm_weight -lm_head_scale -lm_head_table"),
    ),
    "exit_rows": (
        ({"layer": 0}, "layer: expected a positive number .* got 0"),
        ({"thresholds": None},
         r"thresholds: expected float32 \[num_rows\] with a confidence", "confidence"),
        ({"asked": beyond("row")}, r"asked: expected values in \[0, \d+\), got", "confidence"),
        ({"row": beyond("exited")}, r"row: expected values in \[0, \d+\), got"),
        ({"condition": 3, "decide": True}, "condition: expected None on the CPU, got 3"),
        ({"condition": 3, "decide": False}, "condition: expected None with decide=False, got one"),
        ({"lm_head": ONE}, "previous: expected one of .* got previous, lm_head$", "previous"),
        ({"top_logit": None},
         "top_logit: expected all or none of token, .*, got token, logsumexp", "token"),
        ({"confidence": None},
         "confidence: expected one with token, top_logit and logsumexp, got", "token"),
        ({"confidence": None}, "confidence: expected one .* got None", "previous"),
        ({"bias1": ONE},
         "weight1: expected one with bias1, weight2 or bias2, got None", "-weight1"),
        ({"norm_weight": ONE}, "lm_head: expected one with norm_weight, .* got None", "-lm_head"),
        ({"token": None, "top_logit": None, "logsumexp": None},
         "token: expected token, top_logit and", "lm_head"),
        ({"weight2": None}, "weight1: expected inner_size=2 without weight2", "weight2 -bias2"),
        ({"eps": -1.0}, "eps: expected a number >= 0, got -1", "lm_head"),
        ({"asked": torch.zeros(1).int()},
         "confidence: expected one of all active rows, to be measured here, got one of",
         "previous"),
    ),
    "gated_delta": (
        ({"states": lambda t, _: torch.full_like(t, 999)},
         "states: expected 0 for none, or a number up to .*, got 999", "out"),
        ({"states": full(-1)}, "states: expected 0 for none, or a number up to .*, got -1", "out"),
        ({"seq_lens": full(0)}, r"seq_lens: expected at least the \d+ rows, got 0 for", "out"),
        ({"query_start_loc": last(999)}, "query_start_loc: expected to end at num_tokens=", "out"),
        ({"query_start_loc": lambda t, _: t + 1}, "query_start_loc: expected to start at 0", "out"),
        ({"exit_layer": None}, "exit_layer: expected a tensor without out, got None", "exit_layer"),
        ({"rows": cut(15, 1)}, "rows: expected num_kept >= 16, got 15"),
        ({"taps": cut(0, 0)}, "taps: expected 1 to 8 taps, got 0"),
        ({"taps": lambda t, _: t.new_zeros(9, t.shape[1])}, "taps: expected 1 to 8 taps, got 9"),
        ({"eps": -1.0}, "eps: expected a number >= 0, got -1"),
    ),
    "gather_states": (
        ({"query_start_loc": last(99)},
         r"query_start_loc: expected values in .*, got 99 at row", "states"),
        ({"query_start_loc": lambda t, _: t.flip(0)},
         r"query_start_loc: expected 0..num_steps\+1=\d rows of .* got -\d+ of", "states"),
    ),
    "kv_fill": (
        ({"exit_layer": last(-1)}, r"exit_layer: expected values in \[0, 2147483648\), got -1"),
        ({"slot_mapping": after_the_cache}, r"slot_mapping: expected values in \[-1, \d+\), got"),
        ({"slot_mapping": last(-2)}, r"slot_mapping: expected values in \[-1, \d+\), got -2"),
        ({"positions": last(30)}, r"positions: expected values in \[0, 30\), got 30"),
        ({"positions": None}, r"positions: expected all or none of .*, got cos_sin$", "positions"),
        ({"cos_sin": None},
         r"cos_sin: expected all or none of positions, cos_sin, got positions$",
         "positions -layer_ropes"),
        ({"cos_sin": cut(1)}, r"cos_sin: expected an even rotary_dim of at most head_d"),
        ({"eps": -1.0}, r"eps: expected a number >= 0, got -1"),
        ({"loop_slots": 1}, "layer_numbers: .* None with loop_slots, got a", "layer_numbers"),
    ),
    "pack_weight": (
        ({"blocks": cut(1)}, r"blocks: expected rows of whole blocks of \d+ bytes"),
        ({"blocks": cut(0)}, r"blocks: expected rows of whole blocks of \d+ bytes"),
        ({"format": "Q8_K"}, r"format: expected one of Q4_0, Q4_1, .*, MXFP4, got Q8_K"),
        ({"offset": 32}, r"offset: expected a multiple of 64 from 0 on, got 32"),
        ({"offset": -64}, r"offset: expected a multiple of 64 from 0 on, got -64"),
        ({"packed": cut(1)},
         r"packed: expected \d+ bytes from offset \d+ on, got 1 in all", "blocks"),
    ),
    "paged_attention": (
        ({"page_table": full(-1)}, r"page_table: .* column \d+, got -1 for sequence", "q k_cache"),
        ({"page_table": full(999)},
         r"page_table: .*num_pages=\d+\) .*, got 999 for sequence", "q k_cache"),
        (dict.fromkeys(("k_cache", "v_cache"), again(2)),
         "q: expected num_q_heads a multiple of num_kv_heads=", "q -key_scales -value_scales"),
        (dict.fromkeys(("q", "k_cache", "v_cache", "out"), cut(4)),
         "q: expected head_dim a multiple .* got 4"),
        ({"seq_lens": last(9999)}, r"seq_lens: .*page_size=\d+\], got 9999 for sequence"),
        ({"seq_lens": last(-1)}, r"seq_lens: .* got -1 for sequence"),
        ({"query_start_loc": last(999)}, r"query_start_loc: .*=\d+, got 999"),
        ({"sliding_window": -1}, r"sliding_window: expected 0 or more keys, got -1"),
        ({"fixed_split_size": -1}, r"fixed_split_size: expected 0 or more keys, got -1"),
        ({"soft_cap": -1.0}, r"soft_cap: expected a number >= 0, got -1"),
        ({"position_bias": cut(1, 0)}, r"position_bias: expected 2 to 128 buckets .* got 1"),
        ({"position_bias": lambda t, _: t.new_zeros(129, t.shape[1])},
         r"position_bias: expected 2 to 128 .* got 129"),
        ({"position_bias": cut(3, 0), "bidirectional": True},
         "position_bias: expected an even num_buck"),
        ({"max_distance": 1},
         r"max_distance: expected more than \d+, half .* got 1", "position_bias"),
        ({"max_distance": 2**30 + 1},
         r"max_distance: .* at most 1073741824, got 1073741825", "position_bias"),
    ),
    "place_head": (
        ({"index": beyond("out_token")}, r"index: expected values in \[0, \d+\), got"),
        ({"wanted": -(1 << 40)}, "wanted: expected a kind of 32 bits", "kind"),
        ({"vocabulary": cut(1), "token": last(5)},
         r"token: expected values in \[-1, 1\), got", "-lm_head"),
        ({"exit_layer": None},
         "exit_layer: expected all or none of .* got measured_at$", "exit_layer"),
        ({"measured_at": None},
         "measured_at: expected all or none of .* got exit_layer$", "measured_at"),
        ({"hidden": ONE},
         "lm_head: expected all or none of hidden, lm_head, got hidden$", "-hidden"),
        ({"lm_head": ONE},
         "hidden: expected all or none of hidden, lm_head, got lm_head$", "-lm_head"),
        ({"norm_weight": ONE}, "lm_head: expected one with norm_weight, .* got None", "-lm_head"),
        ({name: cut(0) for name in ("out_token", "out_confidence", "out_logprob")},
         r"token: expected at most num_rows=0 rows .* got \d+", "token -index -kind -measured_at"),
    ),
    "quantise_weight": (
        ({"weight": cut(31)}, r"weight: expected rows of whole blocks of 32 columns, "),
        ({"weight": cut(0)}, r"weight: expected rows of whole blocks of 32 columns, "),
        ({"format": "Q4_K"}, r"format: expected one of Q4_1, Q5_1, Q8_0, got Q4_K"),
        ({"blocks": cut(1)}, r"blocks: expected rows of \d+ bytes, got 1"),
    ),
    "sample_tokens": (
        ({"bias": None}, "bias: expected all or none of bias_ids, bias, got bias_ids$", "bias"),
        ({"allowed": again(2)}, r"allowed: expected num_words=\d+, got"),
        ({"purpose": -1}, r"purpose: expected a number in \[0, 4294967295\], got -1"),
        ({"purpose": 2**32}, "purpose: .* got 4294967296"),
        ({"index": beyond("token")}, r"index: .*\[0, \d+\), got \d+ at row"),
        ({"row": last(-1)}, r"row: .*\[0, \d+\), got -1 at row"),
        ({"logits": again(0)},
         r"positions: expected num_outputs >= num_rows=\d+ without index, got", "-index"),
        ({"first_position": None},
         "first_position: expected it with round_tokens .* got none", "round_tokens -allowed"),
        ({"probs_by_step": -1},
         "probs_by_step: expected a number of 0 to 2147483647, got -1", "first_position"),
        ({"probs_by_step": 999}, r"probs: expected num_probs >= \d+, got", "probs first_position"),
        ({"allowed": again(1)},
         r"allowed: expected num_masks=1 without first_position, got 9", "-first_position"),
        (dict.fromkeys(("positions", "token", "confidence", "logprob", "logsumexp"), again(0)),
         r"temperature: expected num_requests >= num_outputs=\d+ without row, got",
         "-row -uniform -top_ids -probs"),
        ({"top_ids": None}, "top_ids: expected all or none of .*, got top_logprobs$", "top_ids"),
    ),
    "select_rows": (
        ({"row": beyond("accepted")}, r"row: expected values in \[0, \d+\), got", "accepted"),
        ({"wanted": 1 << 40}, "wanted: expected a kind of 32 bits", "kind"),
    ),
    "short_conv": (
        ({"slot_mapping": last(-2)}, r"slot_mapping: expected values in \[-1, \d+\), got -2"),
        ({"slot_mapping": last(999)}, r"slot_mapping: expected values in \[-1, \d+\), got 999"),
        ({"exit_layer": None}, "exit_layer: expected a tensor without out, got None", "exit_layer"),
        ({"weight": None}, "weight: expected all or none of .*, got out, page_table", "weight"),
        ({"weight": lambda t, _: t.new_zeros(9, t.shape[1])}, "weight: .* 1 to 8 taps, got 9"),
        ({"weight": cut(0, 0)}, "weight: expected 1 to 8 taps, got 0"),
        ({"state": lambda t, _: t.to(torch.float8_e4m3fn)},
         "state: expected the model's dtype or bfloat16, got float8_e4m3fn"),
        ({"seq_lens": last(999)}, "seq_lens: expected values in .*, got 999", "seq_lens"),
        ({"page_table": full(-1)}, "page_table: expected entries in .*, got -1", "seq_lens"),
    ),
    "skinny_gated_linear": (
        *OF_PRODUCTS,
    ),
    "skinny_linear": (
        *OF_PRODUCTS,
        ({"k_cache": None},
         "k_cache: expected all or none of .*, got v_cache, slot_mapping$", "k_cache"),
        ({"k_cache": None, "v_cache": None, "slot_mapping": None},
         "positions: expected None without k_cache", "positions"),
        ({"slot_mapping": after_the_cache}, r"slot_mapping: expected .* \[-1, \d+\), got"),
        ({"positions": last(30)}, r"positions: expected values in \[0, 30\), got 30"),
        ({"cos_sin": None}, "cos_sin: expected float32 .* with positions, got None", "positions"),
        ({"residual": lambda _, call: call.arguments["out"].clone()},
         "residual: expected None with k_cache, got a tensor", "k_cache -residual"),
        ({"activation": "relu"}, "activation: expected None with k_cache, got relu", "k_cache"),
    ),
    "speculative_accept": (
        ({"draft_tokens": beyond("draft_probs", 1)},
         r"draft_tokens: .*vocab_size=\d+\), got \d+ at draft", "uniform"),
        ({"draft_tokens": last(-1)}, "draft_tokens: .* got -1 at draft", "uniform"),
        ({"draft_start_loc": last(999)},
         r"draft_start_loc: .*=\d+, got 999|draft_start_loc: .* before"),
        ({"draft_start_loc": lambda t, _: t + 1}, "draft_start_loc: .* at 0, got 1"),
        ({"draft_start_loc": cut(0)}, r"draft_start_loc: .* got int32 \[0\]"),
        ({"uniform": last(1.0)}, r"uniform: expected numbers in \[0, 1\), got 1.0"),
        ({"uniform": last(NAN)}, r"uniform: .* got -?nan at row"),
        ({"uniform": None},
         r"target_tokens: .*\(sampling\), got draft_probs target_probs", "uniform"),
        ({"target_tokens": torch.zeros(5).long()},
         r"target_tokens: .* alone \(greedy\)", "uniform"),
        ({"target_tokens": None}, "target_tokens: .* got none of them", "target_tokens"),
        ({"draft_probs": cut(0), "target_probs": cut(0)},
         "target_probs: expected vocab_size >= 1, got 0"),
    ),
    "unpack_weight": (
        ({"table": last(-1)}, "table: expected places that pack_weight wrote, got -1"),
        ({"packed": cut(64)},
         "table: expected rows within 64 packed bytes, got .* ends at", "table"),
        ({"out": cut(31)}, r"table: expected rows of 31 columns", "table"),
    ),
}  # fmt: skip


def call_for(op: str, changes: Changes, given: str) -> Call:
    """A call of the op that has the tensors which are changed, with numbers in them."""
    names = given.split()
    unwanted = {name[1:] for name in names if name.startswith("-")}
    wanted = {name for name, change in changes.items() if callable(change)} - unwanted
    wanted |= {name for name in names if not name.startswith("-")}
    for seed in range(400):
        call = op_calls.random_call(op, Random(seed))
        has = {name for name, tensor in call.tensors.items() if tensor.numel() > 0}
        if wanted <= has and not unwanted & call.tensors.keys():
            return call
    raise AssertionError(f"no call of {op} with {wanted} and without {unwanted}")


@pytest.mark.parametrize("op", REFUSED)
def test_it_is_named_and_nothing_is_written(op: str) -> None:
    for changes, message, *given in REFUSED[op]:
        call = call_for(op, changes, " ".join(given))
        call.arguments |= {
            name: change(call.arguments.get(name), call) if callable(change) else change
            for name, change in changes.items()
        }
        assert_refused(call, f"^{op}: {message}")
