"""A request's output does not depend, to the last bit, on its batch or the cuts of its prompt.

Log-probabilities are compared: tokens alone would hide most differences.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import eecore
from devices import Traced, cpu_only, engine_of, load
from eecore import EngineConfig, Full, SamplingParams, SelfSpeculative
from eecore.exits import Exit
from tiny_models import random_prompts, scale_layers, write_model

pytestmark = [pytest.mark.usefixtures("one_thread"), cpu_only]

# Together far more rows than one tile of a product holds.
PROMPTS = random_prompts(*(1 + 7 * i % 61 for i in range(16)), seed=5)
MAX_TOKENS = 12
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "float32", "weights": "int8"},
    "int8-bfloat16": {"dtype": "bfloat16", "weights": "int8"},
}


@pytest.fixture(scope="module", params=FORMATS.values(), ids=FORMATS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """A model so wide that the order of sums matters; its last layers change little."""
    directory = write_model(
        tmp_path_factory.mktemp("company"),
        seed=4,
        hidden_size=256,
        intermediate_size=320,
        dtype=getattr(torch, request.param["dtype"]),
    )
    scale_layers(directory, {2: 0.2, 3: 0.1})
    return load(directory, kv_cache_tokens=4096, **request.param)


def outputs_of(
    model: eecore.Model,
    prompts: list[list[int]],
    policy: Exit | None = None,
    run: Traced | None = None,
    **config: int,
) -> list[tuple[list[int], Any, Any]]:
    """Tokens, their log-probabilities and those of the best four."""
    engine = engine_of(model, EngineConfig(kv_cache_tokens=8192, **config), run=run)
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=4)
    requests = [
        engine.add_request(prompt, sampling=sampling, exit=policy or Full()) for prompt in prompts
    ]
    done = {step.request_id: step.output for step in engine.run() if step.output is not None}
    found = [done[request] for request in requests]
    return [(output.token_ids, output.logprobs, output.top_logprobs) for output in found]


@pytest.fixture(scope="module")
def alone(model: eecore.Model) -> list[tuple[list[int], Any, Any]]:
    return [outputs_of(model, [prompt])[0] for prompt in PROMPTS]


def test_a_batch_is_its_requests(model: eecore.Model, alone: Any) -> None:
    assert outputs_of(model, PROMPTS) == alone


@pytest.mark.parametrize("most", [{"max_prefill_chunk": 7}, {"max_batch_tokens": 45}], ids=str)
def test_prompts_may_be_cut_anywhere(model: eecore.Model, alone: Any, most: dict[str, int]) -> None:
    assert outputs_of(model, PROMPTS, **most) == alone


@pytest.mark.parametrize("num_rows", [28, 56, 112, 224])
def test_speculation_is_full_decoding(model: eecore.Model, alone: Any, num_rows: int) -> None:
    """Verifications of 7 rows a request: 6 drafts and a token."""
    count = num_rows // 7
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
    traced = Traced()
    got = outputs_of(model, prompts, SelfSpeculative(2, 6), traced)
    assert max(call.num_tokens for call in traced.of("decoder_layers")) == num_rows
    assert got == [alone[i % len(PROMPTS)] for i in range(count)]
