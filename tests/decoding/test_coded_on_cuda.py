"""Quantised weights on the CUDA path give the tokens of the floats that they stand for."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_cuda_path import POLICIES, PROMPTS

import eecore
import emulated
from devices import as_on_cuda, heads_in_floats
from eecore import ops
from eecore.models import convert_gguf, load_model
from eecore.models.int8 import dequantise_rows, quantise_rows
from eecore.models.linear import MAX_SKINNY_ROWS
from eecore.models.readers import stored_weights
from eecore.models.weights import Filling, WeightView
from head_packs import write_pack
from packed_blocks import block_sizes, random_blocks
from tiers import CUDA_BACKENDS, in_all
from tiny_gguf import write_gguf
from tiny_models import write_model
from tiny_t5 import write_t5

pytestmark = pytest.mark.usefixtures("one_thread")

KIND = gguf.GGMLQuantizationType


@pytest.fixture(params=CUDA_BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A GPU, or the emulator on the CPU's memory, where int8 then has no blocks either."""
    if request.param == "emulated":
        emulated.route(monkeypatch)
        heads_in_floats(monkeypatch)
        monkeypatch.setattr(stored_weights, "INT8_BLOCK_DEVICES", frozenset())
        return "cpu"
    return "cuda"


def load(path: Path, device: str, **settings: str | Path | None) -> eecore.Model:
    model = eecore.load(path, device=device, dtype="float32", kv_cache_tokens=512, **settings)
    return model if device == "cuda" else as_on_cuda(model)


def round_weights(directory: Path, weights: str, *embeddings: str) -> None:
    """Round a checkpoint's matrices as int4 or int8 does; ``embeddings``: a T5's name of its
    table."""
    tensors = load_file(directory / "model.safetensors")
    if weights == "int8":
        untied = {"model.embed_tokens.weight", "shared.weight"}
        kept = untied if "lm_head.weight" in tensors else set()
        for name, tensor in tensors.items():
            if tensor.dim() == 2 and "relative_attention_bias" not in name and name not in kept:
                tensors[name] = dequantise_rows(*quantise_rows(tensor), torch.float32)
    else:
        _, network, _ = load_model(directory, "cpu", weights=weights)
        views = network.weights.by_checkpoint_name(network.config, *embeddings)
        packed = {name: view for name, view in views.items() if view.table is not None}
        assert packed
        for name, view in packed.items():
            tensors[name] = ops.unpack_weight(view.weight, view.table)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def check_same_tokens(
    model: eecore.Model,
    floats: Path,
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
    pack: Path | None = None,
) -> None:
    """``floats`` holds what the model's weights stand for."""
    got = eecore.generate(model, PROMPTS, exit=POLICIES[mode], max_tokens=6)
    monkeypatch.undo()
    heads_in_floats(monkeypatch)
    same = eecore.load(floats, device="cpu", dtype="float32", exits=pack)
    expected = eecore.generate(same, PROMPTS, exit=POLICIES[mode], max_tokens=6)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert [output.exit_layers for output in got] == [output.exit_layers for output in expected]


SHORT = [
    ("int8", "llama_biased", "speculative"),
    ("int8", "smollm2", "softmax_each"),
    ("int4", "llama_biased", "speculative"),
    ("int4", "llama_tied", "softmax_each"),
]
EVERY = [(weights, "llama_biased", mode) for weights in ("int8", "int4") for mode in POLICIES]


@pytest.mark.parametrize(
    ("weights", "family", "mode"), [*SHORT, *in_all(*(each for each in EVERY if each not in SHORT))]
)
def test_every_mode_gives_the_tokens_of_its_floats(
    weights: str,
    family: str,
    mode: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The longest prompt has more rows than the skinny products take."""
    assert max(map(len, PROMPTS)) > MAX_SKINNY_ROWS
    directory, pack = write_model(tmp_path / "model", family), None
    if mode == "head":
        whole = eecore.load(directory, device="cpu")
        pack = write_pack(tmp_path / "pack", whole, taps=(2,), vocabulary_size=300)
    model = load(directory, backend, weights=weights, exits=pack)
    head = model.network.weights.lm_head
    assert (head.scale if weights == "int8" else head.table) is not None
    round_weights(directory, weights)
    check_same_tokens(model, directory, mode, monkeypatch, pack)


@pytest.mark.parametrize(
    ("weights", "mode"),
    [("int8", "softmax_each"), *in_all(("int8", "speculative"), ("int4", "softmax_each"))],
)
def test_a_t5_gives_the_tokens_of_its_floats(
    weights: str, mode: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    directory = write_t5(tmp_path / "model")
    model = load(directory, backend, weights=weights)
    round_weights(directory, weights, "shared.weight")
    check_same_tokens(model, directory, mode, monkeypatch)


@pytest.mark.parametrize("mode", ["speculative", *in_all("state", "full")])
def test_a_gguf_file_gives_the_tokens_of_the_directory_it_converts_to(
    mode: str, backend: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Kinds are mixed within a matrix."""
    original = write_model(tmp_path / "original")
    kinds = {"blk.0.attn_v": KIND.Q8_0, "blk.1.attn_q": KIND.Q5_1, "output": KIND.Q5_0}
    file = tmp_path / "tiny.gguf"
    write_gguf(file, original, quantization=KIND.Q4_0, kinds=kinds)
    model = load(file, backend)
    assert model.network.weights.qkv.table is not None
    floats = convert_gguf(file, tmp_path / "converted")
    check_same_tokens(model, floats, mode, monkeypatch)


def test_blocks_of_a_gpu_are_those_of_the_cpu() -> None:
    """The tensors of a matrix follow each other, each at its place."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    parts = [("Q4_K", 48), ("Q6_K", 20)]
    size = sum(ops.packed_bytes(format, rows, 256) for format, rows in parts)
    filled = []
    for device in ("cpu", "cuda"):
        weight = torch.zeros(size, dtype=torch.uint8, device=device)
        table = torch.zeros(68, dtype=torch.int64, device=device)
        filling = Filling()
        for (format, rows), of_rows in zip(parts, table.split([48, 20]), strict=True):
            blocks = random_blocks(format, rows, 256)
            assert blocks.shape[1] == block_sizes(format)[1]
            filling.pack(WeightView(weight, None, of_rows), blocks, format, 256)
        filled.append((weight.cpu(), table.cpu()))
    assert all(map(torch.equal, *filled))
