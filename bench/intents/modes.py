"""The modes of the intent model, one prompt after the other: eecore's, and the peers'."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import eecore
from bench.harness import peers
from bench.harness.processes import START_TIMEOUT_S, EngineError, Process
from bench.harness.utterances import LONGEST_PARSE
from bench.intents.peer_worker import Parse, PeerMode

ANSWER_TIMEOUT_S = 900

Decode = Callable[[Sequence[list[int]]], list[Parse]]


@dataclass
class Mode:
    """One row of the table."""

    name: str
    group: str
    """The modes that it is compared with: see :func:`bench.intents.intents.figures`."""
    decode: Decode
    chunks: list[list[Parse]] = field(default_factory=list)
    """One entry for each round and chunk of utterances, in order."""

    @property
    def parses(self) -> list[Parse]:
        return [parse for chunk in self.chunks for parse in chunk]


def eecore_decode(model: eecore.Model, policy: eecore.exits.Exit) -> Decode:
    """Decodes one prompt after the other in this process, timed around the engine's steps."""

    def one(prompt: list[int]) -> Parse:
        first_seconds, first_tokens = 0.0, 0
        output = None
        started = time.perf_counter()
        for step in eecore.stream(model, prompt, exit=policy, max_tokens=LONGEST_PARSE):
            if not first_tokens:
                first_seconds = time.perf_counter() - started
                first_tokens = len(step.token_ids)
            output = step.output
        seconds = time.perf_counter() - started
        assert output is not None
        drafts, depth = (output.stats.drafted, output.stats.accepted), sum(output.exit_layers)
        return Parse(output.token_ids, seconds, first_seconds, first_tokens, *drafts, depth)

    return lambda prompts: [one(prompt) for prompt in prompts]


def speculations(num_layers: int) -> list[eecore.SelfSpeculative]:
    """Self-speculation with drafts from a sixth and from a quarter of the layers."""
    pairs = [(max(1, num_layers // part), drafts) for part, drafts in ((6, 6), (4, 6), (4, 8))]
    return [eecore.SelfSpeculative(*pair) for pair in dict.fromkeys(pairs)]


def eecore_modes(
    model: eecore.Model, calibrated: dict[str, eecore.ConfidentExit], *, int8: bool = False
) -> list[Mode]:
    """eecore's modes, full depth first.

    With weights of eight bits these are full depth and self-speculation alone, and the names of
    their groups begin with int8.
    """
    kind, suffix = ("int8 ", ", int8 weights") if int8 else ("", "")
    num_layers = model.config.num_layers
    policies: list[tuple[str, str, eecore.exits.Exit]] = [("`Full()`", "full", eecore.Full())]
    if not int8:
        for layer in sorted({max(1, num_layers * part // 4) for part in (1, 2, 3)}):
            policies.append((f"`FixedExit({layer})`", "fixed", eecore.FixedExit(layer)))
    for policy in speculations(num_layers):
        name = f"`SelfSpeculative({policy.exit_layer}, {policy.num_drafts})`"
        policies.append((name, "speculative", policy))
    for measure, confident in calibrated.items():
        name = f"`ConfidentExit.calibrated`, {measure} at {confident.threshold:g}"
        policies.append((name, "confident", confident))
    return [
        Mode(f"{name}{suffix}", f"{kind}{group}", eecore_decode(model, policy))
        for name, group, policy in policies
    ]


@dataclass
class Peers:
    """transformers and economize with the same weights, in a process of their own."""

    process: Process
    versions: dict[str, str | None]

    @staticmethod
    def start(directory: Path, threads: int, left_out: dict[str, str]) -> Peers | None:
        """None without transformers; ``left_out`` gets what is missing, and why."""
        made = peers.prepare(["transformers", "economize"])
        left_out |= {name: peer.reason for name, peer in made.items() if not peer.available}
        if "transformers" in left_out:
            return None
        command = [peers.python_of("python"), "-m", "bench.intents.peer_worker"]
        process = Process([*command, directory, "float32", str(threads)], threads)
        try:
            return Peers(process, process.answer(START_TIMEOUT_S)["versions"])
        except EngineError as error:
            left_out["transformers"] = str(error)
            return None

    def decode(self, mode: PeerMode) -> Decode:
        def decode(prompts: Sequence[list[int]]) -> list[Parse]:
            asked: dict[str, Any] = {"prompts": list(prompts), "max_tokens": LONGEST_PARSE}
            self.process.send({"mode": asdict(mode), **asked})
            answer = self.process.answer(ANSWER_TIMEOUT_S)
            if "error" in answer:
                raise EngineError(answer["error"])
            return [Parse(**parse) for parse in answer["parses"]]

        return decode

    def modes(self, num_layers: int, confident_threshold: float) -> list[Mode]:
        """Full depth, then drafts from the same layers as eecore's, then confident exits."""
        pairs = [(policy.exit_layer, policy.num_drafts) for policy in speculations(num_layers)]
        wanted = [PeerMode("transformers"), *(PeerMode("assisted", *pair) for pair in pairs)]
        if self.versions["economize"] is not None:
            wanted += [PeerMode("economize", *pair) for pair in pairs]
            wanted.append(PeerMode("calm", threshold=confident_threshold))
        return [Mode(mode.name, mode.kind, self.decode(mode)) for mode in wanted]
