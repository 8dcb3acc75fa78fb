"""Models with int8 weights on the CUDA path give the tokens of the weights as floats."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cuda_path import POLICIES, PROMPTS, modes_of_coded_weights

import eecore
import emulated
from devices import as_on_cuda, heads_in_floats
from eecore import SamplingParams
from eecore.models.int8 import dequantise_rows, quantise_rows
from eecore.models.linear import MAX_SKINNY_ROWS
from eecore.models.readers import stored_weights
from head_packs import write_pack
from tiers import CUDA_BACKENDS, in_all
from tiny_models import write_model
from tiny_t5 import write_t5

pytestmark = pytest.mark.usefixtures("one_thread")


def rounded(directory: Path, into: Path) -> Path:
    """The model with linear layers rounded as int8, and the embeddings if they are tied."""
    shutil.copytree(directory, into)
    tensors = load_file(directory / "model.safetensors")
    untied = {"model.embed_tokens.weight", "shared.weight"} if "lm_head.weight" in tensors else {}
    for name, tensor in tensors.items():
        is_table = "relative_attention_bias" in name or name in untied
        if tensor.dim() == 2 and not is_table:
            tensors[name] = dequantise_rows(*quantise_rows(tensor), torch.float32)
    save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
    return into


@pytest.fixture(params=CUDA_BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU, or the emulator on the CPU's memory, where int8 then has no blocks either."""
    if request.param == "emulated":
        emulated.route(monkeypatch)
        heads_in_floats(monkeypatch)
        monkeypatch.setattr(stored_weights, "INT8_BLOCK_DEVICES", frozenset())
        return "cpu"
    return "cuda"


def load_int8(directory: Path, device: str, exits: Path | None = None) -> eecore.Model:
    model = eecore.load(directory, device=device, weights="int8", kv_cache_tokens=512, exits=exits)
    head = model.network.weights.lm_head
    assert head.weight.dtype == torch.int8
    assert head.scale is not None
    return model if device == "cuda" else as_on_cuda(model)


@pytest.mark.parametrize(("family", "mode"), modes_of_coded_weights(tied="smollm2"))
def test_every_mode_gives_the_tokens_of_the_rounded_weights(
    family: str, mode: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The longest prompt has more rows than the skinny products take."""
    assert max(map(len, PROMPTS)) > MAX_SKINNY_ROWS
    directory, policy = write_model(tmp_path / "model", family), POLICIES[mode]
    pack = None
    if mode == "head":
        whole = eecore.load(directory, device="cpu")
        pack = write_pack(tmp_path / "pack", whole, taps=(2,), vocabulary_size=300)
    int8 = load_int8(directory, backend, exits=pack)
    got = eecore.generate(int8, PROMPTS, exit=policy, max_tokens=6)
    monkeypatch.undo()
    heads_in_floats(monkeypatch)
    same = eecore.load(rounded(directory, tmp_path / "rounded"), device="cpu", exits=pack)
    expected = eecore.generate(same, PROMPTS, exit=policy, max_tokens=6)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert [output.exit_layers for output in got] == [output.exit_layers for output in expected]


@pytest.mark.parametrize("mode", ["softmax_each", "speculative", *in_all("full")])
def test_a_t5_gives_the_tokens_of_the_rounded_weights(
    mode: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory, policy = write_t5(tmp_path / "model"), POLICIES[mode]
    got = eecore.generate(load_int8(directory, backend), PROMPTS, exit=policy, max_tokens=5)
    monkeypatch.undo()
    same = eecore.load(rounded(directory, tmp_path / "rounded"), device="cpu")
    expected = eecore.generate(same, PROMPTS, exit=policy, max_tokens=5)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]


@pytest.mark.parametrize("mode", ["softmax_each", "speculative", *in_all("full")])
def test_a_seed_draws_the_tokens_of_the_rounded_weights(
    mode: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = write_model(tmp_path / "model")
    sampling = SamplingParams(max_tokens=5, temperature=0.9, seed=3, prompt_logprobs=1)
    int8 = load_int8(directory, backend)
    got = eecore.generate(int8, PROMPTS, exit=POLICIES[mode], sampling=sampling)
    monkeypatch.undo()
    same = eecore.load(rounded(directory, tmp_path / "rounded"), device="cpu")
    expected = eecore.generate(same, PROMPTS, exit=POLICIES[mode], sampling=sampling)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
