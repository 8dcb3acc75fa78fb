"""The intent model in every exit mode, beside transformers and economize, on held-out utterances.

python bench/bench_intents.py                     the model that ships with eecore
python bench/bench_intents.py --model DIRECTORY   another, made by scripts/intents/train_intents.py

One utterance at a time, greedy, up to the model's end token. All modes run in turns: they parse a
chunk of utterances each, then the next chunk, and ratios are taken within a chunk, so that a busy
machine slows all alike. Prompts are token ids on every side. Writes bench/results/intents.json and
the tables in bench/RESULTS.md and README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import eecore
from eecore.models.source import model_digest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts" / "intents"))

import harness  # noqa: E402
import intent_tables  # noqa: E402
import peers  # noqa: E402
from decode_engines import EngineError, Process  # noqa: E402
from intent_peers import Parse, PeerMode  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "intents.json"
DATA = ROOT / "build" / "intents"
MEASURES = ("softmax", "state", "classifier")
DTYPES = ("float32", "bfloat16")
LONGEST_PARSE = 96  # tokens
WARM_UP = 3  # utterances
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


def eecore_decode(model: eecore.Model, policy: eecore.exits.Exit) -> Decode:
    """One utterance after the other, timed from the outside."""

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
    """From a sixth, a quarter and a third of the layers."""
    pairs = {
        (max(1, num_layers // part), drafts): None for part, drafts in ((6, 4), (4, 6), (3, 6))
    }
    return [eecore.SelfSpeculative(*pair) for pair in pairs]


def default_exits(num_layers: int) -> list[int]:
    """A quarter, half and three quarters of the layers."""
    return sorted({max(1, num_layers * part // 4) for part in (1, 2, 3)})


def calibrated_policies(directory: Path) -> dict[str, eecore.ConfidentExit]:
    """The policy of each measure; exits with the command that makes a file that is missing."""
    classifier_file = directory / "classifier.safetensors"
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
    """Full depth first; each self-speculation is followed by itself without reuse."""
    modes = [Mode("`Full()`", "full", eecore_decode(model, eecore.Full()))]
    for layer in exit_layers:
        decode = eecore_decode(model, eecore.FixedExit(layer))
        modes.append(Mode(f"`FixedExit({layer})`", "fixed", decode))
    for policy in speculations:
        name = speculation_name(policy)
        modes.append(Mode(f"`{name})`", "speculative", eecore_decode(model, policy)))
        without = dataclasses.replace(policy, reuse=False)
        decode = eecore_decode(model, without)
        modes.append(Mode(f"`{name}, reuse=False)`", "without reuse", decode))
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
    ms_per_token_tried: dict[str, float]
    """By dtype, of transformers' generate on the first utterances."""

    @staticmethod
    def start(directory: Path, prompts: list[list[int]], threads: int) -> Peers:
        """In the dtype in which transformers is faster."""
        processes, versions, tried = {}, {}, {}
        script = ROOT / "bench" / "intent_peers.py"
        for dtype in DTYPES:
            command = [peers.python_of("python"), script, directory, dtype, str(threads)]
            processes[dtype] = Process(command, threads)
            versions = processes[dtype].answer(START_TIMEOUT_S)["versions"]
        decodes = {dtype: peer_decode(processes[dtype], PeerMode("full")) for dtype in DTYPES}
        for dtype in (*DTYPES, *DTYPES):  # the second time counts
            parses = decodes[dtype](prompts[:TRIED])
            seconds = sum(parse.seconds for parse in parses)
            tried[dtype] = 1e3 * seconds / sum(len(parse.tokens) for parse in parses)
        best = min(DTYPES, key=tried.__getitem__)
        for dtype in set(DTYPES) - {best}:
            processes[dtype].close()
        return Peers(processes[best], versions, best, tried)

    def modes(
        self, speculations: Sequence[eecore.SelfSpeculative], confident_threshold: float
    ) -> list[Mode]:
        """Full depth, then drafts from the same layers as ours, then confident exits."""
        wanted = [("transformers", PeerMode("full"))]
        for policy in speculations:
            draft = (policy.exit_layer, policy.num_drafts)
            wanted.append(("assisted", PeerMode("assisted", *draft)))
        if self.versions["economize"] is not None:
            for policy in speculations:
                draft = (policy.exit_layer, policy.num_drafts, policy.draft_threshold)
                wanted.append(("economize", PeerMode("economize", *draft)))
            wanted.append(("calm", PeerMode("calm", threshold=confident_threshold)))
        return [Mode(mode.name, group, peer_decode(self.process, mode)) for group, mode in wanted]


def peer_decode(process: Process, mode: PeerMode) -> Decode:
    def decode(prompts: Sequence[list[int]]) -> list[Parse]:
        asked = {"prompts": list(prompts), "max_tokens": LONGEST_PARSE}
        process.send({"mode": asdict(mode), **asked})
        answer = process.answer(ANSWER_TIMEOUT_S)
        if "error" in answer:
            raise EngineError(answer["error"])
        return [Parse(**parse) for parse in answer["parses"]]

    return decode


def start_peers(
    directory: Path, prompts: list[list[int]], threads: int, left_out: dict[str, str]
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
        return Peers.start(directory, prompts, threads)
    except EngineError as error:
        left_out["transformers"] = str(error)
        return None


# Measuring


def measure(
    modes: list[Mode], prompts: list[list[int]], rounds: int, chunk_size: int
) -> dict[str, str]:
    """Every mode on every chunk, in turns; returns why modes of peers were left out, by name."""
    left_out: dict[str, str] = {}
    chunks = [prompts[i : i + chunk_size] for i in range(0, len(prompts), chunk_size)]
    for mode in list(modes):
        take_turn(mode, modes, prompts[:WARM_UP], left_out)
        mode.chunks.clear()
    for number in range(rounds):
        for position, chunk in enumerate(chunks):
            began = time.perf_counter()
            for mode in list(modes):
                take_turn(mode, modes, chunk, left_out)
            print(
                f"round {number + 1} of {rounds}, chunk {position + 1} of {len(chunks)}: "
                f"{time.perf_counter() - began:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    return left_out


def take_turn(
    mode: Mode, modes: list[Mode], prompts: list[list[int]], left_out: dict[str, str]
) -> None:
    """One chunk; a mode that fails leaves the run."""
    try:
        mode.chunks.append(mode.decode(prompts))
    except EngineError as error:
        modes.remove(mode)
        left_out[mode.name] = str(error)
        print(f"{mode.name} is left out: {error}", file=sys.stderr)


def broken_promises(modes: Sequence[Mode]) -> list[str]:
    """Where self-speculation did not give the tokens of full depth."""
    full = [parse.tokens for chunk in modes[0].chunks for parse in chunk]
    found = []
    for mode in modes:
        if mode.group not in ("speculative", "without reuse"):
            continue
        own = [parse.tokens for chunk in mode.chunks for parse in chunk]
        differing = [i for i, pair in enumerate(zip(own, full, strict=True)) if pair[0] != pair[1]]
        if differing:
            i = differing[0]
            found.append(
                f"{mode.name}: expected the tokens of Full(), got others for {len(differing)} of "
                f"{len(full)} parses, the first {own[i]} instead of {full[i]}"
            )
    return found


# The command


def utterances(folder: Path, count: int) -> list[dict[str, str]]:
    """The first of the held-out split; the data is made where there is none."""
    file = folder / "test.jsonl"
    if not file.is_file():
        try:
            import make_data
        except ImportError as error:
            hint = "making it needs pip install 'eecore[intents]'"
            raise SystemExit(f"{file}: expected a file, got nothing; {hint}: {error}") from None
        make_data.main(folder)
    records = [json.loads(line) for line in file.read_text().splitlines()[:count]]
    if len(records) < count:
        raise SystemExit(f"--count: expected at most {len(records)} with {file}, got {count}")
    return records


def model_directory(given: Path | None) -> Path:
    """The one given, or the one that ships with eecore."""
    if given is not None:
        return given
    default = getattr(eecore, "default_model", None)
    if default is None:
        raise SystemExit("--model: expected a model directory, since this eecore ships with none")
    return Path(default())


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """All figures, and which promises were broken."""
    directory = model_directory(arguments.model)
    calibrated = {} if arguments.skip_calibrated else calibrated_policies(directory)
    records = utterances(arguments.data, arguments.count)
    model = eecore.load(directory, device="cpu", kv_cache_tokens=1024)
    tokenizer, num_layers = model.tokenizer, model.config.num_layers
    assert tokenizer is not None
    prompts = [tokenizer.encode(record["input"]) for record in records]
    speculations = arguments.speculate or default_speculations(num_layers)
    exit_layers = arguments.fixed or default_exits(num_layers)
    modes = eecore_modes(model, exit_layers, speculations, calibrated)
    left_out: dict[str, str] = {}
    beside = None
    if not arguments.skip_peers:
        beside = start_peers(directory, prompts, arguments.threads, left_out)
    if beside is not None:
        threshold = calibrated["softmax"].threshold if calibrated else 0.9
        modes += beside.modes(speculations, threshold)
    try:
        left_out |= measure(modes, prompts, arguments.rounds, arguments.chunk)
    finally:
        if beside is not None:
            beside.process.close()
    result = {
        "cpu": harness.cpu_name(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "threads": arguments.threads,
        "torch": torch.__version__,
        "peers": None
        if beside is None
        else {
            "versions": beside.versions,
            "dtype": beside.dtype,
            "ms_per_token_tried": beside.ms_per_token_tried,
        },
        "left_out": left_out,
        "model_sha256": model_digest(directory),
        "num_layers": num_layers,
        "dtype": str(model.network.dtype).removeprefix("torch."),
        "utterances": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "rounds": arguments.rounds,
        "chunk": arguments.chunk,
        "contracts": {measure: policy.contract for measure, policy in calibrated.items()},
    }
    decoded = {
        mode.name: [tokenizer.decode(parse.tokens) for chunk in mode.chunks for parse in chunk]
        for mode in modes
    }
    targets = [record["target"] for record in records] * arguments.rounds
    result["modes"] = [
        {
            "name": mode.name,
            "group": mode.group,
            "exact_match": share_of_equals(decoded[mode.name], targets),
            **intent_tables.figures(mode, modes),
        }
        for mode in modes
    ]
    result["reuse"] = intent_tables.reuse(modes)
    return result, broken_promises(modes)


def share_of_equals(these: Sequence[Any], those: Sequence[Any]) -> float:
    return sum(a == b for a, b in zip(these, those, strict=True)) / len(those)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--model", type=Path, help="a directory; the model that ships with eecore")
    made.add_argument("--data", type=Path, default=DATA, help="made where it is missing")
    made.add_argument("--count", type=int, default=1000, help="utterances")
    made.add_argument("--chunk", type=int, default=50, help="utterances a turn")
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--threads", type=int, default=1)
    made.add_argument("--fixed", type=int, nargs="+", metavar="E", help="depths of FixedExit")
    made.add_argument(
        "--speculate", type=speculation, nargs="+", metavar="E,D[,THRESHOLD]", help="pairs to try"
    )
    made.add_argument("--skip-calibrated", action="store_true", help="no calibrated exits")
    made.add_argument("--skip-peers", action="store_true", help="eecore alone")
    made.add_argument("--dry-run", action="store_true", help="print the tables, write nothing")
    made.add_argument("--tables", action="store_true", help="write those of the JSON file again")
    return made


def write_tables(result: dict[str, Any]) -> None:
    """Into RESULTS.md and, the rows that matter, README.md."""
    harness.insert(ROOT / "bench" / "RESULTS.md", "intents", intent_tables.full(result))
    harness.insert(ROOT / "README.md", "intents", intent_tables.short(result))


def main() -> None:
    arguments = parser().parse_args()
    if arguments.tables:
        write_tables(json.loads(RESULTS.read_text()))
        return
    torch.set_num_threads(arguments.threads)
    try:
        result, broken = run(arguments)
    except eecore.EecoreError as error:
        raise SystemExit(str(error)) from None
    print(intent_tables.full(result))
    if broken:
        raise SystemExit("\n".join(broken))
    if not arguments.dry_run:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(result, indent=1) + "\n")
        write_tables(result)


if __name__ == "__main__":
    main()
