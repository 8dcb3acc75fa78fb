"""The needs of the emulated aarch64 machine; ``make aarch64`` runs tests in it."""

from __future__ import annotations

from pathlib import Path

import pytest

import aarch64


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert aarch64.missing() == "apt install qemu-user g++-aarch64-linux-gnu apt dpkg, on Debian"
    for tool in aarch64.TOOLS:
        (tmp_path / tool).touch(mode=0o755)
    assert aarch64.missing() == ""


def test_a_folder_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aarch64.cmake_build, "ROOT", tmp_path)

    def fill(folder: Path) -> None:
        assert not list(folder.iterdir())
        (folder / "begun").touch()
        if fails:
            raise OSError("no space left")

    folder, fails = tmp_path / "system", True
    with pytest.raises(OSError, match="no space"):
        aarch64.whole(folder, fill)
    assert not folder.exists()
    fails = False
    aarch64.whole(folder, fill)
    assert [path.name for path in folder.iterdir()] == ["begun"]
    aarch64.whole(folder, lambda _: pytest.fail("filled again"))
    assert [path.name for path in tmp_path.iterdir()] == ["system"]
