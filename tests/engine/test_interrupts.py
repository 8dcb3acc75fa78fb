"""An exception at any line of a call: no page is lost, and the engine serves the next request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import eecore
from devices import cpu_only, engine_of
from eecore import (
    ConfidentExit,
    DraftAndVerify,
    Engine,
    EngineConfig,
    FixedExit,
    Full,
    Output,
    SamplingParams,
    SelfSpeculative,
)
from tiny_models import random_prompts
from tripwire import Fault, Interrupt, Tripwire
from workloads import Driver, Request, same, serve

pytestmark = [pytest.mark.usefixtures("one_thread"), cpu_only]

# Pages for two of them, so that there is preemption; chunks, drafts, draws, stop strings.
SMALL = EngineConfig(kv_cache_tokens=48, page_size=4, max_num_seqs=4, max_prefill_chunk=7)
PROMPTS = random_prompts(9, 3, 14, 5, 1, seed=5)
NUM_RUNS = 60
NUM_COLD_RUNS = 8


@pytest.fixture(scope="module")
def requests(agreeing: eecore.Model) -> list[Request]:
    (text,) = (output.text for output in eecore.generate(agreeing, PROMPTS[:1], max_tokens=9))
    greedy = SamplingParams(max_tokens=7, ignore_eos=True)
    return [
        Request(PROMPTS[0], Full(), SamplingParams(max_tokens=9, stop=(text[4:7], "never"))),
        Request(PROMPTS[1], ConfidentExit(0.35, decay_tau=1.0), greedy),
        Request(PROMPTS[2], SelfSpeculative(2, 3), replace(greedy, prompt_logprobs=2)),
        Request(PROMPTS[3], FixedExit(3), SamplingParams(max_tokens=6, logprobs=2)),
        Request(PROMPTS[4], DraftAndVerify({3}, {2}), SamplingParams(8, 0.9, seed=3)),
    ]


def drive(driver: Driver, requests: list[Request]) -> None:
    """Requests that arrive at different times, a cancel, a hold."""
    for number, request in enumerate(requests[:4]):
        driver.add(request, str(number))
    for _ in range(3):
        driver.step()
    driver.add(requests[4], "4")
    driver.add(requests[2], "5")
    driver.hold("0")
    driver.step()
    driver.step()
    driver.cancel("5")
    driver.resume("0")
    driver.finish()


def check(outputs: dict[str, Output], expected: list[Output]) -> None:
    for name, output in outputs.items():
        alone = expected[2 if name == "5" else int(name)]
        if output.finish_reason in ("cancelled", "error"):
            assert (output.error is not None) == (output.finish_reason == "error")
            assert output.token_ids == alone.token_ids[: len(output.token_ids)]
        else:
            assert same(output, alone), (output, alone)


def lines_of(server: Engine, requests: list[Request]) -> list[tuple[int, int]]:
    """All lines of all calls, as (number of the call, number of the line)."""
    counts: list[int] = []

    class Counting(Driver):
        def _called(self, call: Any) -> Any:
            with Tripwire() as wire:
                result = call()
            counts.append(wire.lines)
            return result

    drive(Counting(server), requests)
    assert sum(counts) > 5000
    return [(call, line) for call, lines in enumerate(counts) for line in range(1, lines + 1)]


def engine(model: eecore.Model, ahead: bool) -> Engine:
    return engine_of(model, SMALL, ahead=ahead)


@pytest.mark.parametrize("ahead", [False, True], ids=["landed", "ahead"])
@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("error", [Interrupt, Fault])
def test_a_fault_at_any_line_of_any_call(
    agreeing: eecore.Model,
    requests: list[Request],
    error: type[BaseException],
    twice: bool,
    ahead: bool,
) -> None:
    shared = engine(agreeing, ahead)
    expected = serve(shared, requests)

    def run(server: Engine, places: list[tuple[int, int]]) -> None:
        tripped = 0
        for call, line in places:
            faults: list[Any] = [*[None] * call, (line, error)]
            if twice:
                faults.append((line * 7 % 50 + 1, error))
            driver = Driver(server, iter(faults))
            drive(driver, requests)
            check(driver.outputs, expected)
            assert same(serve(server, requests[1:2])[0], expected[1])
            tripped += driver.tripped
        assert tripped >= len(places) // 2  # prefix-cache hits make calls shorter

    lines_of(shared, requests)  # captures what is still missing
    places = lines_of(shared, requests)
    run(shared, places[:: len(places) // NUM_RUNS])
    cold = lines_of(engine(agreeing, ahead), requests)  # its programs are captured
    for place in cold[:: len(cold) // NUM_COLD_RUNS]:
        run(engine(agreeing, ahead), [place])
