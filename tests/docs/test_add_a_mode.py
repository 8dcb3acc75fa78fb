"""The code of docs/extending/add-a-mode.md runs, in the files that the page names."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import pytest

import eecore
import test_house
from eecore import ExitError, exit_text, exits
from eecore.cli.app import run
from eecore.exit_text import parse_exit
from eecore.planning import draft_state, route
from servers import asker
from tiny_models import write_model

PAGE = test_house.ROOT / "docs" / "extending" / "add-a-mode.md"
PROMPT = "lock the front door"


@pytest.fixture(scope="module")
def policy() -> Iterator[Any]:
    """The class of the new mode, in a package in which the page was followed."""
    shown = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    made, row, branch = shown
    with pytest.MonkeyPatch.context() as patch:
        exec(compile(made, str(PAGE), "exec"), vars(exits))
        kind = exits.PartOfModel  # type: ignore[attr-defined]
        mode = eval(row, {**vars(exit_text), "PartOfModel": kind})
        patch.setitem(exit_text.MODES, mode.name, mode)
        source = inspect.getsource(route.make_route)
        head, last, tail = source.rpartition("    return Route(policy, num_layers)\n")
        followed = f"{head}{textwrap.indent(textwrap.dedent(branch), '    ')}{last}{tail}"
        module = {**vars(route), "PartOfModel": kind}
        exec(compile(followed, str(PAGE), "exec"), module)
        patch.setattr(draft_state, "make_route", module["make_route"])
        yield kind
    del exits.PartOfModel  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def intent() -> eecore.Model:
    return eecore.load(dtype="float32", kv_cache_tokens=4096)


def test_its_text_and_its_range(policy: Any) -> None:
    assert parse_exit("part") == policy(0.5)
    assert exit_text.exit_text(parse_exit("part:0.25")) == "part:0.25"
    with pytest.raises(ExitError, match=r"expected part\[:SHARE\], such as part:0\.5, got"):
        parse_exit("part:most")
    with pytest.raises(ExitError, match=r"PartOfModel\.share: expected 0\.\.1, got 1\.5"):
        policy(1.5)


def test_it_runs_from_python(policy: Any, intent: eecore.Model) -> None:
    (got,) = eecore.generate(intent, PROMPT, exit="part:0.5", max_tokens=8)
    (expected,) = eecore.generate(intent, PROMPT, exit="fixed:6", max_tokens=8)
    assert got.token_ids == expected.token_ids
    assert got.exit_layers == expected.exit_layers
    assert got.stats.contract == policy(0.5).contract


@pytest.mark.filterwarnings("always:.*trained for early exit")
def test_it_runs_from_the_command_line(
    policy: Any, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(write_model(tmp_path_factory.mktemp("m") / "model"))
    command = ["generate", model, PROMPT, "-n", "3", "--ignore-eos", "--depth"]
    assert run([*command, "--exit", "part:0.5"]) == 0
    assert capsys.readouterr().err.endswith("[exit layers: 2x3]\n")
    assert run([*command, "--exit", "part:2"]) == 4
    assert f"{policy.__name__}.share: expected 0..1, got 2" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["part:0.5", {"mode": "part"}, {"mode": "part", "share": 0.5}])
def test_it_runs_through_the_server(policy: Any, intent: eecore.Model, said: Any) -> None:
    server = asker(intent)
    body = {"prompt": PROMPT, "max_tokens": 8, "exit": said}
    told = server.post("/v1/completions", body).json()["usage"]["eecore"]
    assert told["contract"] == policy().contract
    assert told["mean_exit_layer"] == 6
    error = server.post("/v1/completions", body | {"exit": {"mode": "part", "part": 1}}).json()
    assert "expected share for part" in error["error"]["message"]
