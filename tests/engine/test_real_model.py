"""SmolLM2-135M: the whole stack on a real model, against transformers and against itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import eecore
from eecore.exits import Exit
from real_prompts import real_prompts
from tiers import in_all


@pytest.fixture(scope="module")
def model(smollm2: Path) -> eecore.Model:
    return eecore.load(smollm2, dtype="float32", kv_cache_tokens=16384)


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert isinstance(loaded, torch.nn.Module)
    return loaded.eval()


def greedy_choices(oracle: torch.nn.Module, prompt: list[int], output: list[int]) -> list[int]:
    """What transformers' greedy decoding picks after each prefix of ``output``, in one pass.

    It equals ``output`` exactly when transformers generates ``output`` itself: by induction, the
    first difference would be the same in both.
    """
    with torch.inference_mode():
        logits = oracle(torch.tensor([prompt + output[:-1]])).logits[0]
    return logits[len(prompt) - 1 :].argmax(dim=-1).tolist()


def test_full_depth_greedy_tokens_equal_transformers(
    model: eecore.Model, oracle: torch.nn.Module
) -> None:
    prompts = real_prompts(3)
    outputs = eecore.generate(model, prompts, max_tokens=64, ignore_eos=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert len(output.token_ids) == 64
        choices = greedy_choices(oracle, output.prompt_token_ids, output.token_ids)
        assert output.token_ids == choices, prompt


MAX_TOKENS = 16
NUM_PROMPTS = 12  # more than there are seats
SKIPS = {"skip_attention": {12, 20}, "skip_mlp": {10, 14, 21}}


@pytest.fixture(scope="module")
def full_outputs(model: eecore.Model) -> list[list[int]]:
    outputs = eecore.generate(model, real_prompts(NUM_PROMPTS), max_tokens=MAX_TOKENS)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize(
    ("policy", "batch_size", "num_prompts", "max_tokens"),
    [
        (eecore.SelfSpeculative(24, 4), 8, NUM_PROMPTS, MAX_TOKENS),
        *in_all((eecore.SelfSpeculative(27, 2), 1, 6, 8)),
        *in_all(
            (eecore.SelfSpeculative(8, 2), 8, NUM_PROMPTS, MAX_TOKENS),
            (eecore.DraftAndVerify(**SKIPS, num_drafts=3, adaptive=False), 1, 6, 8),
            (eecore.DraftAndVerify(**SKIPS, num_drafts=5), 8, NUM_PROMPTS, MAX_TOKENS),
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exit) else str(value),
)
def test_speculation_gives_the_text_of_full_depth(
    model: eecore.Model,
    full_outputs: list[list[int]],
    policy: eecore.SelfSpeculative,
    batch_size: int,
    num_prompts: int,
    max_tokens: int,
) -> None:
    prompts = real_prompts(NUM_PROMPTS)[:num_prompts]
    engine = model.engine(eecore.EngineConfig(kv_cache_tokens=4096, max_num_seqs=batch_size))
    sampling = eecore.SamplingParams(max_tokens=max_tokens)
    names = [engine.add_request(p, exit=policy, sampling=sampling) for p in prompts]
    outputs = {s.request_id: s.output for s in engine.run() if s.output is not None}
    for name, prompt, expected in zip(names, prompts, full_outputs, strict=False):
        assert outputs[name].token_ids == expected[:max_tokens], prompt
    assert sum(o.stats.accepted for o in outputs.values()) > 0
    assert engine.pages.num_free == engine.pages.num_pages
