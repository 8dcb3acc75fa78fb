"""T5: its logits and tokens are transformers', its exits Algorithm 1's, its pages come back."""

from __future__ import annotations

import itertools
import json
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
from eecore import ConfidentExit, FixedExit, SamplingParams, SelfSpeculative, ops
from eecore.calibration.exit_scores import Scored, forced_states, score_exits
from eecore.cli.app import run
from eecore.errors import CheckpointError, ExitError, ModelError, RequestError
from eecore.lab.evaluation.exit_map import map_exits
from eecore.models import T5Model, load_model
from eecore.models.linear import MAX_SKINNY_ROWS
from reference_t5 import ReferenceT5
from tiny_models import random_prompts, write_model
from tiny_t5 import FAMILIES, write_t5
from tripwire import Fault
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
        *_, (_, _, hidden) = forced_states(model, sequence, [config.num_layers])
        logits = model.logits(hidden)
        expected = of_transformers(directory)(
            input_ids=torch.tensor([given]), decoder_input_ids=torch.tensor([sequence.token_ids])
        ).logits[0]
    assert (logits - expected).abs().max() <= TOLERANCE * max(1.0, float(expected.abs().max()))


@cpu_only
@pytest.mark.parametrize("family", ["t5", "flan_t5"])
def test_token_by_token_is_what_a_whole_text_gives(family: str, tmp_path: Path) -> None:
    directory = write_t5(tmp_path, family)
    model = eecore.load(directory, kv_cache_tokens=512)
    given = random_prompts(40)[0]
    (output,) = eecore.generate(model, given, max_tokens=150, ignore_eos=True, logprobs=0)
    sequence = Scored.of(model.config, given, output.token_ids[:-1])
    with torch.inference_mode():
        *_, (_, _, hidden) = forced_states(model.network, sequence, [4])
        logprobs = model.network.logits(hidden).log_softmax(-1)
    assert logprobs.argmax(-1).tolist() == output.token_ids
    assert output.logprobs == pytest.approx(logprobs.max(-1).values.tolist(), abs=1e-4)


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
def test_bfloat16_and_int8_come_close(t5: eecore.Model, t5_directory: Path) -> None:
    given, learnt = random_prompts(40, 20, seed=4)
    sequence = Scored.of(t5.config, given, learnt)
    states = []
    for settings in ({}, {"dtype": "bfloat16"}, {"weights": "int8"}):
        model = eecore.load(t5_directory, kv_cache_tokens=256, **settings)
        with torch.inference_mode():
            *_, (_, _, hidden) = forced_states(model.network, sequence, [4])
            states.append(model.network.logits(hidden))
    for other, limit in zip(states[1:], (0.05, 0.1), strict=True):
        difference = (other - states[0]).norm() / states[0].norm()
        assert 0 < difference < limit


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


def test_a_fixed_exit_is_the_decoder_cut_there(
    t5: eecore.Model, t5_directory: Path, tmp_path: Path
) -> None:
    config = json.loads((t5_directory / "config.json").read_text())
    tensors = load_file(t5_directory / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(("decoder.block.2.", "decoder.block.3."))
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_decoder_layers": 2}))
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    cut = load(tmp_path, kv_cache_tokens=2048)
    expected = eecore.generate(cut, INPUTS, max_tokens=12, ignore_eos=True)
    got = eecore.generate(t5, INPUTS, exit=FixedExit(2), max_tokens=12, ignore_eos=True)
    assert tokens_of(got) == tokens_of(expected)


@pytest.mark.parametrize("exit_layer", [1, 2, 3])
def test_self_speculation_gives_the_tokens_of_full_depth(t5: eecore.Model, exit_layer: int) -> None:
    full = eecore.generate(t5, INPUTS, max_tokens=40)
    policy = SelfSpeculative(exit_layer, 4)
    drafted = eecore.generate(t5, INPUTS, exit=policy, max_tokens=40)
    assert tokens_of(drafted) == tokens_of(full)
    accepted = sum(output.stats.accepted for output in drafted)
    assert 0 < accepted < sum(output.stats.drafted for output in drafted)


@pytest.mark.parametrize("mode", POLICIES)
def test_unwritten_cache_is_never_read(t5_directory: Path, mode: str) -> None:
    model = load(t5_directory, kv_cache_tokens=512)
    settings = {"exit": POLICIES[mode], "max_tokens": 12, "ignore_eos": True}
    expected = eecore.generate(model, INPUTS, **settings)
    kv = model.shared_engine().engine.kv
    kv.k.fill_(torch.nan)
    kv.v.fill_(torch.nan)
    got = eecore.generate(model, INPUTS, **settings)
    assert tokens_of(got) == tokens_of(expected)


@pytest.mark.parametrize("mode", POLICIES)
def test_all_modes_side_by_side_give_what_each_gives_alone(t5: eecore.Model, mode: str) -> None:
    if mode == "softmax_all":
        pytest.skip("waits for its neighbours")
    others = [policy for name, policy in POLICIES.items() if name != "softmax_all"]
    inputs = random_prompts(*range(3, 3 + len(others)), seed=7)
    together = eecore.generate(t5, inputs, exit=others, max_tokens=15)
    at = [name for name in POLICIES if name != "softmax_all"].index(mode)
    (alone,) = eecore.generate(t5, inputs[at], exit=others[at], max_tokens=15)
    assert together[at].token_ids == alone.token_ids
    assert together[at].exit_layers == alone.exit_layers


def test_a_seed_draws_the_same_in_any_batch(t5: eecore.Model) -> None:
    sampling = SamplingParams(max_tokens=15, temperature=0.8, top_k=40, seed=5)
    alone = eecore.generate(t5, INPUTS[1], sampling=sampling)
    beside = eecore.generate(t5, [*INPUTS, INPUTS[1]], sampling=sampling)
    assert beside[-1].token_ids == alone[0].token_ids
    drafted = eecore.generate(t5, INPUTS[1], exit=SelfSpeculative(2, 3), sampling=sampling)
    assert len(drafted[0].token_ids) == len(alone[0].token_ids)


@pytest.mark.parametrize(
    ("backend", "mode"),
    # Other models are tried in all modes; the emulator is slow.
    [
        *(("emulated", mode) for mode in ("full", "softmax_each", "state", "speculative")),
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


@pytest.mark.parametrize("mode", POLICIES)
def test_preempted_requests_read_their_input_again_and_lose_nothing(
    t5: eecore.Model, mode: str
) -> None:
    inputs = random_prompts(60, 60, 60, 60, seed=3)
    policy = POLICIES[mode]
    if mode == "softmax_all":
        pytest.skip("waits for its neighbours")
    expected = eecore.generate(t5, inputs, exit=policy, max_tokens=60, ignore_eos=True)
    small = t5.engine(eecore.EngineConfig(kv_cache_tokens=352, page_size=8))
    for given in inputs:
        small.add_request(
            given, exit=policy, sampling=SamplingParams(max_tokens=60, ignore_eos=True)
        )
    outputs = {s.request_id: s.output for s in small.run() if s.output is not None}
    got = [outputs[name] for name in sorted(outputs, key=lambda name: int(name.split("-")[1]))]
    assert tokens_of(got) == tokens_of(expected)
    assert sum(output.stats.preemptions for output in got) > 0
    assert pages_free(small)


def test_an_input_counts_against_an_iteration_and_a_large_one_has_its_own(t5: eecore.Model) -> None:
    config = eecore.EngineConfig(kv_cache_tokens=2048, max_batch_tokens=64)
    engine = t5.engine(config)
    inputs = random_prompts(30, 30, 200, 10, seed=6)
    for given in inputs:
        engine.add_request(given, sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    ran = []
    outputs: dict[str, eecore.Output] = {}
    while engine.has_unfinished:
        before = engine.num_running
        steps = engine.step()
        ran.append(engine.num_running - before)
        outputs |= {s.request_id: s.output for s in steps if s.output is not None}
    assert ran[0] == 2  # two of 30 and their start tokens fit into 64
    got = [outputs[name] for name in sorted(outputs, key=lambda name: int(name.split("-")[1]))]
    settings = {"max_tokens": 30, "ignore_eos": True}
    assert tokens_of(got) == tokens_of(eecore.generate(t5, inputs, **settings))
    assert pages_free(engine)


def test_cancelled_and_failing_requests_give_their_pages_back(
    t5: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = t5.engine(eecore.EngineConfig(kv_cache_tokens=1024))
    names = [engine.add_request(given) for given in INPUTS]
    encode = T5Model.encode

    def fail(*_args: object) -> None:
        raise Fault("no encoder today")

    monkeypatch.setattr(T5Model, "encode", fail)
    failed = [s.output for s in engine.step() if s.output is not None]
    assert [output.request_id for output in failed] == names
    assert {output.error for output in failed} == {"Fault: no encoder today"}
    assert pages_free(engine)
    monkeypatch.setattr(T5Model, "encode", encode)
    names = [engine.add_request(given) for given in INPUTS]
    engine.step()
    engine.cancel(names[0])
    rest = [s.output for s in engine.run() if s.output is not None]
    expected = eecore.generate(t5, INPUTS[1:])
    assert sorted(tokens_of(rest)) == sorted(tokens_of(expected))
    assert pages_free(engine)


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


def test_the_limit_of_inputs_can_be_set(t5: eecore.Model) -> None:
    longer = t5.engine(eecore.EngineConfig(max_input_tokens=600))
    longer.add_request([1] * 600, sampling=SamplingParams(max_tokens=1))
    assert [len(s.token_ids) for s in longer.run()] == [1]
    with pytest.raises(RequestError, match="input of 601 tokens: expected at most 600, max_input"):
        longer.add_request([1] * 601)
    with pytest.raises(ValueError, match="max_input_tokens: expected None or a whole number, 1"):
        eecore.EngineConfig(max_input_tokens=0)


def test_a_decoder_given_as_t5_and_the_reverse(tmp_path: Path) -> None:
    llama, t5 = write_model(tmp_path / "llama"), write_t5(tmp_path / "t5")
    weights = [directory / "model.safetensors" for directory in (llama, t5)]
    tensors = [load_file(path) for path in weights]
    for path, other in zip(weights, tensors[::-1], strict=True):
        save_file(other, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"expected .* tensors, model.embed_tokens.weight.*"):
        eecore.load(llama)
    with pytest.raises(CheckpointError, match=r"expected .* tensors, shared.weight.* missing"):
        eecore.load(t5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feed_forward_proj": "gated-relu"}, "feed_forward_proj: supported are relu, gated-gelu"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder: supported are true, got False"),
        ({"architectures": ["T5EncoderModel"]}, "architectures: supported are .*T5EncoderModel"),
        ({"num_heads": 0}, "num_heads: expected an integer of 1.*, got 0"),
        ({"relative_attention_num_buckets": 6}, "num_buckets: expected a multiple of 4"),
        (
            {"relative_attention_max_distance": 16},
            "attention_max_distance: expected an integer of 17",
        ),
        ({"decoder_start_token_id": 320}, "decoder_start_token_id: expected an integer of 0..319"),
        ({"d_kv": 32}, r"SelfAttention.q.weight: expected \[128, 64\] as config.json says"),
    ],
)
def test_configs_that_cannot_be(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    directory = write_t5(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, **fields}))
    with pytest.raises(ModelError, match=message):
        eecore.load(directory)


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
def test_exits_are_scored_and_mapped(t5: eecore.Model, t5_directory: Path) -> None:
    given, learnt = random_prompts(12, 9, seed=8)
    (last,) = score_exits(t5.network, [Scored.of(t5.config, given, learnt)], [4])
    oracle = of_transformers(t5_directory)
    with torch.inference_mode():
        loss = oracle(input_ids=torch.tensor([given]), labels=torch.tensor([learnt])).loss
    assert last.perplexity == pytest.approx(float(loss.exp()), rel=1e-4)

    policy = ConfidentExit(0.3)
    found = map_exits(t5, "turn on the light", policy, max_tokens=8)
    (output,) = eecore.generate(t5, "turn on the light", exit=policy, max_tokens=8)
    assert [token.exit_layer for token in found.tokens[1:]] == output.exit_layers
    assert "".join(token.text for token in found.tokens[1:]) == output.text


@cpu_only
def test_the_search_of_skips_is_for_decoders(t5: eecore.Model) -> None:
    with pytest.raises(RequestError, match="expected a decoder alone, got T5ForConditional"):
        eecore.search_skipped_sublayers(t5, ["some words to look at"])


def test_skipped_sublayers_draft_all_the_same(t5: eecore.Model) -> None:
    policy = eecore.DraftAndVerify(skip_attention=(2,), skip_mlp=(2, 3), num_drafts=3)
    full = eecore.generate(t5, INPUTS, max_tokens=12)
    assert tokens_of(eecore.generate(t5, INPUTS, exit=policy, max_tokens=12)) == tokens_of(full)


def test_info_speaks_of_encoder_and_input(
    t5_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["info", str(t5_directory)]) == 0
    said = capsys.readouterr().out
    for words in (
        "T5ForConditionalGeneration",
        "4 (exit layers 1..4) of the decoder, 4 of the encoder",
        "512 tokens, 32 relative positions up to 128",
    ):
        assert words in said


@cpu_only
def test_text_streams_as_it_is_written(t5: eecore.Model) -> None:
    steps = list(eecore.stream(t5, "turn on the light", max_tokens=12))
    (output,) = eecore.generate(t5, "turn on the light", max_tokens=12)
    assert "".join(step.text for step in steps) == output.text
    pieces = itertools.chain.from_iterable(step.token_ids for step in steps)
    assert list(pieces) == output.token_ids
