"""The modes of bench_intents.py: eecore's in this process, the peers' in one of their own."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import eecore
import peers
from decode_engines import EngineError, Process
from eecore.readable import beside_model
from intent_peers import Parse, PeerMode
from intent_tables import ms_per_token

SCRIPT = Path(__file__).with_name("intent_peers.py")
MEASURES = ("softmax", "state", "classifier")
DTYPES = ("float32", "bfloat16")
LONGEST_PARSE = 96  # tokens
TRIED = 10  # utterances, to see in which dtype the peers are faster
START_TIMEOUT_S, ANSWER_TIMEOUT_S = 300, 900

Decode = Callable[[Sequence[list[int]]], list[Parse]]


@dataclass
class Mode:
    """One row of the table."""

    name: str
    group: str
    """What it is compared with: see ``intent_tables.figures``."""
    decode: Decode
    chunks: list[list[Parse]] = field(default_factory=list)
    """One a round and chunk of utterances, in order."""


# eecore's modes


def eecore_decode(
    model: eecore.Model, policy: eecore.exits.Exit, max_tokens: int = LONGEST_PARSE
) -> Decode:
    """One utterance after the other, timed from the outside."""

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


def speculation(text: str) -> eecore.SelfSpeculative:
    """``3,6`` or, with a threshold for the draft to go on, ``3,6,0.5``."""
    exit_layer, num_drafts, *threshold = text.split(",")
    return eecore.SelfSpeculative(int(exit_layer), int(num_drafts), *map(float, threshold))


def default_speculations(num_layers: int) -> list[eecore.SelfSpeculative]:
    """From a sixth and a quarter of the layers."""
    pairs = {
        (max(1, num_layers // part), drafts): None for part, drafts in ((6, 6), (4, 6), (4, 8))
    }
    return [eecore.SelfSpeculative(*pair) for pair in pairs]


def default_exits(num_layers: int) -> list[int]:
    """A quarter, half and three quarters of the layers."""
    return sorted({max(1, num_layers * part // 4) for part in (1, 2, 3)})


def calibrated_policies(directory: Path) -> dict[str, eecore.ConfidentExit]:
    """The policy of each measure; exits with the command that makes a file that is missing."""
    classifier_file = beside_model(directory, "classifier.safetensors")
    policies = {}
    for measure in MEASURES:
        file = directory / f"calibration-{measure}.json"
        command = f"eecore calibrate {directory} --measure {measure} --data DATA --out {file}"
        classifier = None
        if measure == "classifier":
            training = f"eecore train-classifier {directory} --data DATA --out {classifier_file}"
            require(classifier_file, training)
            classifier = eecore.ExitClassifier.load(classifier_file)
            command += f" --classifier {classifier_file}"
        require(file, command)
        policies[measure] = eecore.ConfidentExit.calibrated(file, classifier)
    return policies


def require(file: Path, command: str) -> None:
    if not file.is_file():
        raise SystemExit(
            f"{file}: expected a file, got nothing; make it with\n  {command}\n"
            "or leave calibrated exits out with --skip-calibrated"
        )


def eecore_modes(
    model: eecore.Model,
    exit_layers: Sequence[int],
    speculations: Sequence[eecore.SelfSpeculative],
    calibrated: dict[str, eecore.ConfidentExit],
) -> list[Mode]:
    """Full depth first; each self-speculation is followed by itself without reuse.

    With weights of eight bits the groups are called so.
    """
    source = model.network.source
    is_int8 = source is not None and source.weights == "int8"
    kind, suffix = ("int8 ", ", int8 weights") if is_int8 else ("", "")
    modes = [Mode(f"`Full()`{suffix}", f"{kind}full", eecore_decode(model, eecore.Full()))]
    for layer in exit_layers:
        decode = eecore_decode(model, eecore.FixedExit(layer))
        modes.append(Mode(f"`FixedExit({layer})`", "fixed", decode))
    for policy in speculations:
        name = speculation_name(policy)
        decode = eecore_decode(model, policy)
        modes.append(Mode(f"`{name})`{suffix}", f"{kind}speculative", decode))
        without = dataclasses.replace(policy, reuse=False)
        decode = eecore_decode(model, without)
        name = f"`{name}, reuse=False)`{suffix}"
        modes.append(Mode(name, f"{kind}without reuse", decode))
    for measure, confident in calibrated.items():
        name = f"`ConfidentExit.calibrated`, {measure} at {confident.threshold:g}"
        modes.append(Mode(name, "confident", eecore_decode(model, confident)))
    return modes


def speculation_name(policy: eecore.SelfSpeculative) -> str:
    """Without the closing bracket."""
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
    """By dtype and mode, of transformers on the first utterances."""

    @staticmethod
    def start(
        directory: Path,
        prompts: list[list[int]],
        speculations: Sequence[eecore.SelfSpeculative],
        threads: int,
    ) -> Peers:
        """In the dtype of transformers' fastest mode."""
        processes, versions = {}, {}
        for dtype in DTYPES:
            command = [peers.python_of("python"), SCRIPT, directory, dtype, str(threads)]
            processes[dtype] = Process(command, threads)
            versions = processes[dtype].answer(START_TIMEOUT_S)["versions"]
        tried: dict[str, dict[str, float]] = {dtype: {} for dtype in DTYPES}
        modes = [mode for _, mode in transformers_modes(speculations)]
        for mode, dtype in itertools.product([*modes, *modes], DTYPES):  # the second time counts
            parses = peer_decode(processes[dtype], mode)(prompts[:TRIED])
            tried[dtype][mode.name] = ms_per_token(parses)
        best = min(DTYPES, key=lambda dtype: min(tried[dtype].values()))
        for dtype in set(DTYPES) - {best}:
            processes[dtype].close()
        return Peers(processes[best], versions, best, tried)

    def modes(
        self, speculations: Sequence[eecore.SelfSpeculative], confident_threshold: float
    ) -> list[Mode]:
        """Full depth, then drafts from the same layers as ours, then confident exits."""
        wanted = transformers_modes(speculations)
        if self.versions["economize"] is not None:
            for policy in speculations:
                draft = (policy.exit_layer, policy.num_drafts, policy.draft_threshold)
                wanted.append(("economize", PeerMode("economize", *draft)))
            wanted.append(("calm", PeerMode("calm", threshold=confident_threshold)))
        return [Mode(mode.name, group, peer_decode(self.process, mode)) for group, mode in wanted]


def transformers_modes(
    speculations: Sequence[eecore.SelfSpeculative],
) -> list[tuple[str, PeerMode]]:
    """Group and mode: generate, then with drafts from the same layers as ours."""
    pairs = dict.fromkeys((policy.exit_layer, policy.num_drafts) for policy in speculations)
    assisted = [("assisted", PeerMode("assisted", *pair)) for pair in pairs]
    return [("transformers", PeerMode("full")), *assisted]


def peer_decode(process: Process, mode: PeerMode, max_tokens: int = LONGEST_PARSE) -> Decode:
    def decode(prompts: Sequence[list[int]]) -> list[Parse]:
        asked = {"prompts": list(prompts), "max_tokens": max_tokens}
        process.send({"mode": asdict(mode), **asked})
        answer = process.answer(ANSWER_TIMEOUT_S)
        if "error" in answer:
            raise EngineError(answer["error"])
        return [Parse(**parse) for parse in answer["parses"]]

    return decode


def start_peers(
    directory: Path,
    prompts: list[list[int]],
    speculations: Sequence[eecore.SelfSpeculative],
    threads: int,
    left_out: dict[str, str],
) -> Peers | None:
    """None where transformers cannot be had; what is missing goes to ``left_out``, with the why."""
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
