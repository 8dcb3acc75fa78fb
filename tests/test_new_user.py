"""scripts/new_user.py: its agents, its chat on a terminal; in the long suite the whole script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import eecore
import new_user
from servers import LONG, asker, listening
from tiny_models import write_model


@pytest.mark.parametrize("agent", [new_user.agent, new_user.responses_agent])
def test_the_agent_takes_three_turns(agent: Any, capsys: pytest.CaptureFixture[str]) -> None:
    caller = asker(eecore.load(), tool_parser="hermes")
    with listening(caller.service) as address:
        lights = agent(address)
    assert set(lights) == set(new_user.ROOMS)
    shown = capsys.readouterr().out
    assert shown.count("user: ") == 3
    assert shown.count("call: set_light(") == 2
    assert shown.count("assistant: ") == 1


@pytest.mark.skipif(shutil.which("tmux") is None, reason="tmux is a terminal for the chat")
def test_a_conversation_on_a_terminal(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", max_position_embeddings=4 * LONG)
    command = [sys.executable, "-m", "eecore", "chat", str(model), "--ignore-eos"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    with new_user.Terminal(command, tmp_path, environment) as terminal:
        new_user.talk(terminal, tmp_path / "talk.json")


def test_a_folder_that_is_there_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        new_user.main([str(tmp_path), "--built"])
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_walk_with_what_is_installed_and_built(smollm2: Path, tmp_path: Path) -> None:
    command = [sys.executable, new_user.__file__, str(tmp_path / "walk"), "--built"]
    done = subprocess.run([*command, "--model", str(smollm2)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "kitchen.fan = off" in done.stdout
