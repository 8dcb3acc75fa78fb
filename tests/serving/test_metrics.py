"""Counters by policy and by depth."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import eecore
from eecore.decoding.iterate import Iterations
from eecore.planning.row import Outcome
from eecore.scheduling.scheduler import Work
from eecore.serving import metrics
from eecore.serving.metrics import Metrics
from servers import asker
from tripwire import Fault

PROMPT = "turn the kitchen lights down to 20 percent"


def counted(counts: Metrics, name: str) -> dict[str, float]:
    """The values of a counter by its labels."""
    found = re.findall(rf"^{name}_total(?:{{(.*)}})? (\S+)$", counts.text().decode(), re.MULTILINE)
    return {labels: float(value) for labels, value in found}


@pytest.fixture
def counts(intent: eecore.Model) -> Metrics:
    engine = intent.async_engine().engine
    return Metrics(engine, "intent", [eecore.Full(), eecore.SelfSpeculative(3, 6)])


@pytest.mark.parametrize(
    "policy",
    [
        eecore.Full(),
        eecore.ConfidentExit(0.3),
        eecore.FixedExit(6),
        eecore.SelfSpeculative(3, 6),
        eecore.PromptLookup(),
        eecore.Auto(),
    ],
    ids=lambda policy: type(policy).__name__,
)
def test_layers_add_up_whatever_the_policy(
    intent: eecore.Model, counts: Metrics, policy: eecore.Exit
) -> None:
    (output,) = eecore.generate(intent, PROMPT, max_tokens=64, exit=policy)
    counts.ended("stop", output, policy)
    run = counted(counts, "eecore_layers_run")
    assert sum(run.values()) == output.stats.layers_run
    tokens = counted(counts, "eecore_tokens_by_exit_layer")
    assert sum(tokens.values()) == len(output.token_ids)
    skipped = counted(counts, "eecore_layers_skipped")
    left_out = sum(12 - layer for layer in output.exit_layers)
    assert sum(skipped.values()) == (0 if output.stats.drafted else left_out)


def test_seconds_between_tokens_are_those_after_the_first(
    intent: eecore.Model, counts: Metrics
) -> None:
    (output,) = eecore.generate(intent, PROMPT, max_tokens=8, ignore_eos=True)
    stats = replace(output.stats, time_to_first_token_s=1.0, total_s=1.21)
    counts.ended("length", replace(output, stats=stats), eecore.Full())
    text = counts.text().decode()
    for bucket in ('le="0.02"} 0.0', 'le="0.05"} 1.0'):
        assert f"eecore_inter_token_seconds_bucket{{{bucket}" in text
    for bucket in ('le="0.5"} 0.0', 'le="1.0"} 1.0'):
        assert f"eecore_time_to_first_token_seconds_bucket{{{bucket}" in text


def test_labels_of_policies_are_bounded(intent: eecore.Model, counts: Metrics) -> None:
    """Policies of the server's set-up keep their labels, however many others are asked for."""
    (output,) = eecore.generate(intent, PROMPT, max_tokens=2)
    for number in range(3 * metrics.MAX_POLICIES):
        counts.ended("stop", output, eecore.ConfidentExit(number / 1000))
    counts.ended("stop", output, eecore.SelfSpeculative(3, 6))
    found = counted(counts, "eecore_tokens_by_exit_layer")
    labels = {re.search('policy="(.*)"', each)[1] for each in found}  # type: ignore[index]
    assert len(labels) == metrics.MAX_POLICIES + 2
    assert {"other", "confident:0", "confident:0.001", "speculative:3,6"} <= labels


def test_iterations_that_fail_inside_are_counted(
    intent: eecore.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests do not show them; the server's metrics do."""
    server = asker(eecore.Model(intent.network, intent.tokenizer, intent.engine_config))
    whole, left = Iterations.iterate, [Fault()]

    def broken(iterations: Iterations, works: list[Work], **more: Any) -> list[Outcome]:
        if left:
            raise left.pop()
        return whole(iterations, works, **more)

    monkeypatch.setattr(Iterations, "iterate", broken)
    texts = []
    for _ in range(2):
        body = {"prompt": PROMPT, "max_tokens": 8}
        texts.append(server.post("/v1/completions", body).json()["choices"][0]["text"])
        assert "eecore_failed_iterations_total 1.0" in server.get("/metrics").text
    assert texts[0] == texts[1]
