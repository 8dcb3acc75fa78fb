"""Messages between the two processes of a server."""

from __future__ import annotations

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
from eecore.serving.wire import (
    Error,
    FromEngine,
    Loaded,
    Request,
    Start,
    ToEngine,
    classifier_of,
    decode,
    encode,
    error_of,
    exit_of,
    plain_classifier,
    plain_error,
    plain_exit,
    plain_step,
)


def crossed(message: Any) -> Any:
    """A message as the other process receives it."""
    return decode(encode(message), type(message))


def requested(**settings: Any) -> Request:
    """A request as the other process receives it."""
    fields: dict[str, Any] = {
        "key": 3,
        "name": "a",
        "prompt_ids": [1, 2],
        "input_ids": None,
        "exit": plain_exit(Full()),
        "sampling": SamplingParams(),
        "special_texts": {7: "<call>"},
        "whole": False,
    }
    found = crossed(ToEngine(add=Request(**{**fields, **settings}))).add
    assert isinstance(found, Request)
    return found


@pytest.mark.parametrize(
    "policy",
    [
        Full(),
        FixedExit(3),
        ConfidentExit(0.3, "state", exit_points=(2, 4), thresholds={2: 0.5}),
        SelfSpeculative(3, 4, 0.25, reuse=False),
        DraftAndVerify(frozenset({3}), frozenset({4, 5}), adaptive=False),
        PromptLookup(4),
        HeadDrafts(threshold=0.1),
        Auto(exit_layers=(), lookup=False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_policies(policy: Any) -> None:
    found = exit_of(requested(exit=plain_exit(policy)).exit, {})
    assert found == policy
    assert type(found) is type(policy)


def test_a_calibrated_policy() -> None:
    directory = eecore.default_model()
    policy = ConfidentExit.calibrated(directory / "calibration-softmax.json")
    found = exit_of(requested(exit=plain_exit(policy)).exit, {})
    assert found == policy


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(
            max_tokens=3,
            temperature=0.1 + 0.2,
            seed=2**64 - 1,
            stop=("Path", "\N{SNOWMAN}"),
            stop_token_ids=(5, 7),
            logit_bias={7: -1.5, 3: 100.0},
            guide=Guide.json_schema({"type": "object"}),
        ),
    ],
)
def test_requests(sampling: SamplingParams) -> None:
    found = requested(sampling=sampling, input_ids=[5], whole=True)
    assert found.sampling == sampling
    assert (found.key, found.name, found.prompt_ids, found.input_ids) == (3, "a", [1, 2], [5])
    assert found.special_texts == {7: "<call>"}
    assert found.whole


def test_text_that_utf8_cannot_say_is_refused_where_it_is_said() -> None:
    with pytest.raises(UnicodeEncodeError):
        requested(sampling=SamplingParams(stop=("\ud800",)))


def test_what_is_started_and_loaded(intent: eecore.Model, tmp_path: Path) -> None:
    path = tmp_path / "\udcff"  # a name that is no UTF-8
    start = Start(path, {"exits": False, "dtype": None}, 2)
    assert crossed(ToEngine(start=start)).start == start
    source = ModelSource(Path("a") / "b", "float32", "int8")
    limits = EngineConfig(kv_cache_tokens=32, max_input_tokens=5)
    assert isinstance(intent.config, eecore.config.ModelConfig)
    loaded = Loaded(intent.config, None, "cpu", source, None, limits, True)
    found = crossed(FromEngine(loaded=loaded)).loaded
    assert found == loaded
    assert found.model.ropes == intent.config.ropes


def test_steps_and_outputs(intent: eecore.Model) -> None:
    settings: Any = {"max_tokens": 4, "logprobs": 2, "ignore_eos": True, "exit": "confident:0.5"}
    for step in eecore.stream(intent, "lock the front door", **settings):
        ((key, given, text),) = crossed(FromEngine(steps=[plain_step(5, step)])).steps
        assert (key, text) == (5, step.text)
        for name in ("request_id", "token_ids", "exit_layers", "confidences", "logprobs", "output"):
            assert getattr(given, name) == getattr(step, name)
    assert step.output is not None
    assert len(step.output.top_logprobs or ()) == 4


def test_every_number_of_a_step() -> None:
    numbers = [math.inf, -math.inf, 5e-324, 0.1]
    scores = [None, PromptLogprob(5, -0.5, 2, {7: -0.25, 5: -0.5}), PromptLogprob(1, -1.0, 1, {})]
    step = StepOutput("a", [1] * 4, [2] * 4, numbers, None, prompt_logprobs=scores)
    ((_, found, text),) = crossed(FromEngine(steps=[plain_step(0, step)])).steps
    assert found.confidences == numbers
    assert found.prompt_logprobs == scores
    assert text is None


def test_classifiers_go_once_and_then_by_their_digests() -> None:
    classifier = ExitClassifier(torch.randn(2, 8), torch.randn(2))
    policy = ConfidentExit(0.5, "classifier", classifier=classifier)
    digest, tensors = classifier.sha256, plain_classifier(classifier)
    _, tensors = crossed(ToEngine(classifier=(digest, tensors))).classifier
    known = {digest: classifier_of(tensors)}
    assert known[digest].sha256 == digest
    found = exit_of(requested(exit=plain_exit(policy)).exit, known)
    assert isinstance(found, ConfidentExit)
    assert found.classifier is known[digest]


class PeculiarError(RuntimeError):
    """An error that is neither eecore's nor Python's."""


class OfTwoError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def crossed_error(error: BaseException) -> Error:
    (found,) = crossed(FromEngine(ended=[(1, plain_error(error))])).ended
    return found[1]  # type: ignore[no-any-return]


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
    found = error_of(crossed_error(error))
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
        found = error_of(crossed_error(error))
        assert isinstance(found, kind)
        assert type(found).__name__ == type(error).__name__
        assert str(found) == str(error)


def test_errors_say_where_they_are_from(tmp_path: Path) -> None:
    with pytest.raises(eecores.ModelNotFoundError) as caught:
        load(tmp_path / "none")
    found = error_of(crossed_error(caught.value))
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
