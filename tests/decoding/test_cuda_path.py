"""The runtime over the CUDA kernels, emulated and on a GPU, gives the tokens of the CPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_confident_exit import linear_classifier

import eecore
import emulated
from block_heads import write_block_head
from devices import as_on_cuda, engine_of, heads_in_floats
from eagle_heads import Layout, write_eagle
from eecore import (
    ConfidentExit,
    DraftAndVerify,
    FixedExit,
    Full,
    Guide,
    HeadDrafts,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.decoding.iterate import Iterations
from head_packs import write_pack
from tiers import CUDA_BACKENDS, in_all
from tiny_models import random_prompts, write_model
from workloads import Request, serve, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")

# The last prompt has more rows than the skinny products take.
PROMPTS = random_prompts(1, 7, 40)
POLICIES = {
    "full": Full(),
    "fixed": FixedExit(2),
    "softmax_each": ConfidentExit(0.3),
    "softmax_all": ConfidentExit(0.3, batch="all"),
    "state": ConfidentExit(0.8, measure="state"),
    "classifier": ConfidentExit(0.55, measure="classifier", classifier=linear_classifier()),
    "speculative": SelfSpeculative(2, 3),
    "lookup": PromptLookup(3, min_ngram=1),
    "head": HeadDrafts(3, 0.0),
}


@pytest.fixture(scope="module")
def pack(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a draft head."""
    model = eecore.load(tiny_directory, device="cpu")
    return write_pack(tmp_path_factory.mktemp("pack"), model, taps=(2,), vocabulary_size=300)


@pytest.fixture(scope="module")
def tiny(tiny_directory: Path, pack: Path) -> eecore.Model:
    """A model with the draft head, on the CPU."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        heads_in_floats(monkeypatch)
        return eecore.load(tiny_directory, device="cpu", kv_cache_tokens=512, exits=pack)


@pytest.fixture(params=CUDA_BACKENDS)
def on_cuda(
    request: pytest.FixtureRequest,
    tiny_directory: Path,
    pack: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[eecore.Model]:
    """The tiny model on the CUDA path: on a GPU, or in the emulator on the CPU's memory.

    The emulator fails where nothing orders what kernels touch: as they overlap on a GPU.
    """
    if request.param == "emulated":
        emulated.route(monkeypatch)
        heads_in_floats(monkeypatch)
        model = eecore.load(tiny_directory, device="cpu", kv_cache_tokens=512, exits=pack)
        with emulated.checking_races():
            yield as_on_cuda(model)
        return
    yield eecore.load(tiny_directory, device="cuda", kv_cache_tokens=512, exits=pack)


@pytest.mark.parametrize(
    "mode",
    [
        *("softmax_each", "state", "head"),
        *in_all("full", "fixed", "softmax_all", "classifier", "speculative", "lookup"),
    ],
)
def test_every_mode_gives_the_tokens_of_the_cpu(
    tiny: eecore.Model, on_cuda: eecore.Model, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    policy = POLICIES[mode]
    got = eecore.generate(on_cuda, PROMPTS, exit=policy, max_tokens=6)
    monkeypatch.undo()
    expected = eecore.generate(tiny, PROMPTS, exit=policy, max_tokens=6)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert [output.exit_layers for output in got] == [output.exit_layers for output in expected]


def test_programs_in_flight_together_give_the_tokens_of_the_cpu(
    tiny: eecore.Model, on_cuda: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties count tokens that only the device knows; some requests are sampled."""
    policies = [PromptLookup(3, min_ngram=1), Full(), SelfSpeculative(2, 3), ConfidentExit(0.3)]
    counted = {"repetition_penalty": 1.3, "frequency_penalty": 0.4}
    requests = [
        Request(
            prompt,
            policy,
            SamplingParams(5 + i, ignore_eos=True, temperature=0.8 * (i > 1), seed=i, **counted),
        )
        for i, (prompt, policy) in enumerate(zip([[7, 8, 9] * 4, *PROMPTS], policies, strict=True))
    ]
    runs, launch = [], Iterations.launch

    def seen(self: Any, works: Any, after: Any = None, **more: Any) -> Any:
        flight = launch(self, works, after, **more)
        if after is not None and flight is not None:
            runs.append(len(flight.runs))
        return flight

    monkeypatch.setattr(Iterations, "launch", seen)
    got = serve(engine_of(on_cuda, ahead=True), requests)
    assert max(runs) == 3
    monkeypatch.undo()
    expected = serve(engine_of(tiny, ahead=False), requests)
    assert tokens_of(got) == tokens_of(expected)


@pytest.mark.parametrize("backend", CUDA_BACKENDS)
def test_a_head_with_keys_of_its_own_drafts_as_on_the_cpu(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    """The batch also has requests that exit early and that do not."""
    config = json.loads((tiny_directory / "config.json").read_text())
    layout = Layout(fc_norm=True, own_embeddings=True, vocabulary_size=150)
    head = write_eagle(tmp_path / "head", config, layout, taps=(1, 3))
    given = {"kv_cache_tokens": 512, "draft_head": head}
    expected = eecore.load(tiny_directory, device="cpu", **given)
    prompts = random_prompts(3, 7, 1)
    policies = [HeadDrafts(3, 0.0), ConfidentExit(0.3), Full()]
    asked = {"exit": policies, "max_tokens": 5}
    of_cpu = eecore.generate(expected, prompts, **asked)
    if backend == "emulated":
        emulated.route(monkeypatch)
        model = as_on_cuda(eecore.load(tiny_directory, device="cpu", **given))
        with emulated.checking_races():
            got = eecore.generate(model, prompts, **asked)
    else:
        got = eecore.generate(eecore.load(tiny_directory, device="cuda", **given), prompts, **asked)
    assert [output.token_ids for output in got] == [output.token_ids for output in of_cpu]
    assert of_cpu[0].stats.drafted == got[0].stats.drafted > 0


@pytest.mark.parametrize(
    "mode", ["speculative", *in_all("full", "softmax_each", "head", "verify", "lookup")]
)
def test_a_seed_draws_the_tokens_of_the_cpu(
    tiny: eecore.Model, on_cuda: eecore.Model, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The batch also has a greedy request; every filter and log-probabilities are on."""
    policy = (POLICIES | {"verify": DraftAndVerify({1}, {2}, num_drafts=3)})[mode]
    sampling = [
        SamplingParams(max_tokens=5),
        SamplingParams(max_tokens=5, temperature=0.9, seed=3, logprobs=2),
        SamplingParams(
            max_tokens=5, temperature=1.3, top_k=30, top_p=0.9, repetition_penalty=1.3, seed=4
        ),
    ]
    got = eecore.generate(on_cuda, PROMPTS, exit=policy, sampling=sampling)
    monkeypatch.undo()
    expected = eecore.generate(tiny, PROMPTS, exit=policy, sampling=sampling)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    assert got[1].logprobs == pytest.approx(expected[1].logprobs, abs=1e-4)


@pytest.mark.parametrize("mode", ["speculative", *in_all("full", "fixed")])
def test_a_prompt_scores_as_on_the_cpu(
    tiny: eecore.Model, on_cuda: eecore.Model, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """The batch also has unscored prompts; the longest prompt fills more than a slice."""
    prompts = [*PROMPTS, *random_prompts(70)]
    sampling = [SamplingParams(max_tokens=1, prompt_logprobs=count) for count in (2, None, 0)] + [
        SamplingParams(max_tokens=0, prompt_logprobs=3)
    ]
    got = eecore.generate(on_cuda, prompts, exit=POLICIES[mode], sampling=sampling)
    monkeypatch.undo()
    expected = eecore.generate(tiny, prompts, exit=POLICIES[mode], sampling=sampling)
    assert got[1].prompt_logprobs is None
    for one, other in zip(got, expected, strict=True):
        for entry, same in zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True):
            assert (entry is None) == (same is None)
            if entry is not None and same is not None:
                assert (entry.token_id, entry.rank) == (same.token_id, same.rank)
                assert entry.logprob == pytest.approx(same.logprob, abs=1e-4)
                assert entry.top_logprobs == pytest.approx(same.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("mode", ["speculative", *in_all("softmax_each", "full", "lookup")])
def test_penalties_and_guides_give_the_tokens_of_the_cpu(
    tiny: eecore.Model, on_cuda: eecore.Model, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """Each request of a batch has its own."""
    sampling = [
        SamplingParams(max_tokens=6, presence_penalty=0.7, logit_bias={7: 3.0, 9: -100.0}),
        SamplingParams(max_tokens=6, frequency_penalty=1.5, temperature=0.8, seed=2),
        SamplingParams(max_tokens=6, guide=Guide.regex("(ab|ba)+-[0-9]+")),
    ]
    got = eecore.generate(on_cuda, PROMPTS, exit=POLICIES[mode], sampling=sampling)
    monkeypatch.undo()
    expected = eecore.generate(tiny, PROMPTS, exit=POLICIES[mode], sampling=sampling)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]


def drafts_of(model: eecore.Model) -> list[tuple[list[int], list[float]]]:
    """The drafts of a head for two requests, round by round."""
    engine = model.engine()
    for prompt in PROMPTS[:2]:
        sampling = SamplingParams(max_tokens=9, ignore_eos=True)
        engine.add_request(prompt, exit=HeadDrafts(3, 0.0), sampling=sampling)
    found = []
    for _ in range(3):
        engine.step()
        aheads = [sequence.draft.ahead for sequence in engine.requests.values()]
        found += [(ahead.tokens, ahead.probabilities) for ahead in aheads if ahead is not None]
    return found


@pytest.mark.parametrize("name", ["z-lab", "speculators dspark"])
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.filterwarnings("ignore:.*expected a head for")
def test_a_block_is_drafted_as_on_the_cpu(
    name: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, head = write_model(tmp_path / "model"), tmp_path / "head"
    write_block_head(head, name)
    settings = {"kv_cache_tokens": 256, "draft_head": head}
    expected = drafts_of(eecore.load(directory, device="cpu", **settings))
    if backend == "emulated":
        emulated.route(monkeypatch)
        model = as_on_cuda(eecore.load(directory, device="cpu", **settings))
        with emulated.checking_races():
            got = drafts_of(model)
    else:
        got = drafts_of(eecore.load(directory, device="cuda", **settings))
    assert len(got) == len(expected) == 4
    for (tokens, scores), (its_tokens, its_scores) in zip(got, expected, strict=True):
        assert tokens == its_tokens
        assert scores == pytest.approx(its_scores, rel=1e-3)
