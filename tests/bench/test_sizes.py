"""Random files of real sizes: both engines can read them, and their work is counted once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import eecore
from bench.decode.random_files import (
    LFM2_350M,
    LLAMA_1B,
    LLAMA_8B,
    QWEN35_08B,
    WIDE,
    make_random_gguf,
    tensor_shapes,
)
from bench.decode.sizes import Work, verification

SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "head_dim": 64,
    "vocab_size": 640,
}
LLAMA = {**SMALL, "num_hidden_layers": 2, "num_key_value_heads": 2}
LFM2 = {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": [0, 2, 0, 2]}
QWEN35 = {
    **SMALL,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "delta_heads": 4,
    "delta_dim": 64,
}
SHAPES = {
    "tied": {**LLAMA_1B, **LLAMA},
    "own head": {**LLAMA_8B, **LLAMA},
    "lfm2": {**LFM2_350M, **LFM2},
    "qwen35": {**QWEN35_08B, **QWEN35},
}


@pytest.fixture(params=SHAPES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return SHAPES[request.param]


@pytest.mark.filterwarnings("ignore:.*tokenizer.ggml.model")
@pytest.mark.parametrize("matrices", ["Q4_K", "Q8_0"])
def test_a_random_file_runs(config: dict[str, Any], matrices: str, tmp_path: Path) -> None:
    file = make_random_gguf(tmp_path / "random.gguf", config, matrices)
    model = eecore.load(file, device="cpu", kv_cache_tokens=512, prefix_cache=False)
    (output,) = eecore.generate(model, [[3, 4, 5]], max_tokens=3, ignore_eos=True)
    assert len(output.token_ids) == 3
    assert model.config.vocab_size == 640
    assert verification(model, 1) > 0


def test_the_work_of_a_step_has_one_head(config: dict[str, Any], tmp_path: Path) -> None:
    work = Work.of(make_random_gguf(tmp_path / "random.gguf", config, "Q8_0"))
    shapes = tensor_shapes(config)
    layers = sum(math.prod(shape) for name, shape in shapes.items() if name not in WIDE)
    assert work.of_prompt == layers
    assert work.of_step == layers + math.prod(shapes["token_embd.weight"])
    assert work.num_bytes == pytest.approx(work.of_step * 34 / 32, rel=0.02)
