"""The modes of the intent model: eecore's in this process, the peers' in another."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import eecore
from bench.decode.one_by_one import START_TIMEOUT_S, eecore_decode, peer_decode, peer_process
from bench.decode.parses import PeerMode
from bench.harness import peers
from bench.harness.processes import EngineError, Process
from bench.harness.utterances import LONGEST_PARSE
from bench.intents.figures import Mode, ms_per_token

DTYPES = ("float32", "bfloat16")
TRIED = 10  # utterances, to see in which dtype the peers are faster


# eecore's modes


def speculation(text: str) -> eecore.SelfSpeculative:
    """The policy of a text: ``3,6`` or, with a threshold at which drafting stops, ``3,6,0.5``."""
    exit_layer, num_drafts, *threshold = text.split(",")
    return eecore.SelfSpeculative(int(exit_layer), int(num_drafts), *map(float, threshold))


def default_speculations(num_layers: int) -> list[eecore.SelfSpeculative]:
    """Self-speculation with drafts from a sixth and from a quarter of the layers."""
    pairs = {
        (max(1, num_layers // part), drafts): None for part, drafts in ((6, 6), (4, 6), (4, 8))
    }
    return [eecore.SelfSpeculative(*pair) for pair in pairs]


def default_exits(num_layers: int) -> list[int]:
    """Exit layers at a quarter, half and three quarters of the layers."""
    return sorted({max(1, num_layers * part // 4) for part in (1, 2, 3)})


def eecore_modes(
    model: eecore.Model,
    exit_layers: Sequence[int],
    speculations: Sequence[eecore.SelfSpeculative],
    calibrated: dict[str, eecore.ConfidentExit],
) -> list[Mode]:
    """eecore's modes, full depth first; each self-speculation also without reuse.

    The names of the groups begin with int8 if the weights have eight bits.
    """
    source = model.network.source
    is_int8 = source is not None and source.weights == "int8"
    kind, suffix = ("int8 ", ", int8 weights") if is_int8 else ("", "")
    modes = [
        Mode(f"`Full()`{suffix}", f"{kind}full", eecore_decode(model, eecore.Full(), LONGEST_PARSE))
    ]
    for layer in exit_layers:
        decode = eecore_decode(model, eecore.FixedExit(layer), LONGEST_PARSE)
        modes.append(Mode(f"`FixedExit({layer})`", "fixed", decode))
    for policy in speculations:
        name = speculation_name(policy)
        decode = eecore_decode(model, policy, LONGEST_PARSE)
        modes.append(Mode(f"`{name})`{suffix}", f"{kind}speculative", decode))
        without = dataclasses.replace(policy, reuse=False)
        decode = eecore_decode(model, without, LONGEST_PARSE)
        name = f"`{name}, reuse=False)`{suffix}"
        modes.append(Mode(name, f"{kind}without reuse", decode))
    for measure, confident in calibrated.items():
        name = f"`ConfidentExit.calibrated`, {measure} at {confident.threshold:g}"
        modes.append(Mode(name, "confident", eecore_decode(model, confident, LONGEST_PARSE)))
    return modes


def speculation_name(policy: eecore.SelfSpeculative) -> str:
    """The name of a policy, without the closing bracket."""
    threshold = policy.draft_threshold
    rest = "" if threshold is None else f", {threshold:g}"
    return f"SelfSpeculative({policy.exit_layer}, {policy.num_drafts}{rest}"


# The peers


@dataclass
class Peers:
    """transformers and economize with the same weights, in a process of their own."""

    process: Process
    versions: dict[str, str | None]
    dtype: str
    ms_per_token_tried: dict[str, dict[str, float]]
    """Milliseconds by dtype and mode, of transformers on the first utterances."""

    @staticmethod
    def start(
        directory: Path,
        prompts: list[list[int]],
        speculations: Sequence[eecore.SelfSpeculative],
        threads: int,
    ) -> Peers:
        """Start the peers in the dtype of transformers' fastest mode."""
        processes, versions = {}, {}
        for dtype in DTYPES:
            processes[dtype] = peer_process(directory, dtype, threads)
            versions = processes[dtype].answer(START_TIMEOUT_S)["versions"]
        tried: dict[str, dict[str, float]] = {dtype: {} for dtype in DTYPES}
        modes = [mode for _, mode in transformers_modes(speculations)]
        for mode, dtype in itertools.product([*modes, *modes], DTYPES):  # the second time counts
            parses = peer_decode(processes[dtype], mode, LONGEST_PARSE)(prompts[:TRIED])
            tried[dtype][mode.name] = ms_per_token(parses)
        best = min(DTYPES, key=lambda dtype: min(tried[dtype].values()))
        for dtype in set(DTYPES) - {best}:
            processes[dtype].close()
        return Peers(processes[best], versions, best, tried)

    def modes(
        self, speculations: Sequence[eecore.SelfSpeculative], confident_threshold: float
    ) -> list[Mode]:
        """Full depth, then drafts from the same layers as eecore's, then confident exits."""
        wanted = transformers_modes(speculations)
        if self.versions["economize"] is not None:
            for policy in speculations:
                draft = (policy.exit_layer, policy.num_drafts, policy.draft_threshold)
                wanted.append(("economize", PeerMode("economize", *draft)))
            wanted.append(("calm", PeerMode("calm", threshold=confident_threshold)))
        return [
            Mode(mode.name, group, peer_decode(self.process, mode, LONGEST_PARSE))
            for group, mode in wanted
        ]


def transformers_modes(
    speculations: Sequence[eecore.SelfSpeculative],
) -> list[tuple[str, PeerMode]]:
    """(group, mode): generate, then generate with drafts from the same layers as eecore's."""
    pairs = dict.fromkeys((policy.exit_layer, policy.num_drafts) for policy in speculations)
    assisted = [("assisted", PeerMode("assisted", *pair)) for pair in pairs]
    return [("transformers", PeerMode("full")), *assisted]


def start_peers(
    directory: Path,
    prompts: list[list[int]],
    speculations: Sequence[eecore.SelfSpeculative],
    threads: int,
    left_out: dict[str, str],
) -> Peers | None:
    """The peers, or None without transformers; ``left_out`` gets what is missing, and why."""
    made = peers.prepare(["transformers", "economize"])
    left_out |= {
        name: made[name].reason
        for name in ("transformers", "economize")
        if not made[name].available
    }
    if "transformers" in left_out:
        return None
    try:
        return Peers.start(directory, prompts, speculations, threads)
    except EngineError as error:
        left_out["transformers"] = str(error)
        return None
