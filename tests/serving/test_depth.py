"""The depth of a request: set in every way there is, and reported."""

from __future__ import annotations

from typing import Any

import pytest

import eecore
from eecore import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    ExitError,
    FixedExit,
    Full,
    PromptLookup,
    SelfSpeculative,
)
from eecore.exit_text import Policies
from eecore.exits import Exit
from eecore.serving.depth import Depths
from servers import Asker, asker, events

PROMPT = "turn the kitchen lights down to 20 percent"
POLICIES: list[tuple[Any, Exit]] = [
    ({"mode": "full"}, Full()),
    ({"mode": "fixed", "exit_layer": 6}, FixedExit(6)),
    ({"mode": "confident", "exit_points": [3, 5]}, ConfidentExit(exit_points=(3, 5))),
    ({"mode": "speculative", "exit_layer": 3, "num_drafts": 2}, SelfSpeculative(3, 2)),
    ({"mode": "draft-verify", "skip_mlp": [4, 5]}, DraftAndVerify(frozenset(), {4, 5})),  # type: ignore[arg-type]
    ({"mode": "auto", "exit_layers": [], "lookup": False}, Auto(exit_layers=(), lookup=False)),
]
WRONG: list[tuple[Any, str]] = [
    ("calibrated:../softmax", "expected a measure of softmax"),
    ({}, r"exit\.mode: expected full"),
    ({"mode": 3}, r"exit\.mode: expected full"),
    ({"mode": "speculative"}, "exit_layer: expected a layer"),
    ({"mode": "speculative", "layers": 3}, "expected exit_layer, num_drafts"),
    ({"mode": "confident", "threshold": "0.9"}, "threshold: expected"),
    ({"mode": "confident", "classifier": "x"}, "expected threshold, measure"),
    ({"mode": "confident", "exit_points": {"a": 1}}, "exit_points: expected"),
    ({"mode": "draft-verify"}, "expected at least one sublayer"),
]


@pytest.fixture(scope="module")
def policies() -> Policies:
    return Policies(eecore.default_model())


@pytest.mark.parametrize(("said", "policy"), POLICIES)
def test_policies_as_they_are_said(policies: Policies, said: Any, policy: Exit) -> None:
    assert policies.of(said) == policy


@pytest.mark.parametrize(("said", "expected"), WRONG)
def test_what_is_no_policy(policies: Policies, said: Any, expected: str) -> None:
    with pytest.raises(ExitError, match=expected):
        policies.of(said)


def test_policies_in_names(policies: Policies) -> None:
    depths = Depths(policies, "full")
    for said in ("speculative:3,6", "confident:0.9", "draft-verify", "calibrated:softmax", "auto"):
        assert depths.of_name(depths.name_of(said)) == said
    assert depths.of_name("fullest") is None


def ask(server: Asker, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 64, **fields}
    return server.post("/v1/completions", body).json()


def contract(server: Asker, **fields: Any) -> str:
    return str(ask(server, **fields)["usage"]["eecore"]["contract"])


def test_every_way_to_say_it(server: Asker) -> None:
    expected = SelfSpeculative(3, 6).contract
    said = "speculative:3,6"
    assert contract(server, exit=said) == expected
    assert contract(server, metadata={"exit": said}) == expected
    assert contract(server, model="intent:speculative-3-6") == expected
    as_object = {"mode": "speculative", "exit_layer": 3, "num_drafts": 6}
    assert contract(server, exit=as_object) == expected
    # The nearest word counts.
    assert contract(server, exit="full", metadata={"exit": said}) == Full().contract
    assert contract(server, model="intent:auto", metadata={"exit": said}) == expected
    assert contract(server, metadata={"of": "mine"}) == Auto().contract


@pytest.mark.parametrize("stream", [False, True])
def test_exit_layers_of_each_token(server: Asker, intent: eecore.Model, stream: bool) -> None:
    (expected,) = eecore.generate(intent, PROMPT, max_tokens=64, exit=SelfSpeculative(3, 6))
    body = {"prompt": PROMPT, "max_tokens": 64, "exit": "speculative:3,6", "stream": stream}
    body |= {"return_exit_layers": True}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    answer = server.post("/v1/completions", body)
    chunks = events(answer.text) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    found = {
        name: [value for choice in choices for value in choice.get(name, [])]
        for name in ("exit_layers", "confidences", "token_ids", "tokens")
    }
    assert found["exit_layers"] == expected.exit_layers
    assert found["confidences"] == pytest.approx(expected.confidences)
    assert found["token_ids"] == expected.token_ids
    assert "".join(found["tokens"]) == f"{expected.text}<|end|>"
    told = chunks[-1]["usage"]["eecore"]
    assert told["drafted"] == expected.stats.drafted > 0
    assert told["accepted"] == expected.stats.accepted
    assert told["mean_exit_layer"] == 12  # all layers verified each draft
    assert told["full_passes"] == expected.stats.full_passes < len(expected.token_ids) - 1


def test_skipped_layers_are_told(server: Asker) -> None:
    told = ask(server, exit="fixed:6")["usage"]
    assert told["eecore"]["mean_exit_layer"] == 6
    tokens = told["completion_tokens"] - 1
    assert told["eecore"]["layers_run"] == told["eecore"]["layers_skipped"] == 6 * tokens


def test_a_calibrated_exit_is_greedy(server: Asker) -> None:
    assert "calibrated (delta 0.02" in contract(server, exit="calibrated:softmax")
    error = ask(server, exit="calibrated:softmax", temperature=0.5)["error"]
    assert error["param"] == "temperature"
    assert "calibrated" in error["message"]


def test_what_a_server_allows(intent: eecore.Model) -> None:
    settings: dict[str, Any] = {"exit": "auto", "allow_exit": ("lookup", "speculative:3,6")}
    server = asker(intent, **settings)
    assert contract(server) == Auto().contract
    assert contract(server, exit="auto") == Auto().contract
    assert contract(server, exit="lookup:3") == PromptLookup(3).contract
    assert contract(server, exit={"mode": "speculative", "exit_layer": 3}).endswith("lossless")
    for refused in ("full", "speculative:3,7", {"mode": "fixed", "exit_layer": 3}):
        error = ask(server, exit=refused)["error"]
        assert error["code"] == "exit_not_allowed"
        assert "expected one of auto, lookup, speculative:3,6" in error["message"]
    names = [card["id"] for card in server.get("/v1/models").json()["data"]]
    assert names == ["intent", "intent:auto", "intent:speculative-3-6"]


def test_aliases_that_are_given(intent: eecore.Model) -> None:
    server = asker(intent, name="home", aliases=("fixed:6",))
    assert [c["id"] for c in server.get("/v1/models").json()["data"]] == ["home", "home:fixed-6"]
    assert contract(server, model="home:fixed-6") == FixedExit(6).contract


def test_settings_that_the_model_cannot_run(intent: eecore.Model) -> None:
    for settings in ({"exit": "fixed:13"}, {"aliases": ("speculative:12,2",)}):
        with pytest.raises(ExitError, match=r"expected 1\.\.1[12] for a model of 12 layers"):
            asker(intent, **settings)  # type: ignore[arg-type]
