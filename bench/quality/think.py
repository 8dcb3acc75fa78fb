"""Thoughts that end early: tokens saved and answers changed, replayed on whole thoughts.

python -m bench think --trajectories [FILE] [--splits 60]

FILE has JSON lines as eecore.calibration.thoughts reads them. Without FILE it is the one that
comes with zelt (from PyPI, in an environment of its own): 1,319 questions of GSM8K with a probe
every 48 tokens, where zelt's own decider is replayed on the same questions. 600 questions, or half
of fewer, calibrate a threshold, and the rest test it. Writes bench/results/think.json and the table
in bench/results, in about five minutes on one core.

python -m bench think --model bench/models/thinker

A model that thinks longer than it needs to, on questions of bench/quality/chains.py: full thoughts,
thoughts with a budget, and thoughts that end by the calibration beside the model take turns.
"""

from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bench.harness import peers
from bench.harness.command import parser, say
from bench.harness.processes import ANSWER_TIMEOUT_S, START_TIMEOUT_S, Process
from bench.harness.results import Figures, Report
from bench.harness.rows import Columns, Row, table_of
from bench.quality import think_model
from eecore.calibration.procedure import lowest_passed, tried_thresholds
from eecore.calibration.thoughts import (
    GRID,
    LOSSES,
    ThoughtEnd,
    ThoughtLoss,
    Trajectory,
    ended,
    loss_of,
    read_trajectories,
)
from eecore.thought_stop import Probe, ThoughtStop, normalised

BOUNDS = (0.02, 0.05)
CONFIDENCE = 0.9
CALIBRATED = 600
"""Questions that calibrate a threshold."""
AGREEING = (1, 2, 3, 4)
LONGEST_RUN = 12
"""Agreeing probes at most, where agreement alone decides."""
PROBE_TOKENS = 8
"""Tokens of a probe, as zelt's file has them."""
ZELT_FILE = "zelt/data/gsm8k_real_deepseek_r1.jsonl"
ZELT_NOTE = (
    "The confidences of this file are not a model's: they tell whether an answer is right "
    "(`findings/zelt_confidences_know_the_answer.sh`), so rules and decider look better than they "
    "are; agreement alone does not read them. "
)
Split = tuple[list[int], list[int]]
"""Numbers of the questions that calibrate, and of those that test."""


def zelt_file() -> Path:
    """The trajectories that come with zelt."""
    made = peers.prepare(["zelt"])["zelt"]
    if not made.available:
        raise SystemExit(f"think: expected {made.wanted}, got none: {made.reason}")
    (path,) = (peers.DIRECTORY / "zelt").glob(f"lib/python*/site-packages/{ZELT_FILE}")
    return path


def zelt_trajectory(line: str) -> Trajectory:
    row = json.loads(line)
    return Trajectory(
        id=str(row["idx"]),
        full_tokens=row["full_tokens"],
        full_answer=normalised(row["full_ans"]),
        probes=tuple(Probe(p["t"], normalised(p["ans"] or ""), p["gm"]) for p in row["probes"]),
        is_right=row["full_correct"],
    )


Ends = list[ThoughtEnd]
"""The ends of all thoughts under one rule."""


@dataclass(frozen=True)
class Family:
    """Rules of which Learn then Test chooses one.

    Attributes:
        levels: from the most careful on.
        ends: of all thoughts, by level; at infinity no thought ends early.
    """

    name: str
    levels: Sequence[float]
    ends: dict[float, Ends]

    @staticmethod
    def of(
        name: str,
        thoughts: Sequence[Trajectory],
        levels: Sequence[float],
        stop_at: Callable[[float], ThoughtStop],
    ) -> Family:
        stops = {level: stop_at(level) for level in levels} | {math.inf: ThoughtStop(math.inf)}
        ends = {level: [ended(each, stop) for each in thoughts] for level, stop in stops.items()}
        return Family(name, levels, ends)


def families(thoughts: Sequence[Trajectory]) -> Iterator[Family]:
    for agreeing in AGREEING:
        name, stop = f"at least {agreeing} agreeing", ThoughtStop(1.0, agreeing=agreeing)
        at = partial(replace, stop)
        yield Family.of(name, thoughts, GRID, lambda t, at=at: at(threshold=t))
    runs = range(LONGEST_RUN, 0, -1)
    yield Family.of(
        "agreement alone", thoughts, runs, lambda run: ThoughtStop(0.0, agreeing=int(run))
    )


class Replay:
    """Thoughts, and the splits of their questions."""

    def __init__(self, thoughts: Sequence[Trajectory], num_splits: int) -> None:
        self.thoughts = thoughts
        numbers, calibrated = list(range(len(thoughts))), min(CALIBRATED, len(thoughts) // 2)
        self.splits: list[Split] = []
        for seed in range(num_splits):
            random.Random(seed).shuffle(numbers)
            self.splits.append((numbers[:calibrated], numbers[calibrated:]))

    def calibrated_row(self, family: Family, loss: ThoughtLoss, bound: float) -> Row:
        """A family's rules, each chosen on one part of a split and tested on the other."""
        losses = {
            level: [loss_of(*each, loss) for each in zip(self.thoughts, ends, strict=True)]
            for level, ends in family.ends.items()
        }
        levels = []
        for calibrate, _ in self.splits:
            steps = tried_thresholds(
                lambda level, own=calibrate: [losses[level][i] for i in own],
                family.levels,
                bound,
                1.0 - CONFIDENCE,
            )
            levels.append(lowest_passed(steps, otherwise=math.inf))
        row = self.row(family.name, loss, bound, [family.ends[level] for level in levels])
        middle = statistics.median(levels)
        return row | {"level": middle if middle < math.inf else None}

    def row(self, rule: str, loss: ThoughtLoss, bound: float | None, ends: Sequence[Ends]) -> Row:
        """What a rule saves and loses in the tests.

        Args:
            ends: of all thoughts, for each split.
        """
        saved, with_probes, lost = [], [], []
        for (_, test), its in zip(self.splits, ends, strict=True):
            full = sum(self.thoughts[i].full_tokens for i in test)
            kept = sum(its[i].num_tokens for i in test)
            probed = PROBE_TOKENS * sum(its[i].num_probes for i in test)
            saved.append(1.0 - kept / full)
            with_probes.append(1.0 - (kept + probed) / full)
            lost.append(statistics.fmean(loss_of(self.thoughts[i], its[i], loss) for i in test))
        row: Row = {"rule": rule, "loss": loss, "bound": bound}
        row |= {"saved": statistics.fmean(saved), "with_probes": statistics.fmean(with_probes)}
        row["lost"] = statistics.fmean(lost)
        row["held"] = None if bound is None else statistics.fmean(each <= bound for each in lost)
        say(row)
        return row


def settled(thought: Trajectory) -> ThoughtEnd:
    """The end of a thought at the probe from which on all have the whole thought's answer."""
    count = len(thought.probes)
    while count and thought.probes[count - 1].answer == thought.full_answer:
        count -= 1
    if count == len(thought.probes):
        return ThoughtEnd(thought.full_tokens, thought.full_answer, count, None)
    return ThoughtEnd(thought.probes[count].num_tokens, thought.full_answer, count + 1, "confident")


def zelt_rows(replay: Replay, file: Path) -> list[Row]:
    """Rows of zelt's learned decider, whose own loss is a right answer lost."""
    command = [peers.python_of("zelt"), "-m", "bench.quality.zelt_decider", file]
    found: dict[float, list[Ends]] = {bound: [] for bound in BOUNDS}
    with closing(Process(command, 1)) as process:
        process.answer(START_TIMEOUT_S)
        for calibrate, test in replay.splits:
            asked = {"calibrate": calibrate, "test": test, "bounds": BOUNDS}
            process.send({**asked, "delta": 1.0 - CONFIDENCE})
            by_bound = process.answer(ANSWER_TIMEOUT_S)["ends"]
            for bound, tokens in zip(BOUNDS, by_bound, strict=True):
                ends = [ended(thought, ThoughtStop(math.inf)) for thought in replay.thoughts]
                for i, at in zip(test, tokens, strict=True):
                    if at is not None:
                        ends[i] = end_at(replay.thoughts[i], at)
                found[bound].append(ends)
    return [replay.row("zelt's decider", "lost", bound, ends) for bound, ends in found.items()]


def end_at(thought: Trajectory, num_tokens: int) -> ThoughtEnd:
    """The end of a thought at the probe after so many tokens."""
    count = [probe.num_tokens for probe in thought.probes].index(num_tokens)
    return ThoughtEnd(num_tokens, thought.probes[count].answer, count + 1, "confident")


def markdown(result: Figures) -> str:
    columns: Columns = [
        ("rule", "{rule}"),
        ("loss", "{loss}"),
        ("at most", "{bound:.0%}"),
        ("tokens saved", "{saved:.1%}"),
        ("less the probes' own", "{with_probes:.1%}"),
        ("loss in the test", "{lost:.2%}"),
        ("tests within the bound", "{held:.0%}"),
        ("threshold", "{level:g}"),
    ]
    about = (
        f"Thoughts of {result['source']}: {result['num_thoughts']:,} questions, "
        f"{result['full_tokens']:.0f} tokens each. Means of {result['splits']} random splits: "
        f"{result['calibrated']} questions calibrate, the others test, with a confidence of "
        f"{CONFIDENCE:.0%}. different: the early answer is not that of the whole thought; lost: "
        "and the whole thought's answer is right. A probe is counted as "
        f"{PROBE_TOKENS} tokens. The thresholds are medians: the least confidence of one "
        "probe, of which agreeing ones need less, or their number where agreement alone decides. "
        "The oracle ends a thought at the "
        f"probe from which on all answers are the last one. {result['note']}"
        "`python -m bench think --trajectories`"
    )
    return f"{table_of(columns, result['rows'], text_columns=2)}\n\n{about}"


REPORTS = (
    Report("think", {"think": markdown}, {"rows": ("rule", "loss", "bound")}),
    think_model.REPORT,
)


def main(words: Sequence[str]) -> None:
    made = parser("think", __doc__, batches=(1, 8), rounds=3, threads=1)
    made.add_argument(
        "--trajectories", nargs="?", type=Path, const=None, metavar="FILE", help="zelt's by default"
    )
    made.add_argument("--splits", type=int, default=60, help="random splits of the questions")
    made.add_argument("--model", type=Path, metavar="DIR", help="measure a model's own thoughts")
    made.add_argument("--count", type=int, default=64, help="questions for a model")
    arguments = made.parse_args(words)
    if arguments.model is not None:
        figures = think_model.measure(arguments.model, arguments)
        think_model.REPORT.finish(figures, arguments)
        return
    file = arguments.trajectories
    zelt = zelt_file() if file is None else None
    if zelt is None:
        thoughts = read_trajectories(file)
    else:
        thoughts = list(map(zelt_trajectory, zelt.read_text().splitlines()))
    replay = Replay(thoughts, arguments.splits)
    knows = all(thought.is_right is not None for thought in thoughts)
    losses = LOSSES if knows else LOSSES[:1]
    rows = [
        replay.calibrated_row(family, loss, bound)
        for family in families(thoughts)
        for loss in losses
        for bound in BOUNDS
    ]
    if zelt is not None:
        rows += zelt_rows(replay, zelt)
    oracle = [settled(thought) for thought in thoughts]
    rows.append(replay.row("oracle", "different", None, [oracle] * arguments.splits))
    result: Figures = {
        "source": file.name if zelt is None else f"{peers.ZELT} (`{Path(ZELT_FILE).name}`)",
        "note": ZELT_NOTE if zelt else "",
        "num_thoughts": len(thoughts),
        "full_tokens": statistics.fmean(thought.full_tokens for thought in thoughts),
        "calibrated": len(replay.splits[0][0]),
        "splits": arguments.splits,
        "rows": rows,
    }
    REPORTS[0].finish(result, arguments)
