"""The example of an engine on eecore's ops, beside the runtime."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import eecore
from nano_engine import NanoEngine, main
from tiny_models import random_prompts, write_model

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nano_engine.py"
PROMPTS = random_prompts(3, 17, 1, 40)


@pytest.mark.parametrize("family", ["llama", "llama_tied", "smollm2"])
@pytest.mark.parametrize("threshold", [0.0, 0.15, 1.1])
def test_answers_and_depths_are_the_runtimes(tmp_path: Path, family: str, threshold: float) -> None:
    directory = write_model(tmp_path, family)
    engine = NanoEngine(directory, len(PROMPTS), 64)
    texts, depths = engine.generate(PROMPTS, 12, {1, 3}, threshold)
    policy = eecore.ConfidentExit(min(threshold, 1.0), exit_points=(1, 3))
    model = eecore.load(directory, device="cpu", kv_cache_tokens=512)
    outputs = eecore.generate(model, PROMPTS, exit=policy, max_tokens=12)
    assert texts == [output.token_ids for output in outputs]
    assert depths == [output.exit_layers for output in outputs]
    seen = {depth for row in depths for depth in row[1:]}
    assert len(seen) > 1 if threshold == 0.15 else seen == {0.0: {1}, 1.1: {4}}[threshold]


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(EXAMPLE), str(write_model(tmp_path)), "some text", "more", "--max-tokens", "4"]
    monkeypatch.setattr(sys, "argv", words)
    main()
    assert capsys.readouterr().out.count("layers: [") == 2


def test_it_fits_on_two_hundred_lines() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 200
