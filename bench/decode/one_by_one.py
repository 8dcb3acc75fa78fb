"""Prompts one after the other, the first new tokens timed separately, by eecore and by peers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import eecore
from bench.decode.parses import Parse, PeerMode
from bench.harness import peers
from bench.harness.processes import EngineError, Process

START_TIMEOUT_S, ANSWER_TIMEOUT_S = 300, 900

Decode = Callable[[Sequence[list[int]]], list[Parse]]


def eecore_decode(model: eecore.Model, policy: eecore.exits.Exit, max_tokens: int) -> Decode:
    """Decodes one prompt after the other in this process, timed around the engine's steps."""

    def one(prompt: list[int]) -> Parse:
        first_seconds, first_tokens = 0.0, 0
        output = None
        started = time.perf_counter()
        for step in eecore.stream(model, prompt, exit=policy, max_tokens=max_tokens):
            if not first_tokens:
                first_seconds = time.perf_counter() - started
                first_tokens = len(step.token_ids)
            output = step.output
        seconds = time.perf_counter() - started
        assert output is not None
        return Parse(
            tokens=output.token_ids,
            seconds=seconds,
            first_seconds=first_seconds,
            first_tokens=first_tokens,
            drafted=output.stats.drafted,
            accepted=output.stats.accepted,
            depth=sum(output.exit_layers),
        )

    return lambda prompts: [one(prompt) for prompt in prompts]


def peer_process(directory: Path, dtype: str, threads: int) -> Process:
    """A process with one model in transformers, and in economize if it is installed."""
    command = [peers.python_of("python"), "-m", "bench.decode.peer_worker"]
    return Process([*command, directory, dtype, str(threads)], threads)


def peer_decode(process: Process, mode: PeerMode, max_tokens: int) -> Decode:
    def decode(prompts: Sequence[list[int]]) -> list[Parse]:
        asked = {"prompts": list(prompts), "max_tokens": max_tokens}
        process.send({"mode": asdict(mode), **asked})
        answer = process.answer(ANSWER_TIMEOUT_S)
        if "error" in answer:
            raise EngineError(answer["error"])
        return [Parse(**parse) for parse in answer["parses"]]

    return decode
