"""Attention of transformers' models by paged_attention, beside their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.masking_utils import create_causal_mask

import eecore
from eecore import RequestError
from eecore.integrations import transformers_attention
from eecore.integrations.transformers_attention import attend
from tiny_models import random_prompts, write_model

FAMILIES = ("llama", "llama_no_gqa", "llama_one_kv_head", "mistral", "qwen2_windows", "qwen3")


def loaded(directory: Path, attention: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=attention
    ).eval()


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    prompts, longest = random_prompts(*lengths, seed=2), max(lengths)
    rows = [[0] * (longest - len(each)) + each for each in prompts]
    mask = [[0] * (longest - len(each)) + [1] * len(each) for each in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(mask)}


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_states_and_answers_are_those_of_sdpa(tmp_path: Path, family: str) -> None:
    directory = write_model(tmp_path, family)
    own, ours = loaded(directory, "sdpa"), loaded(directory, eecore.register_attention())
    for lengths in ((1,), (17,), (5, 12, 1)):
        given = padded(*lengths)
        kept = given["attention_mask"].bool()
        expected, got = own(**given).logits[kept], ours(**given).logits[kept]
        torch.testing.assert_close(got, expected, atol=2e-4, rtol=1e-4)
        settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(ours.generate(**given, **settings), own.generate(**given, **settings))


def test_prompts_in_pieces(tmp_path: Path) -> None:
    """Several queries after keys that are in the cache already."""
    directory = write_model(tmp_path)
    ours = loaded(directory, eecore.register_attention())
    ids = torch.tensor(random_prompts(23))
    with torch.no_grad():
        whole = ours(ids).logits
        given, parts = dict[str, Any](), []
        for piece in ids.split(7, dim=1):
            out = ours(piece, **given, use_cache=True)
            name = "cache" if "cache" in out else "past_key_values"  # from transformers 5.24 on
            given = {name: out[name]}
            parts.append(out.logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=2e-4, rtol=1e-4)


# Masks

TEXT = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 16}
WINDOWS = {**GROUPED, "sliding_window": 7}
KINDS = ["sliding_attention", "full_attention"] * 2
BART = {
    "vocab_size": 97,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 1,
    "pad_token_id": 0,
}
GEMMA = {**WINDOWS, "query_pre_attn_scalar": 16, "layer_types": KINDS}
LLAMA4 = {**GROUPED, "intermediate_size_mlp": 96, "moe_layers": [], "num_local_experts": 2}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama_both_ways": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "is_causal": False}),
    "mistral": ("MistralForCausalLM", "MistralConfig", WINDOWS),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GEMMA, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", GEMMA),
    "gemma3_both_ways": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**GEMMA, "use_bidirectional_attention": True},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**LLAMA4, "attention_chunk_size": 5, "no_rope_layers": [1, 1, 0, 1]},
    ),
    "gpt_oss": ("GptOssForCausalLM", "GptOssConfig", {**WINDOWS, "num_local_experts": 2}),
    "bert": ("BertModel", "BertConfig", {**TEXT, "head_dim": 16}),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {**TEXT, "local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", BART),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 97, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4},
    ),
}
IDS = torch.tensor(random_prompts(24, 24, seed=3)) % 94 + 3
LEFT = torch.arange(24).expand(2, 24) >= torch.tensor([[7], [0]])
HOLES = (LEFT | (torch.arange(24) < 3)).long()
PACKED = torch.stack((torch.arange(24), torch.cat((torch.arange(10), torch.arange(14)))))
AT = torch.arange(24)


def states(model: PreTrainedModel, mask: torch.Tensor | None = None, **given: Any) -> torch.Tensor:
    """Logits or states at the tokens that a mask [batch_size, length] keeps."""
    mask = None if mask is None else mask.long()
    out = model(IDS, attention_mask=mask, use_cache=False, **given)
    found = out.logits if "logits" in out else out.last_hidden_state
    return found if mask is None else found[mask.bool()]


def packed(model: PreTrainedModel) -> torch.Tensor:
    return states(model, position_ids=PACKED)


def left(model: PreTrainedModel) -> torch.Tensor:
    return states(model, LEFT)


def right(model: PreTrainedModel) -> torch.Tensor:
    return states(model, LEFT.flip(1))


def holes(model: PreTrainedModel) -> torch.Tensor:
    return states(model, HOLES)


def own(seen: torch.Tensor) -> Callable[[PreTrainedModel], torch.Tensor]:
    """A mask of the caller, bool [24, 24]."""
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min).expand(2, 1, 24, 24)
    return lambda model: model(IDS, attention_mask=mask, use_cache=False).logits


def encoded(length: int) -> Callable[[PreTrainedModel], torch.Tensor]:
    return lambda model: model(IDS[:, :length], LEFT.flip(1)[:, :length], IDS[:, :17]).logits


def answers(model: PreTrainedModel) -> torch.Tensor:
    settings: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    return model.generate(IDS, attention_mask=LEFT.long(), pad_token_id=0, **settings).float()


prefix, blocks = own((AT < 9) | (AT[:, None] >= AT)), own(AT[:, None] // 8 == AT // 8)
striped = own((AT - AT[:, None]) % 2 == 0)


def random_model(name: str) -> PreTrainedModel:
    kind, config, fields = MODELS[name]
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**fields)).float().eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.mul_(4)
    return model


def tokens_in_blocks(model: PreTrainedModel) -> torch.Tensor:
    """Blocks of several tokens that see each other, as those of an image do."""
    some = torch.tensor([-1] * 5 + [0] * 4 + [-1] * 6 + [1] * 5 + [-1] * 4).expand(2, 24)
    mask = create_causal_mask(
        model.config, torch.zeros(2, 24, 64), None, None, block_sequence_ids=some
    )
    return model(IDS, attention_mask=mask, use_cache=False).logits


def striped_function(model: PreTrainedModel) -> torch.Tensor:
    def every_other(_batch: int, _head: int, query: Any, key: Any) -> Any:
        return (query - key) % 2 == 0

    inputs = torch.zeros(2, 24, 64)
    mask = create_causal_mask(model.config, inputs, None, None, and_mask_function=every_other)
    return model(IDS, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize(
    ("name", "run"),
    [
        *((name, run) for name in ("llama", "mistral", "gemma3") for run in (packed, right)),
        *(("llama", run) for run in (prefix, blocks, tokens_in_blocks)),
        ("mistral", prefix),
        *((name, right) for name in ("llama_both_ways", "gemma3_both_ways", "bert", "modernbert")),
        *((name, run) for name in ("gemma2", "llama4", "gemma3") for run in (left, answers)),
        *((name, states) for name in ("bert", "modernbert", "llama4")),
        *(("bart", run) for run in (encoded(24), encoded(9), answers)),
    ],
)
@torch.no_grad()
def test_masks_are_those_of_eager(
    name: str, run: Callable[[PreTrainedModel], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = random_model(name)
    model.set_attn_implementation("eager")
    expected = run(model)
    model.set_attn_implementation(eecore.register_attention())
    torch.testing.assert_close(run(model), expected, atol=5e-5, rtol=1e-4)
    monkeypatch.setattr(transformers_attention, "QUERIES", 5)  # masks in several pieces
    torch.testing.assert_close(run(model), expected, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "run", "message"),
    [
        ("llama", holes, "each query with eecore, got causal_mask_function and padding"),
        ("mistral", holes, "got sliding_window_overlay with causal_mask_function and padding"),
        ("bert", holes, "got bidirectional_mask_function and padding"),
        ("llama", striped, "got a mask of the caller with holes"),
        ("llama", striped_function, "got causal_mask_function with striped_function"),
        ("gpt_oss", states, "s_aux: expected none with attn_implementation='eecore'"),
        ("t5", encoded(9), "position_bias: expected none with attn_implementation='eecore'"),
    ],
)
@torch.no_grad()
def test_masks_that_the_kernel_cannot_have(
    name: str, run: Callable[[PreTrainedModel], torch.Tensor], message: str
) -> None:
    model = random_model(name)
    model.set_attn_implementation(eecore.register_attention())
    with pytest.raises(RequestError, match=message):
        run(model)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"s_aux": torch.ones(2)}, "s_aux"),
        ({"sinks": torch.ones(2)}, "sinks: expected none .* got a Tensor"),
        ({"position_bias": torch.ones(1, 2, 3, 3)}, "position_bias"),
        ({"dropout": 0.1}, "dropout: expected 0"),
        ({"output_attentions": True}, "output_attentions"),
        ({"attention_mask": torch.ones(1, 3) > 0}, r"expected \[1, 1, 3, 3\] .* got \[1, 3\]"),
        ({"attention_mask": torch.ones(1, 2, 3, 3)}, r"got \[1, 2, 3, 3\]"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, "other numbers to add to the scores"),
        (
            {"sliding_window": 2},
            "expected one for 3 causal queries of 3 keys with eecore, got None",
        ),
        ({"key": torch.ones(1, 2, 5, 16)}, r"value: expected \[1, 2, 5, 16\] with eecore"),
        (
            {"key": torch.ones(1, 2, 5, 16), "value": torch.ones(1, 2, 5, 16)},
            "attention_mask: expected one for 3 causal queries of 5 keys",
        ),
    ],
)
def test_what_the_kernel_lacks(asked: dict[str, Any], message: str) -> None:
    names = ("query", "key", "value")
    given = {"attention_mask": None, **{name: torch.randn(1, 2, 3, 16) for name in names}, **asked}
    with pytest.raises(RequestError, match=message):
        attend(torch.nn.Module(), **given)


def test_training_is_refused(tmp_path: Path) -> None:
    ours = loaded(write_model(tmp_path), eecore.register_attention())
    with pytest.raises(RequestError, match="has no gradients"):
        ours(torch.tensor([[1, 2, 3]]))
