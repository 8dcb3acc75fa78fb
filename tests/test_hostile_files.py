"""Invalid calibrations, exit classifiers, searches and data.

Each kind of file has one reader: it gives a checked object, or one error that names file and field.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import eecore
from eecore.calibration.examples import read_examples
from eecore.calibration.similarity import SIMILARITIES
from eecore.calibration.skip_search import SkipSearch
from eecore.calibration_file import SIMILARITY_NAMES, Calibration
from eecore.errors import EecoreError, ExitError, RequestError
from eecore.exits import ExitClassifier
from eecore.files.builtin import default_model
from eecore.files.json_fields import JsonFields, parse_json
from eecore.files.texts import json_lines, read_text
from eecore.values import shown

STEP = {
    "skip_attention": [1],
    "skip_mlp": [2, 3],
    "agreement": 0.9,
    "draft_cost": 0.5,
    "predicted_speedup": 1.2,
    "num_drafts": 4,
}
SOFTMAX = json.loads((default_model() / "calibration-softmax.json").read_text())
CLASSIFIER = json.loads((default_model() / "calibration-classifier.json").read_text())

# Values that no field of any file may have.
NEVER: list[Any] = [{}, {"a": 1}, [[]], [{}], ["x", 1], 1e400, -1e400, math.nan, "\ud800", 10**299]


def edited(value: Any, where: tuple[str | int, ...], field: Any) -> Any:
    """A copy of a JSON value with one field inside changed."""
    value = copy.deepcopy(value)
    owner = value
    for name in where[:-1]:
        owner = owner[name]
    owner[where[-1]] = field
    return value


def refused(load: Callable[[Path], object], value: Any, path: Path) -> str:
    path.write_text(json.dumps(value))
    with pytest.raises(EecoreError) as caught:
        load(path)
    message = str(caught.value)
    assert str(path) in message
    assert len(message) < 1000
    return message


FIELDS: list[tuple[str, Any, list[Any]]] = [
    ("threshold", SOFTMAX, [None, -0.1, 1.1, "0.9", True, [0.9], 0.123456]),
    ("measure", SOFTMAX, [None, "margin", 1, "classifier"]),
    ("delta", SOFTMAX, [None, -1, 2, "x"]),
    ("epsilon", SOFTMAX, [None, -1, 2, []]),
    ("loss", SOFTMAX, [None, "none", 0]),
    ("similarity", SOFTMAX, [None, 3, "x" * 1000]),
    ("num_prompts", SOFTMAX, [None, 0, -1, 1.5, "1"]),
    ("max_tokens", SOFTMAX, [None, 0, 2**31, 0.5]),
    ("decay_tau", SOFTMAX, [None, -1, "0"]),
    ("exit_points", SOFTMAX, [[], 3, [0], [5000], ["3"], [3.0], [[3]], list(range(1, 5000))]),
    ("min_exit_layer", SOFTMAX, [None, 0, 5000, 1.0]),
    ("model_sha256", SOFTMAX, ["", "x" * 64, "0" * 63, 0]),
    ("dtype", SOFTMAX, [None, "int3", 32]),
    ("weights", SOFTMAX, ["int3", 8, []]),
    ("classifier_sha256", SOFTMAX, ["0" * 64, "", 0]),
    ("classifier_sha256", CLASSIFIER, [None, "x"]),
    ("grid", SOFTMAX, [None, 1, [2], ["1"], [True], [0.5] * 10**5]),
    ("steps", SOFTMAX, [None, 1, [1], [[]], {}]),
]


@pytest.mark.parametrize(
    ("name", "value", "field"), [(n, v, field) for n, v, wrong in FIELDS for field in wrong + NEVER]
)
def test_a_field_of_a_calibration(name: str, value: Any, field: Any, tmp_path: Path) -> None:
    message = refused(Calibration.load, edited(value, (name,), field), tmp_path / "c.json")
    assert f"{name}" in message or "expected JSON" in message


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("threshold", [None, 2, "1"]),
        ("mean_loss", [None, "0"]),
        ("p_value", [None, -1, 2]),
        ("passed", [None, 1, "yes"]),
        ("mean_exit_layer", [-1, "3", 5000]),
    ],
)
def test_a_field_of_a_step_of_a_calibration(name: str, wrong: list[Any], tmp_path: Path) -> None:
    for field in wrong + NEVER:
        value = edited(SOFTMAX, ("steps", 0, name), field)
        message = refused(Calibration.load, value, tmp_path / "c.json")
        assert f"steps[0].{name}: expected" in message or "expected JSON" in message


@pytest.mark.parametrize("value", [None, [], 1, "x", {}, {**SOFTMAX, "more": 1}])
def test_what_is_no_calibration(value: Any, tmp_path: Path) -> None:
    refused(Calibration.load, value, tmp_path / "c.json")
    for name in SOFTMAX:
        fewer = {key: field for key, field in SOFTMAX.items() if key != name}
        refused(Calibration.load, fewer, tmp_path / "c.json")


def test_every_similarity_is_known_to_the_file() -> None:
    assert set(SIMILARITY_NAMES) == set(SIMILARITIES)


def test_calibrations_that_ship_are_read() -> None:
    for measure in ("softmax", "state", "classifier"):
        assert Calibration.load(default_model() / f"calibration-{measure}.json").measure == measure


# Searches


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("skip_attention", [None, 1, ["1"], [-1], [1.0], [[1]], [5000], [True]]),
        ("skip_mlp", [None, "x", [None], [2**63]]),
        ("agreement", [None, -0.5, 2, "1"]),
        ("draft_cost", [None, -1, 2]),
        ("predicted_speedup", [None, -1, "2"]),
        ("num_drafts", [None, 0, -1, 1.5, 2**31]),
    ],
)
def test_a_field_of_a_search(name: str, wrong: list[Any], tmp_path: Path) -> None:
    for field in wrong + NEVER:
        value = edited([STEP, dict(STEP)], (1, name), field)
        message = refused(SkipSearch.load, value, tmp_path / "s.json")
        assert f"[1].{name}: expected" in message or "expected JSON" in message


@pytest.mark.parametrize(
    "value",
    [
        None,
        {},
        [],
        [[]],
        [[STEP]],
        [None],
        [{**STEP, "more": 1}],
        [{**STEP, "skip_attention": [], "skip_mlp": []}],
        [STEP] * 10**4,
    ],
)
def test_what_is_no_search(value: Any, tmp_path: Path) -> None:
    refused(SkipSearch.load, value, tmp_path / "s.json")


def test_a_search_is_read(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    path.write_text(json.dumps([STEP]))
    policy = SkipSearch.load(path).policy()
    assert policy == eecore.DraftAndVerify(frozenset({1}), frozenset({2, 3}), num_drafts=4)


# Exit classifiers


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"weight1": torch.tensor(1.0)}, "weight1: expected one or two dimensions"),
        ({"weight1": torch.zeros(2)}, "weight1: expected"),
        ({"weight1": torch.zeros(0, 8)}, "weight1: expected one or two dimensions, got"),
        ({"weight1": torch.zeros(2, 0)}, "weight1: expected one or two dimensions, got"),
        ({"weight1": torch.zeros(2, 2, 2)}, "weight1: expected one or two dimensions, got"),
        ({"weight1": torch.zeros(3, 8)}, r"weight1: expected \[2, 8\], got \[3, 8\]"),
        ({"weight1": torch.zeros(2, 8, dtype=torch.int8)}, "weight1: expected a tensor of floats"),
        ({"weight1": torch.zeros(2, 8, dtype=torch.bool)}, "weight1: expected a tensor of floats"),
        ({"weight1": torch.full((2, 8), torch.nan)}, "weight1: expected finite numbers"),
        ({"weight1": torch.full((2, 8), 1e300, dtype=torch.float64)}, "expected finite numbers"),
        ({"weight1": torch.zeros(2, 8), "bias1": torch.zeros(3)}, "bias1: expected"),
        ({"weight1": torch.zeros(2, 8), "bias1": torch.tensor(0.0)}, "bias1: expected"),
        ({"weight1": torch.zeros(2, 8), "bias2": torch.zeros(2)}, "bias2: expected none"),
        ({"weight1": torch.zeros(5, 8), "weight2": torch.zeros(2, 4)}, "weight2: expected"),
        ({"weight2": torch.zeros(2, 8)}, "expected a tensor weight1, got"),
    ],
)
def test_a_classifier_that_cannot_be(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "classifier.safetensors"
    save_file(tensors, path)
    with pytest.raises(ExitError, match=rf"classifier\.safetensors: .*{message}"):
        ExitClassifier.load(path)


@pytest.mark.parametrize("load", [Calibration.load, SkipSearch.load, ExitClassifier.load])
def test_what_is_no_file(load: Callable[[Path], object], tmp_path: Path) -> None:
    paths = [tmp_path, tmp_path / "nothing", tmp_path / ("a" * 300), tmp_path / "a\0b"]
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for path in [*paths, tmp_path / "loop", tmp_path / "zero"]:
        with pytest.raises(RequestError, match="expected a file, got"):
            load(path)


@pytest.mark.parametrize("load", [Calibration.load, SkipSearch.load, ExitClassifier.load])
def test_what_is_no_path(load: Callable[[Any], object]) -> None:
    for path in (7, None, "~no-such-user/x", "~\0", "~\ud800/x"):
        with pytest.raises(RequestError, match="path: expected that of a file or directory, got"):
            load(path)


# Data, line by line


@pytest.mark.parametrize(
    "line", ["[" * 10**5, "9" * 5000, '{"input": 1, "input": 2}', '{"input": "a"', "\ud800", "nul"]
)
def test_a_line_that_is_not_json(line: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"input": "a"}\n' + line.encode("utf-8", "surrogatepass"))
    with pytest.raises(RequestError, match=r"d\.jsonl"):
        list(json_lines(path))
    with pytest.raises(RequestError, match=r"d\.jsonl"):
        read_examples(path)


def test_text_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eecore.files.texts.MAX_FROM_PIPE", 1 << 20)
    with pytest.raises(RequestError, match="zero: expected at most 1048576 bytes, got more"):
        read_text(Path("/dev/zero"))
    for name in ("a\0b", "\ud800"):
        with pytest.raises(RequestError, match="expected the name of a file"):
            read_text(Path(name))


# The reader itself


def test_a_byte_order_mark_is_no_part_of_json() -> None:
    assert parse_json(b'\xef\xbb\xbf{"a": 1}', "x", ExitError) == {"a": 1}


def test_values_are_shown_short() -> None:
    deep: list[Any] = []
    for _ in range(10**5):
        deep = [deep]
    for value in (
        "x" * 10**6,
        list(range(10**6)),
        {str(i): i for i in range(10**5)},
        10**400,
        deep,
    ):
        assert len(shown(value)) <= 120


def test_numbers_keep_to_their_range() -> None:
    fields = JsonFields({"big": 10**299, "small": 1e-320, "whole": 3}, "f", ExitError)
    assert fields.number("whole") == 3.0
    assert isinstance(fields.number("whole"), float)
    assert fields.number("big") == 1e299
    with pytest.raises(ExitError, match="f: big: expected an integer, got 1000"):
        fields.integer("big")
    with pytest.raises(ExitError, match=r"f: big: expected a number of 0\.\.1, got 1000"):
        fields.number("big", 0.0, 1.0)
