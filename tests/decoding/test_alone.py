"""Mixed = alone = ``Full``: a request's output depends on nothing that goes on around it.

Tokens, log-probabilities and depths of each request of a drawn workload are those of the request
alone, to the last bit; in lossless modes they are those of ``Full``. Log-probabilities are
compared because tokens alone would hide most differences.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_confident_exit import linear_classifier

import eecore
from devices import cpu_only, engine_of
from eecore import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    EngineConfig,
    FixedExit,
    Full,
    HeadDrafts,
    Output,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore.exits import Exit
from head_packs import write_pack
from looped_models import write_looped, write_nanbeige
from tiers import runs_all
from tiny_families import write_family
from tiny_models import FAMILIES, random_prompts, scale_layers, write_model
from tiny_t5 import write_t5
from workloads import Driver, Request, check_books, same, serve

pytestmark = cpu_only  # elsewhere a row rounds by the number of rows

NUM_EXAMPLES, NUM_EXAMPLES_OF_ALL = 25, 1000
"""Examples of each model: in the short suite, and with --all."""


@dataclass(frozen=True)
class Kind:
    """A small random model and how it is loaded."""

    family: str
    dtype: str = "float32"
    weights: str | None = None
    cache: str = "auto"
    ends: tuple[int, ...] = (1, 2, 3, 4)
    """Exit layers of the model."""
    vocab_size: int = 320
    has_scores: bool = True
    """The engine can score prompts."""

    @property
    def has_head(self) -> bool:
        """A family of decoders has a draft head; T5 and looped models have none."""
        return self.family in FAMILIES

    def write(self, directory: Path) -> None:
        """Write it; its last layers change little."""
        if self.family == "ouro":
            write_looped(directory)
        elif self.family == "nanbeige":
            write_nanbeige(directory, num_hidden_layers=2, num_loops=3)
        elif self.family == "t5":
            write_t5(directory, deep_gain=0.3)
        elif not self.has_head:
            write_family(directory, self.family)
        else:
            dtype = getattr(torch, self.dtype)
            write_model(directory, self.family, seed=4, hidden_size=128, dtype=dtype)
            scale_layers(directory, {2: 0.2, 3: 0.1})
            bare = eecore.load(directory, device="cpu", exits=False)
            write_pack(
                directory / "exits", bare, taps=(2,), vocabulary_size=300, follows_tokens=True
            )

    def policies(self, hidden_size: int) -> list[Exit]:
        """Policies of every kind that the model can run."""
        first, second, third, *_ = self.ends
        policies = [*self.lossless(), FixedExit(second), ConfidentExit(0.3, decay_tau=1.0)]
        classifier = linear_classifier(hidden_size)
        policies += [
            ConfidentExit(0.97, measure="state", exit_points=(first, third)),
            ConfidentExit(0.5, measure="classifier", classifier=classifier, min_exit_layer=second),
        ]
        if self.family == "ouro":
            policies.append(ConfidentExit(0.5, "gate"))
        return [*policies, ConfidentExit(0.3, measure="cut")] if self.has_head else policies

    def lossless(self) -> list[Exit]:
        """Policies whose greedy tokens are those of ``Full``."""
        first, second, *_ = self.ends
        policies = [
            Full(),
            PromptLookup(3, min_ngram=1),
            SelfSpeculative(second, 4),
            SelfSpeculative(first, 6, draft_threshold=0.2),
            SelfSpeculative(first, 3, reuse=False),
            DraftAndVerify({3}, {2}, num_drafts=4),
            Auto(3, exit_layers=(second,)),
        ]
        return [*policies, HeadDrafts(3, 0.01)] if self.has_head else policies


KINDS = {
    "llama": Kind("llama"),
    "bfloat16": Kind("llama_tied", dtype="bfloat16"),
    "int8": Kind("qwen3", weights="int8"),
    "int4-bfloat16": Kind("llama_biased", dtype="bfloat16", weights="int4"),
    "windows-fp8": Kind("qwen2_windows", cache="fp8"),
    "gemma3": Kind("gemma3", vocab_size=256),
    "lfm2": Kind("lfm2", vocab_size=256),
    "lfm2-bfloat16": Kind("lfm2_odd", dtype="bfloat16", vocab_size=256),
    "lfm2-int8": Kind("lfm2_grouped", weights="int8", vocab_size=256),
    "lfm2-fp8": Kind("lfm2_odd", cache="fp8", vocab_size=256),
    "qwen3.5": Kind("qwen3_5", vocab_size=256),
    "qwen3.5-bfloat16": Kind("qwen3_5_odd", dtype="bfloat16", vocab_size=256),
    "qwen3.5-int8": Kind("qwen3_5_grouped", weights="int8", vocab_size=256),
    "qwen3.5-fp8": Kind("qwen3_5_odd", cache="fp8", vocab_size=256),
    "ouro": Kind("ouro", ends=(2, 4, 6), vocab_size=96),
    "nanbeige-int4": Kind("nanbeige", weights="int4", ends=(2, 4, 6)),
    "t5": Kind("t5", has_scores=False),
}
BEGINNING = random_prompts(30, seed=7, vocab_size=96)[0]
LOOPING = [7, 8, 9] * 8


def requests_of(kind: Kind, policies: list[Exit]) -> st.SearchStrategy[Request]:
    """Requests for a model, short or long, many with the same beginning."""
    prompts = st.one_of(
        st.lists(st.integers(0, min(kind.vocab_size, 256) - 1), min_size=1, max_size=12),
        st.integers(1, 30).map(lambda n: BEGINNING[:n]),
        st.integers(1, 24).map(lambda n: LOOPING[:n]),
    )
    chosen: dict[str, st.SearchStrategy[Any]] = {
        "temperature": st.sampled_from((0.0, 0.7, 1.3)),
        "top_k": st.just(40),
        "top_p": st.just(0.9),
        "repetition_penalty": st.just(1.3),
        "frequency_penalty": st.just(0.5),
        "logit_bias": st.sampled_from((((7, 30.0),), ((11, 30.0), (90, -100.0)))),
        "logprobs": st.sampled_from((0, 3)),
        "stop_token_ids": st.just(tuple(range(0, kind.vocab_size, 9))),
        "seed": st.integers(0, 3),
    }
    if kind.has_scores:
        chosen["prompt_logprobs"] = st.just(1)
    usual = {"ignore_eos": True, "seed": 0, "logprobs": 2}
    return st.builds(
        lambda prompt, policy, way: Request(prompt, policy, SamplingParams(**{**usual, **way})),
        prompts,
        st.sampled_from(policies),
        st.fixed_dictionaries({"max_tokens": st.integers(1, 20)}, optional=chosen),
    )


# Few pages, pages of one position, chunks, batches cut short by the budget; room for one request.
configs = st.builds(
    EngineConfig,
    kv_cache_tokens=st.sampled_from((64, 96, 2048)),
    page_size=st.sampled_from((1, 4, 16)),
    max_prefill_chunk=st.sampled_from((1, 5, 16, 512)),
    max_batch_tokens=st.sampled_from((8, 24, 4096)),
    max_num_seqs=st.sampled_from((2, 4, 64)),
    prefix_cache=st.booleans(),
)
EVENTS = ("add", "add", "add", "step", "step", "step", "cancel", "hold", "resume", "reset")
events = st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 6)), max_size=24)


@dataclass
class World:
    """A model, and the outputs of requests that run alone."""

    kind: Kind
    model: eecore.Model
    outputs: dict[str, Output] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policies = self.kind.policies(self.model.config.hidden_size)
        self.lossless = self.kind.lossless()
        self._engine = self.engine(EngineConfig(512, prefix_cache=False), ahead=False)

    def engine(self, config: EngineConfig, *, ahead: bool | None = None) -> eecore.Engine:
        config = replace(config, kv_cache_dtype=self.kind.cache)
        return engine_of(self.model, config, ahead=ahead)

    def alone(self, request: Request) -> Output:
        """The output of a request that runs alone."""
        key = repr(request)
        if key not in self.outputs:
            (self.outputs[key],) = serve(self._engine, [request])
        return self.outputs[key]

    def check(self, output: Output, request: Request) -> None:
        """An output has to be that of the request alone, or its beginning if cancelled."""
        alone = self.alone(request)
        if output.finish_reason == "cancelled":
            assert output.token_ids == alone.token_ids[: len(output.token_ids)]
            return
        assert output.error is None
        assert same(output, alone), (output, alone)
        assert (output.logprobs, output.top_logprobs) == (alone.logprobs, alone.top_logprobs)
        if not (output.stats.drafted or alone.stats.drafted):
            assert output.confidences == alone.confidences
            assert output.stats.layers_run == alone.stats.layers_run
        is_greedy = request.sampling.temperature == 0.0
        if request.exit.samples_as_full or (is_greedy and request.exit in self.lossless):
            full = self.alone(replace(request, exit=Full()))
            assert (output.token_ids, output.text) == (full.token_ids, full.text)
            assert (output.logprobs, output.top_logprobs) == (full.logprobs, full.top_logprobs)
            assert output.prompt_logprobs == full.prompt_logprobs


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    kind: Kind = request.param
    directory: Path = tmp_path_factory.mktemp("alone")
    kind.write(directory)
    given: dict[str, Any] = {"dtype": kind.dtype, "weights": kind.weights}
    model = eecore.load(
        directory, device="cpu", kv_cache_tokens=512, kv_cache_dtype=kind.cache, **given
    )
    return World(kind, model)


def run(
    world: World,
    asked: list[Request],
    config: EngineConfig,
    happening: list[tuple[str, int]],
    ahead: bool,
) -> None:
    """Serve requests that come, are cancelled and put on hold as ``happening`` says."""
    engine = world.engine(config, ahead=ahead)
    driver, waiting = Driver(engine), list(range(len(asked)))
    for what, number in happening:
        name = str(number % len(asked))
        if what == "add" and waiting:
            driver.add(asked[waiting[0]], str(waiting.pop(0)))
        elif what == "cancel" and name in driver.given and name not in driver.outputs:
            driver.cancel(name)
        elif what == "hold":
            driver.hold(name)
        elif what == "resume":
            driver.resume(name)
        elif what == "reset":
            engine.reset_prefix_cache()
        else:
            driver.step()
        check_books(engine)
    for number in waiting:
        driver.add(asked[number], str(number))
    for name in driver.given:
        driver.resume(name)
    driver.finish()
    for name, output in driver.outputs.items():
        world.check(output, asked[int(name)])


def test_a_request_gives_in_any_company_what_it_gives_alone(
    world: World, pytestconfig: pytest.Config
) -> None:
    count = NUM_EXAMPLES_OF_ALL if runs_all(pytestconfig) else NUM_EXAMPLES

    @settings(
        max_examples=int(os.environ.get("EECORE_EXAMPLES", count)),
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(
        asked=st.lists(requests_of(world.kind, world.policies), min_size=1, max_size=7),
        config=configs,
        happening=events,
        ahead=st.booleans(),
        num_threads=st.sampled_from((1, 1, 2)),
    )
    def holds(
        asked: list[Request],
        config: EngineConfig,
        happening: list[tuple[str, int]],
        ahead: bool,
        num_threads: int,
    ) -> None:
        torch.set_num_threads(num_threads)
        run(world, asked, config, happening, ahead)

    holds()


@pytest.mark.parametrize("num_rows", [28, 112, 224])
def test_verifications_of_any_size_round_as_one_row(world: World, num_rows: int) -> None:
    """Batches far larger than a tile of a product: verifications of 6 drafts and a token."""
    lengths = (1 + 7 * i % 61 for i in range(num_rows // 7))
    prompts = random_prompts(*lengths, seed=5, vocab_size=96)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=4)
    for policy in (Full(), SelfSpeculative(world.kind.ends[1], 6)):
        asked = [Request(prompt, policy, sampling) for prompt in prompts]
        outputs = serve(world.engine(EngineConfig(kv_cache_tokens=8192)), asked)
        for request, output in zip(asked, outputs, strict=True):
            world.check(output, request)
