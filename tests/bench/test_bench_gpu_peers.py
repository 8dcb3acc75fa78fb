"""The peers of a GPU, run on the CPU with tiny shapes: their results, not their speed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.gpu import peers
from bench.harness.places import ROOT

CPU = torch.device("cpu")
TINY = peers.SHAPES["tiny"]


def test_a_step_of_transformers_may_be_run_again() -> None:
    step = peers.transformers_step(TINY, 2, 20, CPU, torch.float32)
    first = step()
    assert isinstance(first, Tensor)
    torch.testing.assert_close(step(), first)


def test_each_peer_is_timed_and_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--device", "cpu", "--model", "tiny", "--rounds", "1"]) == 0
    text = capsys.readouterr().out
    assert "transformers, static cache, one graph" in text
    assert "| LM head 64 -> 128, 8 rows | cuBLAS |" in text
    assert "prompt B=1 m=24 L=40 | SDPA |" in text


def test_a_peer_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    (work, *_) = peers.attention_works(True, CPU, torch.float32)
    right = peers.AttentionInputs.one_by_one
    monkeypatch.setattr(peers.AttentionInputs, "one_by_one", lambda self: right(self) * 1.1)
    row = peers.measured(work, CPU, 1)
    assert "results differ" in row["error"]
    assert "microseconds" not in row


def test_attention_of_ragged_queries_is_that_of_each_sequence() -> None:
    even, ragged, _ = peers.attention_cases(True)
    inputs = peers.AttentionInputs(ragged, CPU, torch.float32)
    assert not inputs.is_even
    assert inputs.peers() == {}  # torch has no call for it
    assert inputs.one_by_one().shape == inputs.q.shape
    same = peers.AttentionInputs(replace(even, queries=(3, 3)), CPU, torch.float32)
    torch.testing.assert_close(same.sdpa(None)(), same.one_by_one(), rtol=1e-4, atol=1e-5)


def test_what_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "is_installed", lambda _: False)
    words = ["--device", "cpu", "--model", "tiny", "--only", "transformers"]
    assert peers.main(words) == 0
    assert "transformers is not installed" in capsys.readouterr().err
    assert peers.main(["--build"]) == 2
    assert "flashinfer is not installed" in capsys.readouterr().err


def test_peers_and_the_plan_need_no_build() -> None:
    """They run first, so that a failing build costs only what needs it."""
    code = (
        "import sys; sys.modules['eecore._C'] = None; import bench.gpu.run, bench.gpu.peers;"
        "raise SystemExit(bench.gpu.peers.main("
        "['--device', 'cpu', '--model', 'tiny', '--only', 'products', '--rounds', '1']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
