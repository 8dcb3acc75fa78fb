"""T5: its logits and tokens are transformers', its exits Algorithm 1's, its pages come back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_coded_weights import rounded
from test_confident_exit import MEASURES, SETTINGS, check_against_reference, policy_of
from test_cuda_path import POLICIES as ALL_POLICIES

import eecore
import emulated
from devices import as_on_cuda, cpu_only, load
from eecore import SamplingParams, SelfSpeculative, ops
from eecore.calibration.exit_scores import Scored, forced_states, score_exits
from eecore.errors import CheckpointError, ExitError, ModelError, RequestError
from eecore.models import load_model
from eecore.models.linear import MAX_SKINNY_ROWS
from reference_t5 import ReferenceT5
from tiers import in_all
from tiny_models import random_prompts
from tiny_t5 import FAMILIES, write_t5
from workloads import tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
# No draft head is trained for a T5.
POLICIES = {name: policy for name, policy in ALL_POLICIES.items() if not policy.needs_head}
# The last one has more tokens than eecore's products take on a GPU.
INPUTS = random_prompts(1, 7, MAX_SKINNY_ROWS + 8)


@pytest.fixture(scope="session")
def t5_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A T5 whose upper half of the decoder changes less than the lower one."""
    return write_t5(tmp_path_factory.mktemp("t5"), deep_gain=0.3)


@pytest.fixture(scope="session")
def t5(t5_directory: Path) -> eecore.Model:
    return load(t5_directory, kv_cache_tokens=2048)


@pytest.fixture(scope="session")
def reference_t5(t5_directory: Path) -> ReferenceT5:
    return ReferenceT5(t5_directory)


def of_transformers(directory: Path) -> Any:
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(directory, dtype=torch.float32)


# The forward pass


@cpu_only
@pytest.mark.parametrize("input_len", [1, 9, 200])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_agree_with_transformers(family: str, input_len: int, tmp_path: Path) -> None:
    directory = write_t5(tmp_path, family)
    config, model, _ = load_model(directory)
    given, learnt = random_prompts(input_len, 170, seed=1)
    sequence = Scored.of(config, given, learnt)
    with torch.inference_mode():
        *_, (_, hidden) = forced_states(model, sequence, [config.num_layers])
        logits = model.logits(hidden)
        expected = of_transformers(directory)(
            input_ids=torch.tensor([given]), decoder_input_ids=torch.tensor([sequence.token_ids])
        ).logits[0]
    assert (logits - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("family", ["t5", "t5_v1_1", "mt5"])
def test_50_inputs_in_a_batch_give_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    directory = write_t5(tmp_path, family)
    inputs = random_prompts(*range(1, 100, 2), seed=2)
    assert len(inputs) == 50
    model = load(directory, kv_cache_tokens=16384)
    got = eecore.generate(model, inputs, max_tokens=24)
    longest = max(map(len, inputs))
    padded = torch.tensor([given + [0] * (longest - len(given)) for given in inputs])
    mask = torch.tensor([[1] * len(given) + [0] * (longest - len(given)) for given in inputs])
    expected = of_transformers(directory).generate(
        padded, attention_mask=mask, max_new_tokens=24, do_sample=False
    )
    for given, output, row in zip(inputs, got, expected[:, 1:].tolist(), strict=True):
        assert output.token_ids == row[: len(output.token_ids)]
        assert output.finish_reason == "stop" or len(output.token_ids) == 24
        assert output.prompt_token_ids == given
        assert output.stats.prompt_tokens == len(given)


@cpu_only
def test_a_head_of_its_own_and_embeddings_under_another_name(tmp_path: Path) -> None:
    directory = write_t5(tmp_path / "own", "t5_v1_1", tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tied = eecore.load(directory, kv_cache_tokens=256)
    assert tied.config.tie_word_embeddings
    tensors["encoder.embed_tokens.weight"] = tensors.pop("shared.weight")
    tensors["decoder.embed_tokens.weight"] = tensors["encoder.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    same = eecore.load(directory, kv_cache_tokens=256)
    expected = eecore.generate(tied, INPUTS, max_tokens=8)
    assert tokens_of(eecore.generate(same, INPUTS, max_tokens=8)) == tokens_of(expected)
    tensors["decoder.embed_tokens.weight"] += 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ModelError, match=r"decoder.embed_tokens.weight: supported is a copy of encoder"
    ):
        eecore.load(directory)
    del tensors["decoder.embed_tokens.weight"]
    tensors["lm_head.weight"] = tensors["encoder.embed_tokens.weight"].flip(0).contiguous()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    own = eecore.load(directory, kv_cache_tokens=256)
    assert not own.config.tie_word_embeddings
    assert tokens_of(eecore.generate(own, INPUTS, max_tokens=8)) != tokens_of(expected)


@cpu_only
@pytest.mark.parametrize("family", FAMILIES)
def test_int4_is_what_is_left_of_the_weights(family: str, tmp_path: Path) -> None:
    directory = write_t5(tmp_path, family)
    stored = load_file(directory / "model.safetensors")
    model = eecore.load(directory, kv_cache_tokens=256, weights="int4")
    views = model.network.weights.by_checkpoint_name(model.config, "shared.weight")
    packed = {name: view for name, view in views.items() if view.table is not None}
    assert len(packed) > 8 * model.config.num_layers
    for name, view in packed.items():
        expected = rounded(name, stored[name], "int4")
        assert torch.equal(ops.unpack_weight(view.weight, view.table), expected)
    outputs = eecore.generate(model, INPUTS, max_tokens=6, ignore_eos=True)
    drafted = eecore.generate(
        model, INPUTS, exit=SelfSpeculative(1, 3), max_tokens=6, ignore_eos=True
    )
    assert tokens_of(outputs) == tokens_of(drafted)


# Modes


@pytest.mark.parametrize("batch", ["each", "all"])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("measure", MEASURES)
def test_confident_exit_is_algorithm_1(
    t5: eecore.Model, reference_t5: ReferenceT5, measure: str, setting: str, batch: str
) -> None:
    check_against_reference(t5, reference_t5, policy_of(measure, setting, batch))


@pytest.mark.parametrize(
    ("backend", "mode"),
    # Other models are tried in all modes; the emulator is slow.
    [
        *(("emulated", mode) for mode in ("softmax_each", "speculative")),
        *in_all(("emulated", "full"), ("emulated", "state")),
        *(("cuda", mode) for mode in POLICIES),
    ],
)
def test_the_cuda_kernels_give_the_tokens_of_the_cpu(
    t5_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    mode: str,
) -> None:
    if backend == "cuda" and (not torch.cuda.is_available() or not eecore.build_info()["cuda"]):
        pytest.skip("no GPU, or a build without eecore._cuda")
    device = "cuda" if backend == "cuda" else "cpu"
    policy, settings = POLICIES[mode], {"max_tokens": 5, "ignore_eos": True}
    expected = eecore.generate(
        eecore.load(t5_directory, device="cpu", kv_cache_tokens=512),
        INPUTS,
        exit=policy,
        **settings,
    )
    model = eecore.load(t5_directory, device=device, kv_cache_tokens=512)
    if backend == "emulated":
        emulated.route(monkeypatch)
        as_on_cuda(model)
    got = eecore.generate(model, INPUTS, exit=policy, **settings)
    assert tokens_of(got) == tokens_of(expected)
    assert [o.exit_layers for o in got] == [o.exit_layers for o in expected]


# Pages


def pages_free(engine: eecore.Engine) -> bool:
    return engine.pages.num_free == engine.pages.num_pages


# What cannot be


def test_bad_inputs_are_refused_and_harm_no_request(t5: eecore.Model) -> None:
    engine = t5.engine(eecore.EngineConfig(kv_cache_tokens=1024))
    expected = eecore.generate(t5, INPUTS[1], max_tokens=10)
    engine.add_request(INPUTS[1], sampling=SamplingParams(max_tokens=10))
    for prompt, message in (
        ("", "prompt: expected some text, got an empty string"),
        ([], "prompt: expected at least one token, got none"),
        ([1] * 513, "input of 513 tokens: expected at most 512, what the model was made for"),
        ([1, 320], "prompt: expected token ids 0..319, got 320"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.add_request(prompt)
    with pytest.raises(RequestError, match="at most 1024 together, the size of the KV cache"):
        engine.add_request([1] * 500, sampling=SamplingParams(max_tokens=600))
    with pytest.raises(ExitError, match="exit_layer"):
        engine.add_request(INPUTS[0], exit=SelfSpeculative(4, 2))
    (output,) = [s.output for s in engine.run() if s.output is not None]
    assert output.token_ids == expected[0].token_ids
    assert pages_free(engine)


def test_float16_and_missing_and_strange_tensors(tmp_path: Path) -> None:
    directory = write_t5(tmp_path)
    with pytest.raises(ModelError, match="float32 or bfloat16"):
        eecore.load(directory, dtype="float16")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "decoder.block.1.layer.3.weight": torch.ones(2)}, path)
    with pytest.raises(ModelError, match=r"knows no decoder.block.1.layer.3.weight"):
        eecore.load(directory)
    tensors.pop("encoder.block.2.layer.0.SelfAttention.k.weight")
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=r"encoder.block.2.layer.0.SelfAttention.k.weight"):
        eecore.load(directory)


# Evaluation


@cpu_only
def test_exits_are_scored(t5: eecore.Model, t5_directory: Path) -> None:
    given, learnt = random_prompts(12, 9, seed=8)
    (last,) = score_exits(t5.network, [Scored.of(t5.config, given, learnt)], [4])
    oracle = of_transformers(t5_directory)
    with torch.inference_mode():
        loss = oracle(input_ids=torch.tensor([given]), labels=torch.tensor([learnt])).loss
    assert last.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)
