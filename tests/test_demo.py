"""The demo, README and docs/, as someone who has just cloned the repository runs them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import demo
import eecore
from head_packs import write_pack
from tiny_models import write_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with the demo model's number of layers, and a draft head."""
    directory = tmp_path_factory.mktemp("demo") / "model"
    write_model(directory, "smollm2", num_hidden_layers=30)
    write_pack(directory / "exits", eecore.load(directory))
    return directory


def test_the_demo_runs_every_mode(
    tiny: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "get_smollm2", lambda: tiny)
    monkeypatch.setattr(demo, "ROUNDS", 1)
    assert demo.main(["--chat", "--max-tokens", "10", "--threads", "1"]) == 0
    intent, _, chat = capsys.readouterr().out.partition("\nmodel, float32")
    for out, modes in ((intent, demo.INTENT_MODES), (chat, demo.CHAT_MODES)):
        for mode, says in modes.items():
            assert f"--exit {mode}: {says}\n" in out
            texts = re.findall(rf"^\| {mode}.* \| (.+) \|$", out, re.MULTILINE)
            assert texts == ["full depth's"] or mode in ("calibrated:softmax", "fixed:6")
    assert intent.count("[HassLightSet [area kitchen] [bri") == len(demo.INTENT_MODES)


def test_the_demo_of_the_shipped_model_fetches_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreachable() -> Path:
        raise RuntimeError("pip cannot download it: no network")

    monkeypatch.setattr(demo, "get_smollm2", unreachable)
    monkeypatch.setattr(demo, "ROUNDS", 1)
    assert demo.main(["--max-tokens", "20", "lock the front door"]) == 0
    assert capsys.readouterr().out.endswith("make demo ARGS=--chat\n")
    assert demo.main(["--chat", "--max-tokens", "20"]) == 1
    assert capsys.readouterr().err.endswith("demo: pip cannot download it: no network\n")
    monkeypatch.setattr(eecore, "load", interrupted)
    assert demo.main([]) == 130


def interrupted(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


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
