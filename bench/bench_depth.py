"""Whether saved layers become saved time: exits and self-speculation beside what they should take.

python bench/bench_depth.py                                       all of it, about 20 minutes
python bench/bench_depth.py --models intent --weights int8        a part of it
python bench/bench_depth.py --quick --dry-run --json FILE         fewer rounds, batches, threads

Engine steps of decoding alone are timed, greedy, prompts and first tokens left out. All modes of a
model run in turns, every round the same tokens; a step's time is the least of its rounds. What a
mode should take is predicted from the model cut at some depths and from the ops timed alone, all in
the same rounds (depth_predictions.py). Writes bench/results/depth.json and the tables in
bench/RESULTS.md and README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import eecore

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import depth_tables  # noqa: E402
import harness  # noqa: E402
from depth_kernels import Kernels  # noqa: E402
from depth_models import SUBJECTS, Mode, Subject, cuts, depths  # noqa: E402
from depth_predictions import Costs, Curve, Line  # noqa: E402

RESULTS = ROOT / "bench" / "results" / "depth.json"
LOADING = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"weights": "int8", "dtype": "float32"},
}
CURVE_STEPS = 3  # of large batches
MOST_ROWS = 32  # of those that are not
SINGLES, GROUPS = 6, 2  # batches of one prompt, and of more, that a trained model has in turn
LONGEST = 64  # tokens of a prompt
MIXED_ROWS = 8  # at most, where there are so few
ARRIVING = 64  # tokens of a prompt that arrives
PAGE_SIZE = 16


# Decoding


class Step(NamedTuple):
    """One iteration of an engine."""

    seconds: float
    exit_layers: list[int]
    """Of the tokens that came out."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that decode together."""

    prompts: list[list[int]]
    policies: list[eecore.exits.Exit]
    sampled: int = 0
    """So many of the first ones are sampled."""
    arriving: list[int] | None = None
    """A prompt that comes in with every step, for one token."""


class Decoding:
    """An engine that decodes the same batches, one after the other, every round."""

    def __init__(self, model: eecore.Model, batches: Sequence[Batch], steps: int) -> None:
        self._batches = batches
        first = batches[0]
        self._rows = len(first.prompts)
        most = max(policy.max_drafts for policy in first.policies)
        self._steps = steps
        self._room = 1 + (self._steps + 1) * (most + 1)  # nobody is done, nor drafts less
        prompt = max(len(prompt) for batch in batches for prompt in batch.prompts)
        pages = 2 + (2 * prompt + self._room) // PAGE_SIZE
        arriving = 2 * ARRIVING if first.arriving else 0
        config = dataclasses.replace(
            model.engine_config,
            kv_cache_tokens=self._rows * (pages + 1) * PAGE_SIZE + arriving,
            page_size=PAGE_SIZE,
            max_num_seqs=self._rows + 1,
        )
        self._engine = model.engine(config)
        self.rounds: list[list[Step]] = []

    def round(self) -> None:
        """All batches once."""
        self.rounds.append([step for batch in self._batches for step in self._decode(batch)])

    def _decode(self, batch: Batch) -> list[Step]:
        engine = self._engine
        ids = set()
        for row, (prompt, policy) in enumerate(zip(batch.prompts, batch.policies, strict=True)):
            sampling = eecore.SamplingParams(
                max_tokens=self._room,
                temperature=0.8 if row < batch.sampled else 0.0,
                seed=row,
                ignore_eos=True,
            )
            ids.add(engine.add_request(prompt, exit=policy, sampling=sampling))
        waiting = set(ids)
        while waiting:
            waiting -= {output.request_id for output in engine.step()}
        steps: list[Step] = []
        for _ in range(self._steps):
            if batch.arriving is not None:
                one = eecore.SamplingParams(max_tokens=1, ignore_eos=True)
                engine.add_request(batch.arriving, exit="full", sampling=one)
            began = time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - began
            own = (output.exit_layers for output in outputs if output.request_id in ids)
            steps.append(Step(seconds, [layer for layers in own for layer in layers]))
        for request_id in ids:
            engine.cancel(request_id)
        return steps

    @property
    def exits(self) -> list[list[int]]:
        """The exit layers of each step, the same in every round."""
        return [step.exit_layers for step in self.rounds[-1]]

    @property
    def tokens_per_step(self) -> float:
        """And request."""
        return statistics.fmean(map(len, self.exits)) / self._rows

    @property
    def step_ms(self) -> float:
        """By each step's fastest round."""
        steps = zip(*self.rounds, strict=False)
        return statistics.fmean(min(s.seconds for s in same) for same in steps) * 1e3

    @property
    def fastest_ms(self) -> float:
        """The one fastest step."""
        return min(step.seconds for steps in self.rounds for step in steps) * 1e3

    @property
    def token_ms(self) -> float:
        """What it takes to give every request a token."""
        return self.step_ms / self.tokens_per_step

    @property
    def median_token_ms(self) -> float:
        """By the median round."""
        rounds = [statistics.fmean(step.seconds for step in steps) for steps in self.rounds]
        return statistics.median(rounds) * 1e3 / self.tokens_per_step


# A model on some threads


class Measurement:
    """Everything about one model in one kind of weights on one number of threads."""

    def __init__(
        self, subject: Subject, model: eecore.Model, weights: str, arguments: argparse.Namespace
    ) -> None:
        self._subject = subject
        self._model = model
        self._steps = arguments.steps
        self._batches = arguments.batches
        most_drafts = max(mode.policy.max_drafts for mode in subject.modes)
        most_rows = max(arguments.batches) * (most_drafts + 1)
        self._curve = curve_rows(most_rows)
        self._kernels = Kernels(model.config, weights, self._curve[-1])
        self._runs: dict[tuple[int, str], Decoding] = {}
        self._modes = {mode.name: mode for mode in subject.modes}
        for rows in sorted({*self._curve, *arguments.batches}):
            modes = subject.modes if rows in arguments.batches else cuts(subject.num_layers)
            for mode in modes:
                self._runs[rows, mode.name] = self._decoding(mode, rows)
        small = [rows for rows in arguments.batches if rows <= MIXED_ROWS]
        self._mixed_rows = max(small, default=min(arguments.batches))
        self._mixes = self._mixed(self._mixed_rows)

    def _decoding(self, mode: Mode, rows: int) -> Decoding:
        subject, steps, longest, groups = self._subject, self._steps, LONGEST, 1
        if rows > MOST_ROWS:
            steps, longest = min(steps, CURVE_STEPS), 2
        elif subject.is_natural:
            groups = SINGLES if rows == 1 else GROUPS
        if mode.policy.max_drafts:
            steps = min(steps, subject.speculated_steps)
        prompts = subject.tokens(self._model, rows * groups, longest)
        each = [prompts[first : first + rows] for first in range(0, len(prompts), rows)]
        batches = [Batch(group, [mode.policy] * rows) for group in each]
        return Decoding(self._model, batches, steps)

    def _mixed(self, rows: int) -> dict[str, Decoding]:
        """What may come between requests that decode at full depth."""
        prompts = self._subject.tokens(self._model, rows, LONGEST)
        full = [eecore.Full()] * rows
        arriving = [3 + i % (self._model.config.vocab_size - 3) for i in range(ARRIVING)]
        confident = next(m for m in self._subject.modes if m.name.startswith("softmax, each"))
        full_depth, _, half, *_, speculative = self._subject.modes
        four = [full_depth, half, confident, speculative]
        mixes = {
            "alone": Batch(prompts, full),
            "prompt": Batch(prompts, full, arriving=arriving),
            "sampled": Batch(prompts, full, sampled=1),
            "four policies": Batch(prompts, [four[row % 4].policy for row in range(rows)]),
        }
        return {name: Decoding(self._model, [batch], self._steps) for name, batch in mixes.items()}

    def round(self) -> None:
        """All modes of a batch in turns, then the next batch; then the ops alone."""
        for run in (*self._runs.values(), *self._mixes.values()):
            run.round()
        self._kernels.round(self._curve)

    # Results

    @property
    def num_bytes(self) -> int:
        return self._kernels.num_bytes

    def costs(self) -> Costs:
        num_layers = self._subject.num_layers
        depth_of = {f"FixedExit({name})": depth for name, depth in depths(num_layers).items()}
        depth_of["Full()"] = num_layers
        lines = {
            rows: Line.through({e: self._runs[rows, name].step_ms for name, e in depth_of.items()})
            for rows in {rows for rows, _ in self._runs}
        }
        kernels = {name: Curve(times) for name, times in self._kernels.milliseconds.items()}
        return Costs(num_layers, lines, kernels)

    def modes(self) -> list[dict[str, Any]]:
        """A row of figures for each mode and batch."""
        costs = self.costs()
        return [
            self._figures(rows, self._modes[name], run, costs)
            for (rows, name), run in self._runs.items()
            if rows in self._batches
        ]

    def _figures(self, rows: int, mode: Mode, run: Decoding, costs: Costs) -> dict[str, Any]:
        full = self._runs[rows, "Full()"]
        cut, present = predicted(mode.policy, run, rows, costs)
        drafts = mode.policy.max_drafts
        return {
            "batch": rows,
            "mode": mode.name,
            "token_ms": round(run.token_ms, 4),
            "median_token_ms": round(run.median_token_ms, 4),
            "mean_depth": round(statistics.fmean(e for step in run.exits for e in step), 3),
            "acceptance": round((run.tokens_per_step - 1) / drafts, 3) if drafts else None,
            "speed_up": round(full.token_ms / run.token_ms, 3),
            "median_speed_up": round(full.median_token_ms / run.median_token_ms, 3),
            "cut_ms": None if cut is None else round(cut, 4),
            "of_cut": None if cut is None else round(cut / run.token_ms, 3),
            "present_ms": None if present is None else round(present, 4),
            "of_present": None if present is None else round(present / run.token_ms, 3),
        }

    def hosts(self) -> list[dict[str, Any]]:
        """What a step at full depth takes beside its kernels, at the smallest and largest batch."""
        kernels = self._kernels.milliseconds
        rows = []
        for batch in sorted({min(self._batches), max(self._batches)}):
            if batch not in kernels["layers"]:
                continue
            step = self._runs[batch, "Full()"].fastest_ms
            inside = kernels["layers"][batch] + kernels["head"][batch]
            rows.append(
                {
                    "batch": batch,
                    "step_ms": round(step, 4),
                    "kernels_ms": round(inside, 4),
                    "host_us": round((step - inside) * 1e3, 1),
                }
            )
        return rows

    def mixes(self) -> list[dict[str, Any]]:
        """Steps of mixed batches, and their times over that of one that only decodes."""
        alone = self._mixes["alone"]
        return [
            {
                "batch": self._mixed_rows,
                "mix": name,
                "step_ms": round(run.step_ms, 4),
                "ratio": round(run.step_ms / alone.step_ms, 3),
                "token_ratio": round(run.token_ms / alone.token_ms, 3),
            }
            for name, run in self._mixes.items()
        ]


def curve_rows(most: int) -> list[int]:
    """Powers of two up to ``most``; times beyond are taken from the line through the last two."""
    rows = [1, 2]
    while 2 * rows[-1] <= most:
        rows.append(2 * rows[-1])
    return rows


def predicted(
    policy: eecore.exits.Exit, run: Decoding, rows: int, costs: Costs
) -> tuple[float | None, float | None]:
    """A token's time by the model cut at the mean depth, and by the rows that are there."""
    if isinstance(policy, eecore.SelfSpeculative):
        taken = costs.round_of_speculation(rows, policy.exit_layer, policy.num_drafts)
        return taken / run.tokens_per_step, None
    if not isinstance(policy, eecore.ConfidentExit):
        return None, None
    extra = costs.exits(sorted(policy.points(costs.num_layers)), policy.measure)
    cut = costs.cut(run.exits, extra)
    parted = policy.batch == "each" and rows > 1
    return cut, costs.present(run.exits, extra) if parted else None


# The command


def run(subjects: list[Subject], arguments: argparse.Namespace) -> dict[str, Any]:
    """All models in all weights on all numbers of threads."""
    result: dict[str, Any] = {
        "cpu": harness.cpu_name(),
        "cpu_capability": eecore.build_info()["cpu_capability"],
        "has_amx": harness.has_amx(),
        "torch": torch.__version__,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "weights": [],
        **{part: [] for part in ("modes", "hosts", "mixes")},
    }
    for subject in subjects:
        for weights in arguments.weights:
            model = eecore.load(
                subject.directory, device="cpu", prefix_cache=False, **LOADING[weights]
            )
            for threads in arguments.threads:
                began = time.perf_counter()
                torch.set_num_threads(threads)
                measured = Measurement(subject, model, weights, arguments)
                for _ in range(arguments.rounds):
                    measured.round()
                what = {"model": subject.name, "weights": weights, "threads": threads}
                for part in ("modes", "hosts", "mixes"):
                    result[part] += [{**what, **row} for row in getattr(measured, part)()]
                seconds = time.perf_counter() - began
                print(f"{' '.join(map(str, what.values()))}: {seconds:.0f} s", file=sys.stderr)
            result["weights"].append(
                {
                    "model": subject.name,
                    "weights": weights,
                    "bytes": measured.num_bytes,
                    "from_cache": harness.are_cached(measured.num_bytes),
                }
            )
    return result


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    chosen = [name for name in SUBJECTS if name != "tiny"]
    made.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=chosen)
    made.add_argument("--weights", nargs="+", choices=list(LOADING), default=list(LOADING))
    made.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32])
    made.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    made.add_argument("--steps", type=int, default=8, help="a round")
    made.add_argument("--rounds", type=int, default=4)
    made.add_argument("--quick", action="store_true", help="2 rounds, batches 1 and 8, one thread")
    made.add_argument("--json", type=Path, default=RESULTS, help="where the figures go")
    made.add_argument("--dry-run", action="store_true", help="no tables into Markdown files")
    made.add_argument("--tables", action="store_true", help="write those of the JSON file again")
    return made


def write_tables(result: dict[str, Any]) -> None:
    """Into RESULTS.md and, the rows that matter, README.md."""
    harness.insert(ROOT / "bench" / "RESULTS.md", "depth", depth_tables.full(result))
    harness.insert(ROOT / "README.md", "depth", depth_tables.short(result))


def main() -> None:
    arguments = parser().parse_args()
    if arguments.tables:
        write_tables(json.loads(arguments.json.read_text()))
        return
    if arguments.quick:
        arguments.rounds, arguments.batches, arguments.threads = 2, [1, 8], [1]
    with tempfile.TemporaryDirectory() as scratch:
        subjects = [SUBJECTS[name](Path(scratch)) for name in arguments.models]
        result = run(subjects, arguments)
    print(depth_tables.full(result))
    if arguments.dry_run and arguments.json == RESULTS:
        return
    arguments.json.parent.mkdir(exist_ok=True)
    arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if not arguments.dry_run:
        write_tables(result)


if __name__ == "__main__":
    main()
