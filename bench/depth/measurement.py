"""All modes of one model in turns, with the measured and the predicted time of each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import eecore
from bench.depth.decoding import ARRIVING, Batch, Decoding
from bench.depth.kernels import Kernels
from bench.depth.models import Mode, Subject, cuts, depths
from bench.depth.predictions import Costs, Curve, Line
from bench.harness.turns import batches_of

CURVE_STEPS = 3  # steps of a large batch
MAX_ROWS = 32  # rows up to which a batch is not large
SINGLES = 6  # batches of one prompt that a model trained for early exit decodes
GROUPS = 2  # batches of several prompts that it decodes
LONGEST = 64  # tokens of a prompt
MIXED_ROWS = 8  # rows of a mixed batch at most, unless all batches are larger


class Measurement:
    """Everything about one model in one kind of weights on one number of threads."""

    def __init__(
        self,
        subject: Subject,
        model: eecore.Model,
        weights: str,
        batches: Sequence[int],
        steps: int,
    ) -> None:
        self._subject = subject
        self._model = model
        self._steps = steps
        self._batches = batches
        most_drafts = max(mode.policy.max_drafts for mode in subject.modes)
        max_rows = max(batches) * (most_drafts + 1)
        self._curve = curve_rows(max_rows)
        self._kernels = Kernels(model.config, weights, self._curve[-1])
        self._runs: dict[tuple[int, str], Decoding] = {}
        self._modes = {mode.name: mode for mode in subject.modes}
        for rows in sorted({*self._curve, *batches}):
            modes = subject.modes if rows in batches else cuts(subject.num_layers)
            for mode in modes:
                self._runs[rows, mode.name] = self._decoding(mode, rows)
        small = [rows for rows in batches if rows <= MIXED_ROWS]
        self._mixed_rows = max(small, default=min(batches))
        self._mixes = self._mixed(self._mixed_rows)

    def _decoding(self, mode: Mode, rows: int) -> Decoding:
        subject, steps, longest, groups = self._subject, self._steps, LONGEST, 1
        if rows > MAX_ROWS:
            steps, longest = min(steps, CURVE_STEPS), 2
        elif subject.is_natural:
            groups = SINGLES if rows == 1 else GROUPS
        if mode.policy.max_drafts:
            steps = min(steps, subject.speculated_steps)
        prompts = subject.tokens(self._model, rows * groups, longest)
        batches = [Batch(group, [mode.policy] * rows) for group in batches_of(prompts, rows)]
        return Decoding(self._model, batches, steps)

    def _mixed(self, rows: int) -> dict[str, Decoding]:
        """Batches of full-depth requests, alone and mixed with other kinds of requests."""
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
        """Run all modes of each batch in turns, then the ops alone."""
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
        """A full-depth step's time outside its kernels, at the smallest and the largest batch."""
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
        """Steps of mixed batches, and their times over those of a batch that only decodes."""
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
    """Powers of two up to ``most``; times beyond are extrapolated from the last two."""
    rows = [1, 2]
    while 2 * rows[-1] <= most:
        rows.append(2 * rows[-1])
    return rows


def predicted(
    policy: eecore.exits.Exit, run: Decoding, rows: int, costs: Costs
) -> tuple[float | None, float | None]:
    """A token's predicted time: by the model cut at the mean depth, and by the rows in flight."""
    if isinstance(policy, eecore.SelfSpeculative):
        taken = costs.round_of_speculation(rows, policy.exit_layer, policy.num_drafts)
        return taken / run.tokens_per_step, None
    if not isinstance(policy, eecore.ConfidentExit):
        return None, None
    extra = costs.exits(sorted(policy.points(range(1, costs.num_layers + 1))), policy.measure)
    cut = costs.cut(run.exits, extra)
    parted = policy.batch == "each" and rows > 1
    return cut, costs.present(run.exits, extra) if parted else None
