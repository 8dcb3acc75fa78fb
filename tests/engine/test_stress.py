"""Thousands of random steps with small caches: no page is lost and no output changes."""

from __future__ import annotations

import random

import pytest
from test_confident_exit import mlp_classifier

import eecore
from devices import load
from eecore import EngineConfig, ExitClassifier, Output, SamplingParams
from head_packs import write_pack
from tiers import runs_all
from tiny_models import random_prompts, scale_layers, write_model
from workloads import SMALL_CACHES, Request, check_books, policies

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_STEPS = 10_000
CLASSIFIER: ExitClassifier = mlp_classifier()
POLICIES = policies(CLASSIFIER)
CONFIGS = [
    *SMALL_CACHES,
    EngineConfig(kv_cache_tokens=36, page_size=2, max_num_seqs=4, max_batch_tokens=8),
]


def make_requests(count: int) -> list[Request]:
    rng = random.Random(4)
    requests = []
    for i, prompt in enumerate(
        random_prompts(*(rng.choice((1, 2, 5, 9, 17)) for _ in range(count)))
    ):
        sampling = SamplingParams(
            max_tokens=rng.choice((1, 2, 5, 9, 14)),
            ignore_eos=True,
            temperature=rng.choice((0.0, 0.0, 0.7)),
            top_k=rng.choice((0, 20)),
            repetition_penalty=rng.choice((1.0, 1.0, 1.3)),
            stop_token_ids=rng.sample(range(320), 6),
            seed=i,
        )
        requests.append(Request(prompt, POLICIES[i % len(POLICIES)], sampling))
    return requests


REQUESTS = make_requests(64)


def same(output: Output, alone: Output) -> bool:
    """Whether outputs are equal, except for the drafted tokens, which shortened drafts change."""
    drafting = output.stats.drafted or alone.stats.drafted
    layers_equal = output.exit_layers == alone.exit_layers
    return (
        output.token_ids == alone.token_ids
        and output.text == alone.text
        and output.finish_reason == alone.finish_reason
        and (layers_equal or bool(drafting))
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> eecore.Model:
    directory = write_model(tmp_path_factory.mktemp("shallow"), num_hidden_layers=3, seed=8)
    scale_layers(directory, {1: 0.3, 2: 0.3})
    write_pack(directory / "exits", load(directory), taps=(2,), follows_tokens=True)
    return load(directory, kv_cache_tokens=64)


@pytest.fixture(scope="module")
def alone(model: eecore.Model) -> list[Output]:
    """The output of each request when it runs alone."""
    return [
        eecore.generate(model, [r.prompt], exit=r.exit, sampling=r.sampling)[0] for r in REQUESTS
    ]


@pytest.mark.parametrize("config", CONFIGS)
def test_random_steps(
    model: eecore.Model, alone: list[Output], config: EngineConfig, pytestconfig: pytest.Config
) -> None:
    num_steps = NUM_STEPS if runs_all(pytestconfig) else NUM_STEPS * 6 // 10
    rng = random.Random(7)
    engine = model.engine(config)
    running: dict[str, int] = {}
    finished = cancelled = preemptions = steps = 0
    held: list[str] = []

    def check(output: Output) -> None:
        nonlocal preemptions
        preemptions += output.stats.preemptions
        expected = alone[running.pop(output.request_id)]
        if output.finish_reason == "cancelled":
            count = len(output.token_ids)
            assert output.token_ids == expected.token_ids[:count]
        else:
            assert same(output, expected), (output, expected)

    while steps < num_steps // len(CONFIGS):
        # Keep a few requests waiting; now and then cancel one, whatever it is doing.
        while len(running) < 5 and rng.random() < 0.5:
            chosen = rng.randrange(len(REQUESTS))
            request = REQUESTS[chosen]
            request_id = engine.add_request(
                request.prompt, exit=request.exit, sampling=request.sampling
            )
            running[request_id] = chosen
        if running and steps % 40 == 0:
            output = engine.cancel(rng.choice(list(running)))
            assert output is not None
            check(output)
            cancelled += 1
        free = [request_id for request_id in running if request_id not in held]
        if free and rng.random() < 0.1:
            held.append(rng.choice(free))
            engine.hold(held[-1])
        if held and rng.random() < 0.1:
            engine.resume(held.pop(rng.randrange(len(held))))
        for step in engine.step():
            assert step.request_id not in held
            if step.output is not None:
                check(step.output)
                finished += 1
        steps += 1
        held = [request_id for request_id in held if request_id in running]
        check_books(engine)

    for request_id in held:
        engine.resume(request_id)
    for step in engine.run():
        if step.output is not None:
            check(step.output)
    assert not running
    assert not engine.has_unfinished
    assert engine.pages.num_free == engine.pages.num_pages
    assert finished > 200
    assert cancelled > 20
    assert preemptions > 20
