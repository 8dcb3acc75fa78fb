"""What two processes of a server say to each other."""

from __future__ import annotations

import marshal
import math
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

import eecore
from eecore import (
    Auto,
    ConfidentExit,
    DraftAndVerify,
    EngineConfig,
    FixedExit,
    Full,
    Guide,
    HeadDrafts,
    PromptLookup,
    SamplingParams,
    SelfSpeculative,
)
from eecore import errors as eecores
from eecore.channel import Channel
from eecore.exits import ExitClassifier
from eecore.generation import load
from eecore.models import ModelSource
from eecore.models.text.chat_template import ChatTemplateError
from eecore.output import PromptLogprob, StepOutput
from eecore.serving.wire import STEP_FIELDS, Start, Wire, error_of, plain_classifier, plain_error


def crossed(value: Any) -> Any:
    """What comes of a value in the other process."""
    return Wire().value(marshal.loads(marshal.dumps(Wire().plain(value))))


@pytest.mark.parametrize(
    "value",
    [
        Full(),
        FixedExit(3),
        ConfidentExit(0.3, "state", exit_points=(2, 4), thresholds={2: 0.5}),
        SelfSpeculative(3, 4, 0.25, reuse=False),
        DraftAndVerify(frozenset({3}), frozenset({4, 5}), adaptive=False),
        PromptLookup(4),
        HeadDrafts(threshold=0.1),
        Auto(exit_layers=(), lookup=False),
        SamplingParams(),
        [None, PromptLogprob(5, -0.5, 2, {7: -0.25, 5: -0.5}), PromptLogprob(1, -1.0, 1, {})],
        SamplingParams(
            max_tokens=3,
            temperature=0.1 + 0.2,
            seed=2**64 - 1,
            stop=("Path", "\ud800 \N{SNOWMAN}"),
            stop_token_ids=(5, 7),
            logit_bias={7: -1.5, 3: 100.0},
            guide=Guide.json_schema({"type": "object"}),
        ),
        EngineConfig(kv_cache_tokens=32, max_input_tokens=5),
        ModelSource(Path("a") / "b", "float32", "int8"),
        Start(Path("c"), {"exits": False, "dtype": None}, 2),
        (FixedExit(1), FixedExit(2)),
        [],
        (),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values(value: Any) -> None:
    found = crossed(value)
    assert found == value
    assert type(found) is type(value)


def test_what_the_model_is(intent: eecore.Model) -> None:
    assert crossed(intent.config) == intent.config
    assert crossed(intent.config).rope == intent.config.rope


def test_steps_and_outputs(intent: eecore.Model) -> None:
    settings: Any = {"max_tokens": 4, "logprobs": 2, "ignore_eos": True, "exit": "confident:0.5"}
    for step in eecore.stream(intent, "lock the front door", **settings):
        plain = marshal.loads(marshal.dumps(Wire().plain_step(step)))
        values = dict(zip(STEP_FIELDS, map(Wire().value, plain), strict=True))
        assert values == {name: getattr(step, name) for name in STEP_FIELDS}
    assert step.output is not None
    assert len(step.output.top_logprobs or ()) == 4


def test_every_number_of_a_step() -> None:
    numbers = [math.inf, -math.inf, 5e-324, 0.1]
    step = StepOutput("a", [1] * 4, [2] * 4, numbers, None)
    assert marshal.loads(marshal.dumps(Wire().plain_step(step)))[3] == numbers


def test_classifiers_go_once_and_then_by_their_digests() -> None:
    classifier = ExitClassifier(torch.randn(2, 8), torch.randn(2))
    policy = ConfidentExit(0.5, "classifier", classifier=classifier)
    plain = Wire().plain(policy)
    assert len(marshal.dumps(plain)) < 500
    there = Wire()
    there.keep(classifier.sha256, plain_classifier(classifier))
    found = [there.value(plain) for _ in range(2)]
    assert found[0].classifier is found[1].classifier
    assert found[0].classifier.sha256 == classifier.sha256


class PeculiarError(RuntimeError):
    """Not eecore's, nor Python's."""


class OfTwoError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    "error",
    [
        eecores.RequestError("prompt: expected some"),
        eecores.GuideError("guide: expected another"),
        eecores.ModelNotFoundError("config.json: expected a file"),
        eecores.EngineLostError("engine: expected one"),
        MemoryError("none left"),
        FileNotFoundError(2, "No such file", "a/b"),
        ValueError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors(error: Exception) -> None:
    found = error_of(*marshal.loads(marshal.dumps(plain_error(error))))
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert getattr(found, "filename", None) == getattr(error, "filename", None)


def test_errors_of_other_kinds() -> None:
    for error, kind in (
        (PeculiarError("odd"), RuntimeError),
        (OfTwoError(1, 2), Exception),
        (UnicodeDecodeError("utf-8", b"a", 0, 1, "why"), Exception),
        (ChatTemplateError("no template"), eecores.ModelError),
    ):
        found = error_of(*plain_error(error))
        assert isinstance(found, kind)
        assert type(found).__name__ == type(error).__name__
        assert str(found) == str(error)


def test_errors_say_where_they_are_from(tmp_path: Path) -> None:
    with pytest.raises(eecores.ModelNotFoundError) as caught:
        load(tmp_path / "none")
    found = error_of(*plain_error(caught.value))
    assert "load_model" in str(found.__cause__)


def test_a_channel() -> None:
    ends = [Channel(end) for end in socket.socketpair()]
    for message in (("a",), ("b", [1, 2.5, None], {3: b"\0"}), ("c", "x" * 10_000)):
        ends[0].send(message)
        assert ends[1].receive() == message
    with pytest.raises(ValueError, match="unmarshallable"):
        ends[0].send(("d", object()))
    ends[0].close()
    assert ends[1].receive() is None
    assert ends[0].receive() is None
    with pytest.raises(BrokenPipeError):
        ends[1].send(("e",))


def test_a_channel_that_ends_in_the_middle() -> None:
    near, far = socket.socketpair()
    channel = Channel(far)
    near.sendall((100).to_bytes(8, "little") + b"abc")
    near.close()
    assert channel.receive() is None
