"""Files appear whole or not at all, whichever library writes them and whatever ends it early."""

from __future__ import annotations

import ast
import os
import resource
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file

import eecore
from eecore.calibration.skip_search import SkipSearch, SkipStep
from eecore.files.whole import appearing, filling, replacing, write_text
from eecore.lab.evaluation.sweep import Sweep, SweepCell
from eecore.lab.training.calm import save_classifier

PACKAGE = Path(eecore.__file__).parent


class Stopped(BaseException):
    """An exception that ends a write early, as Ctrl-C does."""


@contextmanager
def full_disk(limit: int = 64) -> Iterator[None]:
    """Limit files to so many bytes inside the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every file and folder below a folder, hidden ones too."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def test_a_file_is_replaced_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with replacing(path) as partial:
        assert partial.suffix == ".json"
        partial.write_text("new")
        assert path.read_text() == "old"
    assert contents(tmp_path) == {"a.json": b"new"}


@pytest.mark.parametrize("error", [Stopped, OSError, KeyboardInterrupt])
@pytest.mark.parametrize("old", ["old", None])
def test_what_ends_early_leaves_what_there_was(
    tmp_path: Path, error: type[BaseException], old: str | None
) -> None:
    path = tmp_path / "a.json"
    if old is not None:
        path.write_text(old)
    before = contents(tmp_path)
    with pytest.raises(error), replacing(path) as partial:  # noqa: PT012
        partial.write_text("ne")
        raise error
    assert contents(tmp_path) == before


def test_a_full_disk_names_the_file_that_was_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    with full_disk(), pytest.raises(OSError, match="File too large") as caught:
        write_text(path, "new" * 100)
    assert caught.value.filename == str(path)
    assert contents(tmp_path) == {"a.txt": b"old"}


def test_the_mode_is_kept_and_a_new_file_has_that_of_others(tmp_path: Path) -> None:
    path, plain = tmp_path / "kept", tmp_path / "plain"
    path.write_text("old")
    path.chmod(0o640)
    plain.write_text("")
    write_text(path, "new")
    write_text(tmp_path / "made", "new")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("kept", "plain", "made")]
    assert modes[0] == 0o640
    assert modes[1] == modes[2]


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("link", "dangling"):
        (tmp_path / name).symlink_to(tmp_path / "there" / name)
    (tmp_path / "there" / "link").write_text("old")
    for name in ("link", "dangling"):
        write_text(tmp_path / name, "new")
        assert (tmp_path / name).is_symlink()
        assert (tmp_path / "there" / name).read_text() == "new"


def test_devices_and_pipes_are_written_to_as_they_are(tmp_path: Path) -> None:
    write_text(os.devnull, "gone")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_device_stays_one_with_any_library(tmp_path: Path) -> None:
    """Libraries that write beside a file and rename do so in a folder of their own."""
    os.mkfifo(tmp_path / "pipe.safetensors")
    reader = os.open(tmp_path / "pipe.safetensors", os.O_RDONLY | os.O_NONBLOCK)
    with replacing(tmp_path / "pipe.safetensors") as partial:
        assert partial.suffix == ".safetensors"
        save_file({"a": torch.arange(4)}, partial)
    assert stat.S_ISFIFO(os.stat(tmp_path / "pipe.safetensors").st_mode)
    assert torch.equal(load(os.read(reader, 4096))["a"], torch.arange(4))
    os.close(reader)
    assert contents(tmp_path).keys() == {"pipe.safetensors"}
    with pytest.raises(OSError, match=r"No space") as caught:
        write_text("/dev/full", "much")
    assert caught.value.filename == "/dev/full"
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode)


def test_a_directory_or_a_missing_one_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing" / "a.txt", tmp_path / ("n" * 300)):
        with pytest.raises(OSError, match=r"[Dd]irectory|too long") as caught:
            write_text(path, "new")
        assert str(caught.value.filename) == str(path)
    write_text(tmp_path / ("n" * 255), "as long as a name can be")
    assert len(contents(tmp_path)) == 1


@pytest.mark.parametrize("there", ["nothing", "folders above", "an empty directory"])
def test_a_directory_appears_whole_or_its_folders_go(tmp_path: Path, there: str) -> None:
    target = tmp_path / "above" / "deep" / "model"
    if there != "nothing":
        (target if there == "an empty directory" else target.parent.parent).mkdir(parents=True)
    before = contents(tmp_path)
    for error in (Stopped, OSError):
        with pytest.raises(error), appearing(target) as partial:  # noqa: PT012
            (partial / "config.json").write_text("{}")
            (partial / "inner").mkdir()
            raise error
        assert contents(tmp_path) == before
    with appearing(target) as partial:
        (partial / "config.json").write_text("{}")
    assert contents(target) == {"config.json": b"{}"}
    plain = tmp_path / "plain"
    plain.mkdir()
    assert target.stat().st_mode == plain.stat().st_mode


def test_somebody_elses_file_in_a_made_folder_stays(tmp_path: Path) -> None:
    target = tmp_path / "above" / "model"
    with pytest.raises(Stopped), appearing(target):  # noqa: PT012
        (tmp_path / "above" / "theirs").write_text("stays")
        raise Stopped
    assert contents(tmp_path) == {"above": None, "above/theirs": b"stays"}


def test_a_directory_is_filled_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    before = contents(tmp_path)
    with pytest.raises(Stopped), filling(tmp_path) as partial:  # noqa: PT012
        (partial / "a").write_text("new")
        raise Stopped
    assert contents(tmp_path) == before
    with filling(tmp_path) as partial:
        (partial / "a").write_text("new")
        (partial / "adapter").mkdir()
        (partial / "adapter" / "b").write_text("too")
    assert contents(tmp_path) == {"a": b"new", "adapter": None, "adapter/b": b"too"}


# Everything that the package writes


def _skips(path: Path) -> None:
    step = SkipStep((1,), (2,), 0.7, 0.8, 1.1, 3)
    SkipSearch((step,)).save(path)


def _sweep() -> Sweep:
    cells = (SweepCell(1, 2, 0.5, 10.0, 1.1), SweepCell(1, 4, 0.5, 10.0, 1.2))
    return Sweep(4, 9.0, cells, 1.1)


def _classifier(path: Path) -> None:
    ones = torch.ones(4)
    save_classifier(eecore.ExitClassifier(torch.ones(4, 2), ones, torch.ones(2, 4)), path)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "skips.json": _skips,
    "sweep.json": lambda path: _sweep().save(path),
    "classifier.safetensors": _classifier,
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_keeps_the_old_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    old = b"old"
    path.write_bytes(old)
    with full_disk(), pytest.raises(Exception, match=r"(?i)file too large"):
        WRITERS[name](path)
    assert contents(tmp_path) == {name: old}
    WRITERS[name](path)
    assert list(contents(tmp_path)) == [name]
    assert len(path.read_bytes()) > 64


def test_nothing_is_written_but_through_these() -> None:
    """Every module that writes a file does so inside a block that makes it whole."""
    writers = {"write_text", "write_bytes", "save_file", "savefig", "save_pretrained", "copyfile"}
    makers = {"replacing", "appearing", "filling"}
    for path in PACKAGE.rglob("*.py"):
        if path == PACKAGE / "files" / "whole.py":
            continue
        tree = ast.parse(path.read_text())
        covered = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.With)
            for item in node.items
            if isinstance(item.context_expr, ast.Call) and _name(item.context_expr) in makers
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or node in covered:
                continue
            text = ast.unparse(node)
            plain = _name(node) == "write_text" and isinstance(node.func, ast.Name)
            assert plain or _name(node) not in writers or "_write_" in _inside(tree, node), (
                f"{path}: {text}"
            )
            opens = _name(node) == "open" and any(
                isinstance(value, ast.Constant) and value.value in ("w", "wb", "x", "xb")
                for value in [*node.args, *(keyword.value for keyword in node.keywords)]
            )
            assert not opens, f"{path}: {text}"


def _name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ast.unparse(call.func)


def _inside(tree: ast.AST, node: ast.AST) -> str:
    """The function around a call: ``_write_...`` is given a folder that is made whole."""
    functions = [
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef) and node in set(ast.walk(function))
    ]
    return " ".join(functions)
