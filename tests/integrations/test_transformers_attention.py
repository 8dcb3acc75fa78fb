"""Attention of transformers' models by paged_attention, beside their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import eecore
from eecore import RequestError, ops
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


@torch.no_grad()
def test_a_static_cache(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    own, ours = loaded(directory, "sdpa"), loaded(directory, eecore.register_attention())
    for lengths in ((9,), (9, 4)):
        given = padded(*lengths)
        settings: dict[str, Any] = {
            "max_new_tokens": 8,
            "do_sample": False,
            "pad_token_id": 0,
            "cache_implementation": "static",
            "disable_compile": True,
        }
        assert torch.equal(ours.generate(**given, **settings), own.generate(**given, **settings))


@torch.no_grad()
def test_bfloat16(tmp_path: Path) -> None:
    directory = write_model(tmp_path)
    given = padded(21, 8)
    kept = given["attention_mask"].bool()
    own = loaded(directory, "eager", torch.float32)(**given).logits[kept]
    got = loaded(directory, eecore.register_attention(), torch.bfloat16)(**given).logits[kept]
    assert (got.float() - own).abs().mean() < 0.05 * own.abs().mean()


@torch.no_grad()
def test_it_is_our_kernel_that_attends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded(write_model(tmp_path), "sdpa")
    kernel, shapes = ops.paged_attention, []

    def counted(q: torch.Tensor, *arguments: Any, **more: Any) -> torch.Tensor:
        shapes.append(tuple(q.shape))
        return kernel(q, *arguments, **more)

    monkeypatch.setattr(ops, "paged_attention", counted)
    model(torch.tensor([[1, 2, 3]]))
    assert shapes == []
    model.set_attn_implementation(eecore.register_attention())
    model(torch.tensor([[1, 2, 3]]))
    assert len(shapes) == 4  # layers


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


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"softcap": 30.0}, "softcap: expected none"),
        ({"s_aux": torch.ones(2)}, "s_aux"),
        ({"position_bias": torch.ones(1, 2, 3, 3)}, "position_bias"),
        ({"dropout": 0.1}, "dropout: expected 0"),
        ({"output_attentions": True}, "output_attentions"),
        ({"attention_mask": torch.ones(1, 1, 3, 3)}, r"attention_mask: expected \[batch_size"),
        ({"attention_mask": torch.tensor([[True, False, True]])}, "padding only on the left"),
    ],
)
def test_what_the_kernel_lacks(asked: dict[str, Any], message: str) -> None:
    states = torch.randn(1, 2, 3, 16)
    given = {"attention_mask": None, **asked}
    with pytest.raises(RequestError, match=message):
        attend(torch.nn.Module(), states, states, states, **given)


def test_training_is_refused(tmp_path: Path) -> None:
    ours = loaded(write_model(tmp_path), eecore.register_attention())
    with pytest.raises(RequestError, match="has no gradients"):
        ours(torch.tensor([[1, 2, 3]]))
