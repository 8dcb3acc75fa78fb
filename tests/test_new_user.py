"""scripts/new_user.py: its agent against a server, and, in the long suite, the whole walk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import eecore
import new_user
from servers import asker, listening


def test_the_agent_takes_three_turns(capsys: pytest.CaptureFixture[str]) -> None:
    caller = asker(eecore.load(), tool_parser="hermes")
    with listening(caller.service) as address:
        lights = new_user.agent(address)
    assert set(lights) == set(new_user.ROOMS)
    shown = capsys.readouterr().out
    assert shown.count("user: ") == 3
    assert shown.count("call: set_light(") == 2
    assert shown.count("assistant: ") == 1


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
