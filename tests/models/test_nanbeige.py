"""Nanbeige, a Llama whose layers run several times: beside transformers' Llama layers in a loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file
from test_gguf_load import check_same
from test_llama import TOLERANCE, Session, tokens_for
from torch import Tensor

import devices
import eecore
from eecore import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    ExitError,
    FixedExit,
    Full,
    ModelError,
    PromptLookup,
    SelfSpeculative,
)
from eecore.cli.app import run
from eecore.config import ModelConfig
from eecore.models import KVCache, load_model, read_config
from looped_models import outputs, tokens, write_nanbeige
from tiny_gguf import write_gguf
from tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

KIND = gguf.GGMLQuantizationType
PROMPTS = random_prompts(5, 1, 23, 9, seed=2)
NEW = 10
SHAPES: dict[str, dict[str, Any]] = {
    "two loops": {},
    "three loops": {
        "num_loops": 3,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "head_dim": 32,
    },
    "tied": {"num_attention_heads": 2, "head_dim": 16, "tie_word_embeddings": True},
}
"""Heads times their size differ from hidden_size in all of them."""


class Looped:
    """One text through transformers' layers, which run several times, each time with a cache of its
    own."""

    def __init__(self, llama: Any, num_loops: int) -> None:
        self.llama, self.layers = llama, llama.model.layers
        self.caches = [transformers.DynamicCache() for _ in range(num_loops)]

    def loop(self, number: int, hidden: Tensor) -> Tensor:
        """The normed states [1, num_tokens, hidden_size] at the end of a loop, from those before
        it."""
        for layer in self.layers:
            hidden = self._through(layer, number, hidden)
        return self.llama.model.norm(hidden)

    def fill(self, number: int, hidden: Tensor) -> None:
        """Keys and values of a loop that is skipped, from the state of the exit."""
        for layer in self.layers:
            self._through(layer, number, hidden)

    def states(self, token_ids: list[int]) -> list[Tensor]:
        """The embeddings and the states at the end of each loop, for the text's next tokens."""
        found = [self.llama.model.embed_tokens(torch.tensor([token_ids]))]
        for number in range(len(self.caches)):
            found.append(self.loop(number, found[-1]))
        return found

    def logits(self, state: Tensor) -> Tensor:
        return self.llama.lm_head(state)[0]

    def _through(self, layer: Any, number: int, hidden: Tensor) -> Tensor:
        cache, count = self.caches[number], hidden.shape[1]
        before = cache.get_seq_length(layer.self_attn.layer_idx)
        positions = torch.arange(before, before + count)[None]
        mask = torch.ones(count, before + count, dtype=torch.bool).tril(before)
        rope = self.llama.model.rotary_emb(hidden, position_ids=positions)
        return layer(hidden, attention_mask=mask[None, None], position_embeddings=rope, cache=cache)


Measure = Callable[[Looped, list[Tensor]], float]
"""The confidence of a token, from its embedding and its states after the loops so far."""


def gap(text: Looped, states: list[Tensor]) -> float:
    first, second = text.logits(states[-1])[0].softmax(0).topk(2).values.tolist()
    return float(first - second)


def cosine(_text: Looped, states: list[Tensor]) -> float:
    return float(torch.cosine_similarity(states[-2][0, 0], states[-1][0, 0], 0))


class Oracle:
    """transformers' Llama with the weights of a directory, which runs its layers several times."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.num_loops, self.stack = config.pop("num_loops"), config["num_hidden_layers"]
        place = directory / "llama"
        place.mkdir()
        llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        (place / "config.json").write_text(json.dumps({**config, **llama}))
        (place / "model.safetensors").symlink_to(directory / "model.safetensors")
        self.llama = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.float32, attn_implementation="sdpa"
        )

    def logits(self, token_ids: list[int]) -> Tensor:
        text = Looped(self.llama, self.num_loops)
        return text.logits(text.states(token_ids)[-1])

    def greedy(self, prompt: list[int], num_loops: int = 0) -> list[int]:
        text = Looped(self.llama, num_loops or self.num_loops)
        token_ids, made = prompt, []
        while len(made) < NEW:
            made.append(int(text.logits(text.states(token_ids)[-1])[-1].argmax()))
            token_ids = made[-1:]
        return made

    def exiting(
        self, prompt: list[int], measure: Measure, threshold: float
    ) -> tuple[list[int], list[int]]:
        """Greedy tokens, and the layer that each of them exited after; the prompt runs whole."""
        text = Looped(self.llama, self.num_loops)
        made, ends = [int(text.logits(text.states(prompt)[-1])[-1].argmax())], [self.num_loops]
        while len(made) < NEW:
            states = [self.llama.model.embed_tokens(torch.tensor([made[-1:]]))]
            for number in range(self.num_loops):
                states.append(text.loop(number, states[-1]))
                if measure(text, states) >= threshold:
                    break
            ends.append(len(states) - 1)
            for skipped in range(ends[-1], self.num_loops):
                text.fill(skipped, states[-1])
            made.append(int(text.logits(states[-1])[-1].argmax()))
        return made, [self.stack * end for end in ends]


@pytest.fixture(autouse=True)
def _no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories and oracles of shapes, each made once."""
    made: dict[str, tuple[Path, Oracle]] = {}

    def of(shape: str = "two loops") -> tuple[Path, Oracle]:
        if shape not in made:
            directory = write_nanbeige(tmp_path_factory.mktemp("nanbeige"), **SHAPES[shape])
            made[shape] = directory, Oracle(directory)
        return made[shape]

    return of


def loaded(place: Path, **options: Any) -> eecore.Model:
    return devices.load(place, kv_cache_tokens=512, **{"dtype": "float32", **options})


def gguf_of(directory: Path, path: Path, quantization: KIND | None = None, **more: Any) -> Path:
    """The model as llama.cpp's converter writes it."""
    loops = json.loads((directory / "config.json").read_text())["num_loops"]
    metadata = {"nanbeige.num_loops": loops, "nanbeige.skip_loop_final_norm": False, **more}
    metadata = {name: value for name, value in metadata.items() if value is not None}
    return write_gguf(
        path, directory, architecture="nanbeige", quantization=quantization, metadata=metadata
    )


@pytest.mark.parametrize("form", ["directory", "file"])
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_and_tokens_are_those_of_the_loop(
    shape: str, form: str, written: Any, tmp_path: Path
) -> None:
    directory, oracle = written(shape)
    place = directory if form == "directory" else gguf_of(directory, tmp_path / "tiny.gguf")
    _, network, _ = load_model(place, "cpu", torch.float32)
    token_ids = tokens_for(network, 41)
    expected = oracle.logits(token_ids.tolist())
    assert expected.std() > 0.5
    for chunks in ([41], [17, 1, 23]):
        got = Session(network, 41).logits(token_ids, chunks)
        torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)
    if form == "directory":
        got = Session(load_model(place, "cpu", torch.bfloat16)[1], 41).logits(token_ids, [41])
        assert (got - expected).std() < 0.05 * expected.std()
    found = tokens(loaded(place), Full(), max_tokens=NEW, prompts=PROMPTS)
    assert found == [oracle.greedy(prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("loop", [1, 2])
def test_a_fixed_exit_is_the_model_of_fewer_loops(loop: int, written: Any) -> None:
    directory, oracle = written("three loops")
    policy = FixedExit(loop * oracle.stack)
    expected = [oracle.greedy(prompt, loop) for prompt in PROMPTS]
    assert tokens(loaded(directory), policy, max_tokens=NEW, prompts=PROMPTS) == expected


@pytest.mark.parametrize(
    ("policy", "measure"),
    [(ConfidentExit(0.25), gap), (ConfidentExit(0.5, "state"), cosine)],
    ids=["softmax", "state"],
)
def test_a_confident_row_exits_at_the_end_of_a_loop(
    policy: ConfidentExit, measure: Measure, written: Any
) -> None:
    directory, oracle = written("three loops")
    found = outputs(loaded(directory), policy, max_tokens=NEW, prompts=PROMPTS)
    for prompt, out in zip(PROMPTS, found, strict=True):
        expected = oracle.exiting(prompt, measure, float(policy.threshold or 0))
        assert (out.token_ids, out.exit_layers) == expected
    assert len({layer for out in found for layer in out.exit_layers[1:]}) > 1


@pytest.mark.parametrize("weights", [None, "int8", "int4", "Q8_0"])
def test_lossless_modes_keep_the_text(weights: str | None, written: Any, tmp_path: Path) -> None:
    directory, oracle = written("two loops")
    if weights == "Q8_0":
        directory, weights = gguf_of(directory, tmp_path / "tiny.gguf", KIND.Q8_0), None
    model = loaded(directory, weights=weights)
    expected = tokens(model, Full(), max_tokens=24, prompts=PROMPTS)
    first = oracle.stack
    policies = [
        SelfSpeculative(first, 3),
        SelfSpeculative(first, 3, reuse=False),
        Auto(3, exit_layers=(first,)),
        PromptLookup(3, min_ngram=1),
        DraftAndVerify({2}, {1, 5}, num_drafts=3),
        ConfidentExit(1.0),
    ]
    for policy in policies:
        assert tokens(model, policy, max_tokens=24, prompts=PROMPTS) == expected
    sampling = eecore.SamplingParams(max_tokens=24, ignore_eos=True)
    mixed = eecore.generate(model, PROMPTS, exit=policies[:4], sampling=sampling)
    assert [out.token_ids for out in mixed] == expected


RELEASE = {
    "architectures": ["NanbeigeForCausalLM"],
    "model_type": "nanbeige",
    "vocab_size": 166144,
    "hidden_size": 3072,
    "intermediate_size": 10752,
    "num_hidden_layers": 22,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "kv_channels": 128,
    "max_position_embeddings": 262144,
    "rope_theta": 70000000,
    "rope_scaling": None,
    "attention_bias": False,
    "rms_norm_eps": 1e-05,
    "num_loops": 2,
    "loop_loss_weights": [],
    "skip_loop_final_norm": False,
    "pretraining_tp": 1,
    "bos_token_id": 166100,
    "eos_token_id": 166101,
    "torch_dtype": "bfloat16",
}
"""The sizes and switches of Nanbeige4.2-3B."""


def test_the_release_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(RELEASE))
    config = read_config(tmp_path)
    assert isinstance(config, ModelConfig)
    assert (config.num_loops, config.stack_size, list(config.exit_layers)) == (2, 22, [22, 44])
    assert (config.q_size, config.kv_size, config.gate_threshold) == (6144, 1024, None)
    assert config.ropes[0].theta == 7e7
    layer = 3072 * (2 * 6144 + 2 * 1024 + 3 * 10752 + 2)
    assert config.num_parameters == 22 * layer + 2 * 166144 * 3072 + 3072
    assert KVCache.bytes_per_token(config, torch.bfloat16) == 2 * 22 * 2 * 1024 * 2


def test_there_is_no_gate(written: Any) -> None:
    directory, _ = written()
    with pytest.raises(ExitError, match=r"an exit gate .* for 'gate', got NanbeigeForCausalLM"):
        outputs(loaded(directory), ConfidentExit(measure="gate"))


def test_info_counts_the_layers_of_every_loop(
    written: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory, oracle = written("three loops")
    file = gguf_of(directory, tmp_path / "tiny.gguf", KIND.Q8_0)
    assert run(["info", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["exit_layers"] == [oracle.stack, oracle.num_loops * oracle.stack]
    bits = {name: tensor["bits"] for name, tensor in facts["tensors"].items()}
    weights = load_file(directory / "model.safetensors")
    sizes = {name: bits[name] * tensor.numel() / 8 for name, tensor in weights.items()}
    times = {name: oracle.num_loops if "layers" in name else 1 for name in sizes}
    times["model.embed_tokens.weight"] = 0
    assert facts["bytes_per_token"] == sum(sizes[name] * times[name] for name in sizes)


@pytest.mark.parametrize("kind", ["F16", "Q4_0", "Q8_0"])
def test_a_file_is_the_directory_that_it_converts_to(
    kind: str, written: Any, tmp_path: Path
) -> None:
    directory, _ = written("two loops")
    check_same(gguf_of(directory, tmp_path / "tiny.gguf", KIND[kind]), tmp_path / "converted")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nanbeige.num_loops": None}, "num_loops: .* left out how many times the layers run"),
        ({"nanbeige.num_loops": 0}, r"num_loops: expected an integer of 1\.\.64, got 0"),
        ({"nanbeige.skip_loop_final_norm": True}, "skip_loop_final_norm: supported are models wi"),
    ],
)
def test_a_file_that_would_answer_wrongly_is_refused(
    fields: dict[str, Any], message: str, written: Any, tmp_path: Path
) -> None:
    file = gguf_of(written()[0], tmp_path / "tiny.gguf", **fields)
    with pytest.raises(ModelError, match=message):
        load_model(file, "cpu")
