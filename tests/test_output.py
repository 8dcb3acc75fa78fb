"""The outputs of requests that have ended."""

from __future__ import annotations

from typing import Any

import pytest

import eecore
from eecore.cli.results import saved
from eecore.exits import Auto, Full, PromptLookup
from eecore.output import Output, RequestStats, Saved


def stats(tokens: int, total: float, **fields: Any) -> RequestStats:
    settings: dict[str, Any] = {
        "contract": "auto (at most 8 drafts): lossless",
        "num_layers": 10,
        "prompt_tokens": 5,
        "layers_run": 12 * (tokens - 1),
        "prompt_layers_run": 50,
        "layers_filled": 0,
        "fill_calls": 0,
        "drafted": 0,
        "accepted": 0,
        "preemptions": 0,
        "time_to_first_token_s": 0.5,
        "mean_exit_layer": 10.0,
        "full_passes": 14,
    }
    return RequestStats(generated_tokens=tokens, total_s=total, **{**settings, **fields})


def output(of: RequestStats) -> Output:
    tokens = [7] * of.generated_tokens
    return Output("", [1], tokens, "", "stop", [10] * len(tokens), [], None, None, of)


def test_what_one_request_saved() -> None:
    took = Saved.of([stats(21, 2.0, full_depth_s=5.0)])
    assert (took.tokens_per_s, took.full_depth_tokens_per_s) == (10.5, pytest.approx(4.2))
    assert took.speedup == pytest.approx(2.5)
    assert (took.layers_run, took.num_layers, took.is_lossless) == (12.0, 10, True)


def test_requests_beside_each_other_take_the_time_of_all() -> None:
    took = Saved.of([stats(21, 2.0, full_depth_s=5.0), stats(19, 2.0, full_depth_s=3.0)])
    assert (took.tokens_per_s, took.speedup) == (20.0, pytest.approx(2.0))
    assert Saved.of([stats(21, 2.0), stats(21, 2.0)], seconds=4.0).tokens_per_s == 10.5


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert Saved.of([stats(21, 2.0)]).speedup is None
    assert Saved.of([stats(21, 2.0), stats(20, 2.0, full_depth_s=5.0)]).speedup is None
    assert Saved.of([stats(20, 2.0), stats(21, 2.0, full_depth_s=5.0)]).speedup == 2.5
    full = stats(21, 2.0, contract=Full().contract, full_depth_s=2.0)
    assert Saved.of([full]).speedup is None  # it is what the others are compared with
    cut = Saved.of([stats(0, 0.0)])
    assert (cut.tokens_per_s, cut.layers_run, cut.speedup) == (0.0, None, None)


def test_the_line_of_the_command_line() -> None:
    both = [output(stats(21, 2.0, full_depth_s=5.0, drafted=8, accepted=6))]
    assert saved(both, 2.0) == (
        "2.5x full depth's, the same text: 10.5 tokens/s beside 4.2",
        "14 passes of all 10 layers for 20 tokens, as 6 of 8 drafts were accepted",
    )
    early = stats(21, 2.0, full_depth_s=5.0, contract="confident exit: no promise", layers_run=130)
    assert saved([output(early)], 2.0) == (
        "2.5x full depth's, a text of its own: 10.5 tokens/s beside 4.2",
        "6.5 of 10 layers run a token",
    )
    unknown = saved([output(stats(21, 2.0))], 2.0)
    assert unknown == ("10.5 tokens/s", "all 10 layers for each token")
    assert saved([output(stats(1, 2.0))], 2.0) == ("0.5 tokens/s", "the prompt alone")


def test_passes_of_full_depth_are_measured_as_they_run(agreeing: eecore.Model) -> None:
    """By requests at full depth, and by ``Auto``; before that there is no figure."""

    def ask(policy: Any, tokens: int = 40) -> RequestStats:
        settings: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
        return eecore.generate(agreeing, [[7, 8, 9] * 5], exit=policy, **settings)[0].stats

    for measured in (Full(), Auto(lookup=False)):
        agreeing.network.learnt.clear()
        assert ask(PromptLookup(4)).full_depth_s is None
        assert (ask(measured).full_depth_s is not None) == (measured == Auto(lookup=False))
        took = ask(PromptLookup(4))
        assert took.full_depth_s is not None
        assert took.full_depth_s > 0.0
        assert Saved.of([took]).full_depth_tokens_per_s == pytest.approx(40 / took.full_depth_s)
    for engine in (None, agreeing.engine()):
        agreeing.network.learnt.clear()
        agreeing.measure_full_depth(1, engine)
        assert ask(PromptLookup(4)).full_depth_s is not None
    assert ask(PromptLookup(4), 1).full_depth_s is None  # its only token is the prompt's
