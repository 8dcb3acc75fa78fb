"""The commands of docs/hub-to-exits.md run, in its order and in one folder.

``model`` and ``layerskip`` are a small random model here, the first of them with a draft head, and
what is trained is trained for a moment.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import eecore
from eecore.cli.app import run
from head_packs import write_pack
from looped_models import write_looped, write_nanbeige
from tiny_models import write_model

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hub-to-exits.md"
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHORTER = {"--tokens": "800", "--answer-tokens": "16", "--minutes": "0.01", "--epochs": "0.5"}
QUESTIONS = "questions.txt"
# What the small model needs beside it: it has few tokens and a short context, and never ends.
SMALLER = {
    "train-exits": ["--vocabulary", "256", "--prompts", QUESTIONS],
    "generate": ["--max-tokens", "24"],
}


def steps() -> list[tuple[str, str]]:
    """The page's steps in order: a language, and a command or a block of Python."""
    found: list[tuple[str, str]] = []
    for language, text in BLOCK.findall(PAGE.read_text()):
        if language == "python":
            found.append((language, text))
        else:
            found += [(language, line.partition("  #")[0].strip()) for line in text.splitlines()]
    return found


def commands(program: str) -> list[list[str]]:
    lines = [shlex.split(line) for language, line in steps() if language == "bash"]
    return [words for words in lines if words[0] == program]


def follow() -> list[str]:
    """Follow the page in this folder; returns the commands of eecore that ran."""
    ran = []
    for language, text in steps():
        if language == "python":
            exec(compile(text, str(PAGE), "exec"), {"__name__": "__main__"})
            continue
        program, *words = shlex.split(text)
        if program == "printf":
            subprocess.run(["bash", "-c", text], check=True)
        elif program == "eecore" and words[0] != "serve":
            before = ["", *words[:-1]]
            changed = [SHORTER.get(*pair) for pair in zip(before, words, strict=True)]
            changed += [] if "--max-tokens" in words else SMALLER.get(words[0], [])
            assert run(changed) == 0, text
            ran.append(words[0])
        else:
            assert program in ("hf", "eecore"), text
    return ran


def test_the_commands_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("model", "layerskip"):
        write_model(tmp_path / name, seed=3, num_hidden_layers=5)
    vocab_size = json.loads((tmp_path / "model" / "config.json").read_text())["vocab_size"]
    sizes = {"num_hidden_layers": 24, "total_ut_steps": 4, "vocab_size": vocab_size}
    write_looped(tmp_path / "ouro", **sizes)
    shutil.copy(tmp_path / "model" / "tokenizer.json", tmp_path / "ouro")
    write_nanbeige(tmp_path / "nanbeige", num_hidden_layers=22)
    write_pack(tmp_path / "model" / "exits", eecore.load(tmp_path / "model"))
    Path(QUESTIONS).write_text("".join(f"What is {each}?\n" for each in range(60)))
    ran = follow()
    served = [words for words in commands("eecore") if words[1] == "serve"]
    assert len(ran) == len(commands("eecore")) - len(served)
    assert {"calibrate", "evaluate", "sweep", "train", "train-exits"} < set(ran)
    assert json.loads(Path("layerskip/exits.json").read_text())["num_layers"] == 5
    assert Path("head/head.json").is_file()
    assert json.loads(Path("trained/calibration-softmax.json").read_text())["num_prompts"] == 36
    assert " layers " in capsys.readouterr().err


@pytest.mark.long
def test_what_is_fetched_is_fetched_by_options_that_are_there() -> None:
    hf = shutil.which("hf", path=str(Path(sys.executable).parent)) or shutil.which("hf")
    if hf is None:
        pytest.skip("no hf, the command of huggingface_hub")
    fetching = commands("hf")
    assert [words[1:3] for words in fetching if words[1] == "auth"] == [["auth", "login"]]
    done = subprocess.run([hf, "download", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    for words in fetching:
        for word in words:
            if word.startswith("--"):
                assert word in done.stdout


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "model")
    head = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
    (tmp_path / "config.json").write_text(json.dumps(head))
    with pytest.raises(eecore.ModelError, match=r"head\.json"):
        eecore.load(directory, exits=tmp_path)
