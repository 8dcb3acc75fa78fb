"""Draft heads: what they draft, the tokens of full depth, and packs that are not for a model."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eecore
from devices import check_logprobs, check_tokens, cpu_only, engine_of, heads_in_floats, load
from eecore import (
    Auto,
    EngineConfig,
    ExitError,
    Full,
    HeadDrafts,
    ModelError,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding.iterate import Iterations
from eecore.models import KVCache, load_head, recurrent_head
from eecore.models.readers.head_file import HeadFile, in_blocks, read_head_settings
from eecore.planning.proposal import MAX_AHEAD
from head_packs import Seen, reference_drafts, write_pack
from tiny_models import random_prompts, scale_layers, write_model
from tiny_t5 import write_t5
from workloads import Request, python_calls, serve, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPTS = [[7, 8, 9] * 5, *random_prompts(1, 23, 9, 31, seed=4), [3, 4, 5, 6, 3, 4]]

ATTENDED = ((0, 1), (2, 0), (2, 1))
NAMES = ["following", "noisy", "attending"]
BFLOAT16_MARGIN = 0.15  # a few of the steps that logits have


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers add little: the next token mostly depends on the last one."""
    directory = write_model(tmp_path_factory.mktemp("following"), seed=5)
    scale_layers(directory, dict.fromkeys(range(4), 0.04))
    write_pack(directory / "exits", load(directory), follows_tokens=True)
    return directory


@pytest.fixture(scope="module")
def following(directory: Path) -> eecore.Model:
    """The model with a head in its directory that is mostly right."""
    return load(directory, kv_cache_tokens=2048)


@pytest.fixture(scope="module")
def noisy(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """The model with a random head that knows few tokens."""
    pack = tmp_path_factory.mktemp("noise")
    write_pack(pack, load(directory, exits=False), taps=(1, 3), blocks=2, vocabulary_size=37)
    return load(directory, kv_cache_tokens=2048, exits=pack)


@pytest.fixture(scope="module")
def attending(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    """The model with a random head that attends to its keys, two heads of one layer among them."""
    pack = tmp_path_factory.mktemp("attending")
    write_pack(pack, load(directory, exits=False), taps=(2,), attended=ATTENDED)
    return load(directory, kv_cache_tokens=2048, exits=pack)


def outputs_of(model: eecore.Model, exit: Any, **settings: Any) -> list[eecore.Output]:
    settings = {"max_tokens": 40, "ignore_eos": True, **settings}
    return eecore.generate(model, PROMPTS, exit=exit, **settings)


def states_at_the_end(
    model: eecore.Model, tokens: list[int], ends: list[int]
) -> tuple[list[Any], Seen]:
    """The last token's states [hidden_size] after so many layers, and keys of all tokens."""
    network, count = model.network, len(tokens)
    kv = KVCache.allocate(network.config, 1, count, device=network.device, dtype=network.dtype)
    batch = network.whole_text(count)
    hidden, begin, states = network.embed(torch.tensor(tokens)), 0, []
    for end in ends:
        hidden = network.layers(begin, end, hidden, kv, batch)
        states.append(hidden[-1].clone())
        begin = end
    attended = model.network.draft_head.settings.attended
    keys = [(kv.k[layer, 0, :, head], kv.v[layer, 0, :, head]) for layer, head in attended]
    return states, Seen(keys, network.cos_sin(count + MAX_AHEAD, 0))


@cpu_only
@pytest.mark.parametrize("num_spare", [0, 20, 512])
@pytest.mark.parametrize("bits", [32, 4])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_the_formula(
    name: str,
    bits: int,
    num_spare: int,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All drafts of a batch are checked after every round."""
    model = request.getfixturevalue(name)
    pack = model.network.draft_head.path
    monkeypatch.setattr(recurrent_head, "NUM_SPARE", num_spare)
    if bits == 32:
        heads_in_floats(monkeypatch)
    head = load_head(pack, model.network)
    assert (head._head.table is None) == (bits == 32)
    others = model.config.vocab_size - len(head.vocabulary)
    num_tokens = len(head.vocabulary) + (min(others, num_spare) if bits == 4 else 0)
    assert len(head.tokens) == num_tokens
    monkeypatch.setattr(model.network, "draft_head", head)
    engine = engine_of(model)
    for prompt in PROMPTS[:3]:
        engine.add_request(
            prompt,
            exit=HeadDrafts(MAX_AHEAD, 0.0),
            sampling=SamplingParams(max_tokens=24, ignore_eos=True),
        )
    checked = same = 0
    while engine.has_unfinished:
        engine.step()
        for sequence in engine.requests.values():
            ahead = sequence.draft and sequence.draft.ahead
            if ahead is None:
                continue
            assert ahead.num_tokens == sequence.num_tokens
            tokens = sequence.tokens(0, sequence.num_tokens)
            states, seen = states_at_the_end(model, tokens[:-1], list(head.settings.taps))
            assert len(ahead.tokens) == min(MAX_AHEAD, sequence.tokens_left - 1)
            drafts, probabilities = reference_drafts(
                *(pack, model, states, tokens[-1], len(ahead.tokens)),
                packed=bits == 4,
                seen=seen if head.attends else None,
                tokens=head.tokens,
            )
            checked += 1
            if bits == 4 and ahead.tokens != drafts:
                continue
            same += 1
            assert ahead.tokens == drafts
            assert ahead.probabilities == pytest.approx(
                probabilities, rel=1e-3 if bits == 32 else 0.2
            )
            if bits == 4 and num_spare == 512:
                assert {*tokens} <= {*head.tokens.tolist()}
    assert checked > 8
    assert same > 0.5 * checked


POLICIES = [
    HeadDrafts(),
    HeadDrafts(1, 0.0),
    HeadDrafts(99, 0.0),
    HeadDrafts(3, 0.9),
    HeadDrafts(3, 1.0),
    Auto(),
    Auto(lookup=False),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_greedy_output_is_that_of_full(
    name: str, policy: Any, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(name)
    expected = outputs_of(model, Full())
    for _ in range(2):
        together = outputs_of(model, policy)
        assert tokens_of(together) == tokens_of(expected)
    for prompt, full in zip(PROMPTS, expected, strict=True):
        (alone,) = eecore.generate(model, prompt, exit=policy, max_tokens=40, ignore_eos=True)
        assert alone.token_ids == full.token_ids


def test_drafts_that_stand_save_rounds(
    directory: Path, noisy: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads_in_floats(monkeypatch)  # what follows is to follow exactly
    outputs = outputs_of(load(directory, kv_cache_tokens=2048), HeadDrafts(4, 0.0))
    for output in outputs:
        stats = output.stats
        assert stats.accepted > 0.6 * stats.drafted > 0
        rounds = len(output.token_ids) - 1 - stats.accepted
        assert rounds < 22
        assert stats.layers_run == 4 * (rounds + stats.drafted)
        assert output.exit_layers.count(0) == stats.accepted
        assert stats.contract == "draft head (4 drafts): lossless"
    wrong = outputs_of(noisy, HeadDrafts(4, 0.0))
    assert sum(output.stats.accepted for output in wrong) < 0.1 * sum(
        output.stats.drafted for output in wrong
    )
    assert sum(output.stats.drafted for output in outputs_of(noisy, HeadDrafts(4, 1.0))) == 0


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 5, "repetition_penalty": 1.3},
        {"temperature": 2.0, "top_p": 0.8, "min_p": 0.01, "logprobs": 2},
        {"repetition_penalty": 1.5, "logprobs": 0},
    ],
)
@pytest.mark.parametrize("policy", [HeadDrafts(5, 0.0), Auto()])
def test_whatever_is_drawn_is_drawn_without_drafts(
    following: eecore.Model, filters: dict[str, Any], policy: Any
) -> None:
    sampling = [
        SamplingParams(max_tokens=40, ignore_eos=True, seed=seed, **filters)
        for seed in range(len(PROMPTS))
    ]
    expected, got = (
        eecore.generate(following, PROMPTS, exit=exit, sampling=sampling)
        for exit in (Full(), policy)
    )
    if isinstance(policy, HeadDrafts):
        assert sum(output.stats.drafted for output in got) > 0
    assert tokens_of(got) == tokens_of(expected)
    for one, other in zip(got, expected, strict=True):
        check_logprobs(one, other)


def test_a_drafted_end_ends_the_text(following: eecore.Model) -> None:
    for prompt, output in zip(PROMPTS, outputs_of(following, Full()), strict=True):
        tokens = output.token_ids
        for stop in sorted(set(tokens)):
            (got,) = eecore.generate(
                following,
                prompt,
                exit=HeadDrafts(8, 0.0),
                max_tokens=40,
                ignore_eos=True,
                stop_token_ids=[stop],
            )
            assert got.token_ids == tokens[: tokens.index(stop) + 1]
            assert got.finish_reason == "stop"


def test_all_policies_share_a_batch_and_pages_are_few(following: eecore.Model) -> None:
    """Preempted requests go on where they were."""
    policies = [HeadDrafts(8, 0.0), Full(), PromptLookup(3), SelfSpeculative(2, 3), Auto()]
    prompts = PROMPTS[: len(policies)]
    expected = tokens_of(
        eecore.generate(following, prompts, exit=Full(), max_tokens=30, ignore_eos=True)
    )
    engine = engine_of(following, EngineConfig(kv_cache_tokens=100, page_size=4, max_num_seqs=4))
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    requests = [Request(*asked, sampling) for asked in zip(prompts, policies, strict=True)]
    outputs = serve(engine, requests)
    assert tokens_of(outputs) == expected
    assert sum(output.stats.preemptions for output in outputs) > 0


def served(
    model: eecore.Model,
    policies: list[Any],
    *,
    ahead: bool,
    stops: Any = (),
    temperature: float = 0.0,
    **settings: int,
) -> list[eecore.Output]:
    """Requests of different lengths, by an engine that launches runs ahead or waits for each."""
    engine = engine_of(model, EngineConfig(**{"kv_cache_tokens": 2048, **settings}), ahead=ahead)
    requests = [
        Request(
            prompt,
            policies[i % len(policies)],
            SamplingParams(
                max_tokens=17 + 5 * i,
                ignore_eos=True,
                stop_token_ids=tuple(stops),
                temperature=temperature,
                logprobs=1 if temperature else None,
                seed=i,
            ),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    outputs = serve(engine, requests)
    assert engine.pages.num_free == engine.pages.num_pages
    return outputs


@pytest.mark.parametrize(
    "policies",
    [
        [HeadDrafts()],
        [HeadDrafts(1, 0.0)],
        [HeadDrafts(99, 0.0)],
        [HeadDrafts(3, 0.9)],
        [HeadDrafts(3, 1.0)],
        [HeadDrafts(5, 0.0), HeadDrafts(2, 0.5)],
        [HeadDrafts(4, 0.0), Full()],
        [HeadDrafts(4, 0.0), PromptLookup(3)],
        [HeadDrafts(4, 0.0), SelfSpeculative(2, 3)],
    ],
)
@pytest.mark.parametrize("name", ["following", "noisy"])
def test_drafts_that_stay_on_the_device(
    name: str, policies: list[Any], request: pytest.FixtureRequest
) -> None:
    """A round launched before the last one's result is known drafts and accepts the same."""
    model = request.getfixturevalue(name)
    expected = served(model, policies, ahead=False)
    got = served(model, policies, ahead=True)
    assert tokens_of(got) == tokens_of(expected)
    for one, other in zip(got, expected, strict=True):
        if PromptLookup(3) in policies:  # other drafts are looked up while a round is in flight
            continue
        assert (one.stats.drafted, one.stats.accepted) == (
            other.stats.drafted,
            other.stats.accepted,
        )
        assert one.exit_layers == other.exit_layers
    stops = [output.token_ids[len(output.token_ids) // 2] for output in expected]
    ended = served(model, policies, ahead=True, stops=stops)
    for output, whole in zip(ended, expected, strict=True):
        end = min(whole.token_ids.index(s) for s in stops if s in whole.token_ids)
        assert output.token_ids == whole.token_ids[: end + 1]
        assert output.finish_reason == "stop"
    few = served(model, policies, ahead=True, kv_cache_tokens=100, page_size=4, max_num_seqs=4)
    assert tokens_of(few) == tokens_of(expected)
    assert sum(output.stats.preemptions for output in few) > 0


def test_what_is_drawn_after_drafts_on_the_device(following: eecore.Model) -> None:
    policies = [HeadDrafts(4, 0.0), HeadDrafts(2, 0.3)]
    got, expected, full = (
        served(following, each, ahead=ahead, temperature=0.8)
        for each, ahead in ((policies, True), (policies, False), ([Full()], False))
    )
    assert tokens_of(got) == tokens_of(expected) == tokens_of(full)
    assert sum(output.stats.accepted for output in got) > 0
    for one, other in zip(got, expected, strict=True):
        assert one.stats.drafted == other.stats.drafted
        check_logprobs(one, other)


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "landed"])
def test_rows_that_go_on_cost_few_calls(following: eecore.Model, ahead: bool) -> None:
    for rows in (1, 8):
        engine = engine_of(following, EngineConfig(kv_cache_tokens=2048), ahead=ahead)
        for prompt in random_prompts(*[5] * rows, seed=rows):
            sampling = SamplingParams(max_tokens=100, ignore_eos=True)
            engine.add_request(prompt, exit=HeadDrafts(3, 0.0), sampling=sampling)
        for _ in range(4):
            engine.step()
        assert python_calls(engine) <= 60 + 6 * rows
        list(engine.run())


@pytest.mark.parametrize("guided", [False, True], ids=["free", "guided"])
def test_a_round_is_launched_while_another_is_in_flight(
    following: eecore.Model, monkeypatch: pytest.MonkeyPatch, guided: bool
) -> None:
    """Not with a guide, which has to see what a head drafted."""
    launched, launch = [], Iterations.launch

    def seen(self: Any, works: Any, after: Any = None, **more: Any) -> Any:
        launched.append((after is not None, launch(self, works, after, **more)))
        return launched[-1][1]

    monkeypatch.setattr(Iterations, "launch", seen)
    engine = engine_of(following, ahead=True)
    guide = {"guide": eecore.Guide.regex("[a-z]*")} if guided else {}
    for prompt in PROMPTS:
        sampling = SamplingParams(max_tokens=40, ignore_eos=not guided, **guide)
        engine.add_request(prompt, exit=HeadDrafts(3, 0.0), sampling=sampling)
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
    overlapped = sum(after and flight is not None for after, flight in launched)
    assert overlapped == 0 if guided else overlapped > 0.7 * steps


@cpu_only
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_a_quantised_model(directory: Path, weights: str) -> None:
    """The same pack, and an LM head of 8 bits."""
    model = load(directory, kv_cache_tokens=2048, weights=weights)
    assert model.network.draft_head is not None
    expected = outputs_of(model, Full())
    got = outputs_of(model, HeadDrafts(4, 0.0))
    assert tokens_of(got) == tokens_of(expected)
    assert sum(o.stats.accepted for o in got) > 0.5 * sum(o.stats.drafted for o in got)


def test_in_bfloat16(directory: Path) -> None:
    model = load(directory, kv_cache_tokens=2048, dtype="bfloat16")
    expected = outputs_of(model, Full())
    got = outputs_of(model, HeadDrafts(4, 0.0))
    check_tokens(model, PROMPTS, tokens_of(got), tokens_of(expected), BFLOAT16_MARGIN)
    assert sum(output.stats.accepted for output in got) > 0


# Where heads are found


def test_a_pack_is_named_found_or_left(directory: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(directory, tmp_path / "model")
    assert load(copy).network.draft_head is not None
    assert load(copy, exits=False).network.draft_head is None
    shutil.move(copy / "exits", tmp_path / "pack")
    model = load(copy)
    assert model.network.draft_head is None
    for pack in (tmp_path / "pack", str(tmp_path / "pack")):
        assert load(copy, exits=pack).network.draft_head is not None
    with pytest.raises(ExitError, match=r"HeadDrafts: expected a model with a draft head"):
        eecore.generate(model, [1], exit=HeadDrafts())


@cpu_only
def test_a_head_in_blocks_drafts_as_the_one_in_floats(directory: Path, tmp_path: Path) -> None:
    plain = eecore.load(directory, dtype="float32", exits=False)
    pack = write_pack(tmp_path / "pack", plain, taps=(2,), inner=32, attended=((1, 0), (3, 1)))
    texts = []
    for stored in (lambda tensors: tensors, in_blocks):
        file = pack / "head.safetensors"
        save_file(stored(load_file(file)), file)
        model = eecore.load(directory, dtype="float32", exits=pack)
        outputs = eecore.generate(model, [[1, 2, 3]], max_tokens=12, exit=HeadDrafts(3, 0.0))
        texts.append((outputs[0].token_ids, outputs[0].stats.drafted, outputs[0].stats.accepted))
    assert texts[0] == texts[1]
    settings = read_head_settings(pack)
    blocks = HeadFile(pack, settings)
    assert blocks.tensors["mlp.down"].dtype == torch.uint8
    assert in_blocks(blocks.tensors).keys() == blocks.tensors.keys()
    again = in_blocks(blocks.floats)["mlp.gate"]
    assert again.shape == blocks.tensors["mlp.gate"].shape


def test_beside_a_gguf_file(directory: Path, tmp_path: Path) -> None:
    from tiny_gguf import write_gguf

    path = write_gguf(tmp_path / "model.gguf", directory)
    assert load(path).network.draft_head is None
    shutil.copytree(directory / "exits", tmp_path / "model.exits")
    model = load(path, kv_cache_tokens=2048)
    expected = tokens_of(outputs_of(model, Full()))
    assert tokens_of(outputs_of(model, HeadDrafts(4, 0.0))) == expected


def test_a_t5_has_none(tmp_path: Path, directory: Path) -> None:
    path = write_t5(tmp_path)
    with pytest.raises(ModelError, match="exits: expected a model without an encoder"):
        load(path, exits=directory / "exits")
    with pytest.raises(ExitError, match="expected a model with a draft head"):
        eecore.generate(load(path), [5], exit=HeadDrafts())


def changed(pack: Path, **fields: Any) -> None:
    content = json.loads((pack / "head.json").read_text())
    for name, value in fields.items():
        first, _, second = name.partition("__")
        if second:
            content[first][second] = value
        else:
            content[first] = value
    (pack / "head.json").write_text(json.dumps(content))


def truncated(pack: Path) -> None:
    path = pack / "head.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def with_tensor(name: str, value: Any) -> Any:
    def change(pack: Path) -> None:
        tensors = load_file(pack / "head.safetensors")
        old = tensors.pop(name)
        new = value(old)
        if new is not None:
            tensors[name] = new
        save_file(tensors, pack / "head.safetensors")

    return change


def starting_at(first: int) -> Any:
    return lambda ids: torch.arange(first, first + len(ids), dtype=torch.int32)


def attending_to(layers: list[int], key_heads: list[int], queries: int = 128) -> Any:
    attention = {"layers": layers, "key_heads": key_heads, "queries": queries}
    return lambda pack: changed(pack, version=2, attention=attention)


BAD_PACKS: dict[str, tuple[Any, str]] = {
    "no json": (lambda p: (p / "head.json").unlink(), "exits: expected a directory with head.json"),
    "not json": (lambda p: (p / "head.json").write_text("{"), "head.json: expected JSON"),
    "another version": (lambda p: changed(p, version=3), "version: expected an integer of 1..2"),
    "attends to nothing": (lambda p: changed(p, version=2), "attention: expected an object"),
    "a layer too deep": (attending_to([4], [0]), "layers: expected a list of integers of 0..3"),
    "no layers": (attending_to([], []), "attention.layers: expected 1..64, as many as key_heads"),
    "fewer key heads": (attending_to([1, 2], [0]), "attention.layers: expected 1..64, as many as"),
    "a key head too many": (attending_to([1], [2]), "attention.key_heads: expected 0..1, got 2"),
    "other queries": (
        attending_to([1], [1], 64),
        "attention.queries: expected 128, as the",
    ),
    "no attention": (attending_to([1], [1]), "attention.norm: expected a tensor, got none"),
    "another kind": (lambda p: changed(p, kind="tree"), "kind: expected one of state and token"),
    "another model": (
        lambda p: changed(p, model__digest="00"),
        "model.digest: expected .* got 00: it was trained for another model",
    ),
    "more layers": (
        lambda p: changed(p, model__num_layers=9, taps=[9]),
        "model.num_layers: expected 4, as the model has it, got 9",
    ),
    "a tap too deep": (lambda p: changed(p, taps=[2, 5]), "taps: expected a list of integers"),
    "no last tap": (lambda p: changed(p, taps=[2]), "taps: expected ascending layers, the last"),
    "taps twice": (lambda p: changed(p, taps=[4, 4]), "taps: expected ascending layers"),
    "wide": (lambda p: changed(p, intermediate_size=25), r"mlp.gate: expected \[1, 25, 64\]"),
    "vocabulary": (lambda p: changed(p, vocabulary_size=9), r"vocabulary: expected \[9\], got"),
    "no file": (lambda p: (p / "head.safetensors").unlink(), "head.safetensors: .*got nothing"),
    "truncated": (truncated, "head.safetensors: expected a whole safetensors file"),
    "a tensor less": (with_tensor("norm", lambda _: None), "norm: expected a tensor, got none"),
    "not finite": (with_tensor("norm", lambda t: t * float("nan")), "norm: expected finite"),
    "a block less": (
        with_tensor("mlp.gate", lambda _: torch.zeros(1, 24, 20, dtype=torch.uint8)),
        r"mlp.gate: expected \[1, 24, 40\], got \[1, 24, 20\]",
    ),
    "blocks that are not finite": (
        with_tensor("mlp.gate", lambda _: torch.full((1, 24, 40), 255, dtype=torch.uint8)),
        "mlp.gate: expected finite",
    ),
    "a norm in blocks": (
        with_tensor("norm", lambda _: torch.zeros(40, dtype=torch.uint8)),
        "norm: expected a tensor of floats",
    ),
    "whole numbers": (with_tensor("norm", lambda t: t.int()), "norm: expected a tensor of floats"),
    "ids beyond": (
        with_tensor("vocabulary", starting_at(1)),
        r"vocabulary: expected ids of 0\.\.319, got 320",
    ),
    "ids below": (with_tensor("vocabulary", starting_at(-1)), r"ids of 0\.\.319, got -1"),
    "ids twice": (with_tensor("vocabulary", lambda t: t // 2), "expected ids in ascending order"),
}


@pytest.mark.parametrize("name", BAD_PACKS)
def test_a_bad_pack_is_named_and_one_beside_the_model_passed_over(
    name: str, directory: Path, tmp_path: Path
) -> None:
    spoil, message = BAD_PACKS[name]
    copy = shutil.copytree(directory, tmp_path / "model")
    spoil(copy / "exits")
    with pytest.raises(ModelError, match=message):
        load(copy, exits=copy / "exits")
    if name == "no json":  # then there is none
        assert load(copy).network.draft_head is None
        return
    with pytest.warns(UserWarning, match=message):
        assert load(copy).network.draft_head is None


def test_a_head_attends_to_no_layer_with_a_window(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model", "mistral")
    model = load(directory)
    assert model.network.config.layer_windows[1]
    pack = write_pack(tmp_path / "pack", model, attended=((1, 0),))
    with pytest.raises(ModelError, match=r"attention\.layers: expected layers that attend to"):
        load(directory, exits=pack)


def test_a_path_that_is_none(directory: Path, tmp_path: Path) -> None:
    for exits, message in ((tmp_path / "nowhere", "head.json"), (7, "exits: "), (True, "exits: ")):
        with pytest.raises(ModelError, match=re.escape(message)):
            load(directory, exits=exits)


def test_info_says_what_head_there_is(
    directory: Path, tiny_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eecore.cli.app import run

    assert run(["info", str(directory)]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "draft head" in line)
    assert "beside it; 320 tokens, drafts right 50%, 40%, 30%" in line
    assert run(["info", str(directory), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["draft_head"]["taps"] == [4]
    assert run(["info", str(tiny_directory)]) == 0
    assert "draft head" not in capsys.readouterr().out


def test_generate_takes_a_pack_or_none(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from eecore.cli.app import run

    command = ["generate", str(directory), "abc", "-n", "12", "--ignore-eos", "-t", "0"]

    def text_of(*options: str) -> str:
        assert run([*command, *options]) == 0
        return capsys.readouterr().out

    plain = text_of()
    for options in ((), ("--exits", str(directory / "exits"))):
        assert text_of("--exit", "head:3", *options) == plain
    assert text_of("--exit", "auto", "--exits", "none") == plain
    for exits, message in (("none", "expected a model with a draft head"), (str(tmp_path), "got")):
        assert run([*command, "--exit", "head", "--exits", exits]) != 0
        assert message in capsys.readouterr().err
