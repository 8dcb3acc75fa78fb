"""Families beyond Llama's, from files of transformers and of GGUF: the tokens of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from test_llama import TOLERANCE, Session

import eecore
import emulated
from devices import as_on_cuda
from eecore import ConfidentExit, FixedExit, Full, ops
from eecore.errors import ModelError
from eecore.integrations.transformers_model import from_transformers
from eecore.models import convert_gguf, load_model, read_config
from eecore.models.readers.gguf_file import GGUFFile
from eecore.models.readers.gguf_tokenizer import build_tokenizer
from tiers import in_all
from tiny_families import (
    ALL_ATTENTION,
    ALL_SLIDING,
    FAMILIES,
    SHAPES,
    make_oracle,
    write_family,
    write_family_gguf,
)
from tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = random_prompts(5, 1, 23, 9, seed=2)
NEW = 12
CACHE = {"device": "cpu", "kv_cache_tokens": 256}
ALL = [*FAMILIES, *in_all(*SHAPES)]
EMULATED = ("gemma3", "phi3")
"""Families that the short suite runs over the emulator: together they have most switches."""


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Directories and oracles of families, each made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def of(family: str) -> tuple[Path, Any]:
        if family not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family] = (directory, write_family(directory, family))
        return made[family]

    return of


def greedy(oracle: Any, prompt: list[int]) -> list[int]:
    """The tokens of transformers, each from the whole text."""
    text = list(prompt)
    for _ in range(NEW):
        text.append(int(oracle(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


def head(oracle: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The logits of a state, as transformers makes them after the last layer."""
    norm = getattr(oracle.model, "norm", None) or oracle.model.embedding_norm
    logits = oracle.lm_head(norm(hidden)) / getattr(oracle.config, "logits_scaling", 1)
    cap = getattr(oracle.config, "final_logit_softcapping", None)
    return logits if cap is None else cap * (logits / cap).tanh()


class Exits:
    """transformers' layers with exits: a skipped layer makes keys and values of the exit state.

    Args:
        oracle: the model.
        policy: the layer that all tokens exit after, or the confidence at which those after the
            first new one do.
    """

    def __init__(self, oracle: Any, policy: FixedExit | ConfidentExit) -> None:
        self.oracle, self.policy = oracle, policy
        self.reads_prompt, self.exit = True, 0

    def after(self, number: int, state: torch.Tensor, made: Any) -> Any:
        """The input of the next layer, and after the last one of the head."""
        hidden = made[0] if isinstance(made, tuple) else made
        if self.exit:
            return (state, *made[1:]) if isinstance(made, tuple) else state
        exits = number == self.oracle.config.num_hidden_layers
        if isinstance(self.policy, FixedExit):
            exits = number == self.policy.exit_layer
        elif not self.reads_prompt:
            best = head(self.oracle, hidden[0, -1]).softmax(-1).topk(2).values
            exits |= bool(best[0] - best[1] >= self.policy.threshold)
        self.exit = number if exits else 0
        return made

    def generate(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Greedy tokens, and the layer that each of them exited after."""
        cache: dict[str, Any] = {}
        tokens: list[int] = []
        layers: list[int] = []
        hooks = [
            layer.register_forward_hook(
                lambda _, inputs, made, number=number: self.after(number, inputs[0], made)
            )
            for number, layer in enumerate(self.oracle.model.layers, 1)
        ]
        for _ in range(NEW):
            self.exit = 0
            given = torch.tensor([[tokens[-1]] if tokens else prompt])
            made = self.oracle(given, use_cache=True, **cache)
            name = "cache" if "cache" in made else "past_key_values"  # from transformers 5.24 on
            cache = {name: made[name]}
            tokens.append(int(made.logits[0, -1].argmax()))
            layers.append(self.exit)
            self.reads_prompt = False
        for hook in hooks:
            hook.remove()
        return tokens, layers


def generated(model: eecore.Model, exit: Any = None, **options: Any) -> list[list[int]]:
    options = {"max_tokens": NEW, "ignore_eos": True, **options}
    outputs = eecore.generate(model, PROMPTS, exit=exit or Full(), **options)
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("family", ALL)
def test_logits_and_tokens_are_those_of_transformers(family: str, written: Any) -> None:
    directory, oracle = written(family)
    model = eecore.load(directory, **CACHE)
    token_ids = torch.tensor(random_prompts(41, seed=1)[0])
    expected = oracle(token_ids[None]).logits[0]
    assert expected.std() > 0.5
    # transformers computes delta rules of 64 positions together, and so rounds otherwise.
    tolerance = TOLERANCE * (2 if "qwen3_5" in family else 1)
    for chunks in ([41], [17, 1, 23]):
        got = Session(model.network, 41).logits(token_ids, chunks)
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    for prompt, tokens in zip(PROMPTS, generated(model), strict=True):
        # transformers uses a longrope's short factors for texts of up to 16 tokens.
        if family != "phi3_long" or len(prompt) > 16:
            assert tokens == greedy(oracle, prompt)


@pytest.mark.parametrize("family", ALL)
def test_rows_exit_as_transformers_layers_would(family: str, written: Any) -> None:
    directory, oracle = written(family)
    model = eecore.load(directory, **CACHE)
    exited = set()
    for policy in (FixedExit(2), ConfidentExit(0.03), ConfidentExit(0.6)):
        outputs = eecore.generate(model, PROMPTS, exit=policy, max_tokens=NEW, ignore_eos=True)
        tokens, layers = Exits(oracle, policy).generate(PROMPTS[2])
        assert outputs[2].token_ids == tokens, policy
        assert outputs[2].exit_layers == layers, policy
        exited |= {*layers}
    assert exited >= {1, 2, 4}


@pytest.mark.parametrize(
    "family", [*EMULATED, *in_all(*({**FAMILIES, **SHAPES}.keys() - set(EMULATED)))]
)
def test_the_cuda_path_gives_the_tokens_of_the_cpu(
    family: str, written: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the emulator: a prompt longer than the windows beside a short one."""
    exits = Full(), ConfidentExit(0.4)
    options = {"max_tokens": 4, "ignore_eos": True}
    directory = written(family)[0]
    expected = [
        eecore.generate(eecore.load(directory, **CACHE), PROMPTS[2:], exit=exit, **options)
        for exit in exits
    ]
    emulated.route(monkeypatch)
    for exit, wanted in zip(exits, expected, strict=True):
        model = as_on_cuda(eecore.load(directory, **CACHE))
        got = eecore.generate(model, PROMPTS[2:], exit=exit, **options)
        assert [each.token_ids for each in got] == [each.token_ids for each in wanted]
        assert [each.exit_layers for each in got] == [each.exit_layers for each in wanted]


def test_a_whole_matrix_of_fewer_bits_is_quantised_as_its_parts_alone_are(written: Any) -> None:
    directory, _ = written("phi3")
    model = eecore.load(directory, weights="int4", **CACHE)
    name = "model.layers.1.self_attn.qkv_proj.weight"
    stored = load_file(directory / "model.safetensors")[name].float()
    matrix = model.network.weights.qkv.unbind()[1]
    assert matrix.table is not None
    kv_size = model.config.num_kv_heads * model.config.head_dim
    sizes = (len(stored) - 2 * kv_size, kv_size, kv_size)
    got = ops.unpack_weight(matrix.weight, matrix.table).split(sizes)
    for part, found, format in zip(stored.split(sizes), got, ("Q4_1", "Q5_1", "Q8_0"), strict=True):
        alone = ops.pack_weight(ops.quantise_weight(part, format), format)
        assert alone.table is not None
        assert torch.equal(found, ops.unpack_weight(alone.weight, alone.table))


@pytest.mark.parametrize(
    "family",
    [
        *(family for family in FAMILIES if family != "ministral"),  # no architecture of GGUF
        *in_all("olmo2_odd", "olmo3_no_gqa", "granite_tied", "phi3_plain"),
    ],
)
def test_a_gguf_file_gives_the_same_tokens(family: str, written: Any, tmp_path: Path) -> None:
    directory, _ = written(family)
    file = write_family_gguf(tmp_path / "tiny.gguf", directory, family)
    of_file, of_directory = read_config(file), read_config(directory)
    same = {"architecture": of_directory.architecture, "bos_token_id": 1, "eos_token_ids": (2,)}
    for each, other in zip(of_file.ropes, of_directory.ropes, strict=True):
        assert each.attention_factor == pytest.approx(other.attention_factor)
    assert replace(
        of_file, dtype="float32", ropes=of_directory.ropes, sampling=of_directory.sampling, **same
    ) == replace(of_directory, attention_scale=of_file.attention_scale)
    expected = generated(eecore.load(directory, **CACHE))
    loaded = eecore.load(file, **CACHE)
    assert generated(loaded) == expected
    assert loaded.tokenizer is not None
    converted = convert_gguf(file, tmp_path / "converted")
    assert read_config(converted).ropes == of_file.ropes
    assert generated(eecore.load(converted, **CACHE)) == expected


TEXTS = {"gemma3": "Gemma3", "ministral3": "Mistral3"}


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("family", TEXTS)
def test_the_text_part_of_a_multimodal_checkpoint(
    family: str, old_names: bool, tmp_path: Path
) -> None:
    text = make_oracle(family)
    tied = text.config.tie_word_embeddings
    parts = {"text_config": text.config.to_dict(), "tie_word_embeddings": tied}
    config = getattr(transformers, f"{TEXTS[family]}Config")(**parts).to_dict()
    config["architectures"] = [f"{TEXTS[family]}ForConditionalGeneration"]
    if tied:
        del config["tie_word_embeddings"]  # the default of such a model
    (tmp_path / "config.json").write_text(json.dumps(config))
    start = "language_model.model." if old_names else "model.language_model."
    head = "language_model.lm_head." if old_names else "lm_head."
    tensors = {
        name.replace("lm_head.", head) if "lm_head" in name else start + name[6:]: tensor
        for name, tensor in text.state_dict().items()
        if not (name == "lm_head.weight" and tied)
    }
    tensors["vision_tower.post_layernorm.weight"] = torch.zeros(3)
    tensors["model.multi_modal_projector.norm.weight"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = load_model(tmp_path, "cpu")[1]
    token_ids = torch.tensor(random_prompts(30, seed=1)[0])
    got = Session(model, 30).logits(token_ids, [30])
    expected = text(token_ids[None]).logits[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def test_a_longrope_has_its_long_factors_where_texts_may_be_long(written: Any) -> None:
    """In a cache of more than the original context, and in a smaller one of the same model again
    the short ones."""
    directory, oracle = written("phi3")
    network = load_model(directory, "cpu")[1]
    token_ids = torch.tensor(random_prompts(270, seed=1)[0])
    short = oracle(token_ids[None, :30]).logits[0]
    long = oracle(token_ids[None]).logits[0]
    for count, expected in ((30, short), (270, long), (30, short)):
        got = Session(network, count).logits(token_ids[:count], [count])
        torch.testing.assert_close(got, expected, rtol=0, atol=2 * TOLERANCE)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        *((family, {}) for family in ("gemma3", "olmo3", "phi3", "granite4", "ministral")),
        *((family, {}) for family in ("lfm2", "qwen3_5")),
        # layers that are all of one kind
        *(
            (family, {"layer_types": kinds})
            for family in ("gemma2", "gemma3", "olmo3", "ministral")
            for kinds in (ALL_ATTENTION, ALL_SLIDING)
        ),
        ("gemma3", {"num_hidden_layers": 1}),
        ("ministral", {"layer_types": None}),
        *(("smollm3", {"no_rope_layers": [flag] * 4}) for flag in (0, 1)),
        *(
            ("mimo", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": first})
            for first in (0, 4)
        ),
    ],
)
def test_a_model_that_transformers_holds(
    family: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    oracle = make_oracle(family, **fields)
    expected = greedy(oracle, PROMPTS[2])
    oracle.save_pretrained(tmp_path)
    assert generated(eecore.load(tmp_path, **CACHE))[2] == expected
    model = from_transformers(oracle, kv_cache_tokens=256)
    assert generated(model)[2] == expected
    ids = torch.tensor(PROMPTS[2:3])
    call = {"max_new_tokens": NEW, "custom_generate": eecore.generate_for_transformers}
    assert oracle.generate(ids, **call, exit="full")[0, len(PROMPTS[2]) :].tolist() == expected
    assert greedy(oracle, PROMPTS[2]) == expected


# What cannot be


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma3n", "per-layer inputs"),
        ("qwen3moe", "MoE"),
        ("granitehybrid", r"hybrid layers \(Mamba\)"),
        ("mamba2", "Mamba"),
    ],
)
def test_a_gguf_architecture_that_does_not_run(name: str, message: str, tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", name)
    writer.add_tensor("token_embd.weight", torch.zeros(8, 8).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match=rf"{message}.*nearest that runs.*, got {name}"):
        read_config(tmp_path / "t.gguf")


@pytest.mark.parametrize(
    ("kind", "text", "pieces"),
    [
        ("dbrx", "We'll pay 12345", ["We", "'ll", " pay", " ", "123", "45"]),
        ("smaug-bpe", "We'll pay 12345", ["We", "'ll", " pay", " ", "123", "45"]),
        ("gpt-4o", "We'll pay 12345", ["We'll", " pay", " ", "123", "45"]),
        ("gpt-4o", "aBc HTTPServer", ["a", "Bc", " HTTPServer"]),
        ("olmo", "We'll pay 12345", ["We", "'ll", " pay", " 12345"]),
        ("qwen2", "\u0928\u093f 12", ["\u0928", "\u093f", " ", "1", "2"]),  # a letter and a mark
        ("qwen35", "\u0928\u093f 12", ["\u0928\u093f", " ", "1", "2"]),
    ],
)
def test_text_is_split_as_the_file_says(
    kind: str, text: str, pieces: list[str], written: Any, tmp_path: Path
) -> None:
    file = write_family_gguf(tmp_path / "t.gguf", written("olmo2")[0], "olmo2", pre=kind)
    backend, _ = build_tokenizer(GGUFFile(file), 320)
    split = backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[begin:end] for _, (begin, end) in split] == pieces
