"""The benchmark inside vLLM: its modes, its check. No timing is judged, no vLLM run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.integrations import vllm as bench_vllm

ROOT = Path(__file__).resolve().parents[1]


class Counting:
    """An engine that says how long its prompts are."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.batches: list[int] = []

    def generate(self, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
        assert tokens == bench_vllm.LONGEST_PARSE
        self.batches.append(len(prompts))
        return self.seconds, [[0, len(prompt)] for prompt in prompts]


def test_tokens_a_second_and_speed_ups() -> None:
    engines = {bench_vllm.PLAIN: Counting(2.0), "drafts": Counting(0.5)}
    rows = bench_vllm.measure(engines, [[1], [2, 3], [4]], 2, 3)
    assert rows == [
        {"mode": bench_vllm.PLAIN, "same": 3, "of": 3, "tokens_per_s": 1.5, "speedup": 1.0},
        {"mode": "drafts", "same": 3, "of": 3, "tokens_per_s": 6.0, "speedup": 4.0},
    ]
    # A round that warms up, and three that count.
    assert engines["drafts"].batches == [2, 1] * 4


def test_answers_that_are_not_those_of_vllm_alone_are_counted() -> None:
    class Wrong(Counting):
        def generate(self, prompts: list[list[int]], tokens: int) -> Any:
            seconds, answers = super().generate(prompts, tokens)
            return seconds, [[9] if answer[1] == 2 else answer for answer in answers]

    engines = {bench_vllm.PLAIN: Counting(1.0), "drafts": Wrong(1.0)}
    rows = bench_vllm.measure(engines, [[1], [2, 3], [4]], 3, 1)
    assert [row["same"] for row in rows] == [3, 2]


def test_modes_draft_with_each_number_of_layers() -> None:
    found = [
        (
            settings["additional_config"]["eecore"]["exit_layer"],
            settings["speculative_config"]["num_speculative_tokens"],
        )
        for settings in bench_vllm.modes().values()
        if settings
    ]
    assert found == [(2, 4), (2, 6), (3, 4), (3, 6)]
