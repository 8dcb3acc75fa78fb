"""All modes of one model in turns, with the measured and the predicted time of each."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import eecore
from bench.depth.models import Mode, Subject, cuts, depths
from bench.depth.predictions import Costs, Curve, Line
from bench.harness.decoding import PAGE_SIZE, Decoding
from bench.harness.turns import batches_of
from eecore import ops

CURVE_STEPS = 3  # steps of a large batch
MAX_ROWS = 32  # rows up to which a batch is not large
SINGLES = 6  # batches of one prompt that a model trained for early exit decodes
GROUPS = 2  # batches of several prompts that it decodes
LONGEST = 64  # tokens of a prompt
PASSES = 6  # of each op in a round
WEIGHT_BYTES = {"float32": 4.0, "bfloat16": 2.0, "int8": 34 / 32}


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
        self._subject, self._model = subject, model
        self._steps, self._batches = steps, batches
        most_drafts = max(mode.policy.max_drafts for mode in subject.modes)
        self._curve = curve_rows(max(batches) * (most_drafts + 1))
        self._kernels = Kernels(model.config, weights, self._curve[-1])
        self.num_bytes = self._kernels.num_bytes
        self._runs: dict[tuple[int, str], Decoding] = {}
        self._modes = {mode.name: mode for mode in subject.modes}
        for rows in sorted({*self._curve, *batches}):
            for mode in subject.modes if rows in batches else cuts(subject.num_layers):
                self._runs[rows, mode.name] = self._decoding(mode, rows)

    def _decoding(self, mode: Mode, rows: int) -> Decoding:
        subject, steps, longest, groups = self._subject, self._steps, LONGEST, 1
        if rows > MAX_ROWS:
            steps, longest = min(steps, CURVE_STEPS), 2
        elif subject.is_natural:
            groups = SINGLES if rows == 1 else GROUPS
        if mode.policy.max_drafts:
            steps = min(steps, subject.speculated_steps)
        prompts = subject.tokens(self._model, rows * groups, longest)
        return Decoding(self._model, batches_of(prompts, rows), mode.policy, steps)

    def round(self) -> None:
        """Run all modes of each batch in turns, then the ops alone."""
        for run in self._runs.values():
            run.round()
        self._kernels.round(self._curve)

    def modes(self) -> list[dict[str, Any]]:
        """A row of figures for each mode and batch."""
        num_layers = self._subject.num_layers
        depth_of = {f"FixedExit({name})": depth for name, depth in depths(num_layers).items()}
        depth_of["Full()"] = num_layers
        lines = {
            rows: Line.through({e: self._runs[rows, name].step_ms for name, e in depth_of.items()})
            for rows in {rows for rows, _ in self._runs}
        }
        kernels = {name: Curve(times) for name, times in self._kernels.milliseconds.items()}
        costs = Costs(num_layers, lines, kernels)
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
            "mean_depth": round(statistics.fmean(e for step in run.exits for e in step), 3),
            "acceptance": round((run.tokens_per_step - 1) / drafts, 3) if drafts else None,
            "speed_up": round(full.token_ms / run.token_ms, 3),
            "of_cut": None if cut is None else round(cut / run.token_ms, 3),
            "of_present": None if present is None else round(present / run.token_ms, 3),
        }


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


class Kernels:
    """The ops of a step outside its layers, with random weights of a model's sizes.

    They run in turns; before each, as many bytes as the layers have are read, so that it finds the
    caches as it would in a step.

    Args:
        config: the model's config.
        weights: "float32", "bfloat16", or "int8", with states in float32.
        max_rows: the largest number of rows to time.
    """

    def __init__(self, config: Any, weights: str, max_rows: int) -> None:
        self._config, self._is_int8 = config, weights == "int8"
        self._dtype = torch.bfloat16 if weights == "bfloat16" else torch.float32
        layers, hidden = config.num_layers, config.hidden_size
        is_t5 = isinstance(config, eecore.T5Config)
        columns = 2 * config.q_size * (1 + is_t5) + 2 * config.kv_size
        columns += config.intermediate_size * (2 + getattr(config, "is_gated", True))
        per_weight = WEIGHT_BYTES[weights]
        of_layers = layers * hidden * columns * per_weight
        self.num_bytes = round(of_layers + config.vocab_size * hidden * per_weight)
        """Bytes of the matrices that a step at full depth reads."""
        self._others = torch.ones(max(1, round(of_layers / 4)))
        self._norm = torch.ones(layers, hidden, dtype=self._dtype)
        self._head = self._linear(config.vocab_size, hidden)
        self._kv = self._linear(layers, 2 * config.kv_size, hidden)
        self._classifier = torch.randn(2, hidden)
        self._states = torch.randn(max_rows, hidden).to(self._dtype)
        self._rotary: dict[str, Any] = {"positions": None, "cos_sin": None}
        if not is_t5:
            angles = torch.ones(PAGE_SIZE, config.ropes[0].rotary_dim)
            self._rotary = {"positions": torch.full((max_rows,), PAGE_SIZE - 1), "cos_sin": angles}
        cache = (layers, max_rows, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        self._k, self._v = (torch.zeros(cache, dtype=self._dtype) for _ in range(2))
        self.milliseconds: dict[str, dict[int, float]] = {}
        """The minimum time of each op, by rows; filling is timed for one layer."""

    def _linear(self, *shape: int) -> ops.Matrix:
        weight = torch.randn(shape).mul_(shape[-1] ** -0.5)
        if not self._is_int8:
            return ops.Matrix(weight.to(self._dtype))
        packed = ops.pack_weight(ops.quantise_weight(weight.flatten(0, -2), "Q8_0"), "Q8_0")
        assert packed.table is not None
        return packed._replace(table=packed.table.view(shape[:-1]))

    @torch.inference_mode()
    def round(self, rows: list[int]) -> None:
        """Run all ops a few times in turns, for each number of rows."""
        for count in rows:
            calls = self._calls(count)
            for _ in range(PASSES):
                for name, call in calls.items():
                    self._others.sum()
                    began = time.perf_counter()
                    call()
                    milliseconds = 1e3 * (time.perf_counter() - began)
                    milliseconds /= self._config.num_layers if name == "fill" else 1
                    known = self.milliseconds.setdefault(name, {})
                    known[count] = min(known.get(count, milliseconds), milliseconds)

    def _calls(self, rows: int) -> dict[str, Callable[[], Any]]:
        states, eps, head = self._states[:rows], self._config.rms_norm_eps, self._head
        first, slots = torch.zeros(rows, dtype=torch.int32), torch.arange(rows) * PAGE_SIZE
        places = self._rotary
        if places["positions"] is not None:
            places = {**places, "positions": places["positions"][:rows]}
        filled = (states, first, self._norm, self._kv, self._k, self._v, slots)
        return {
            "head": lambda: ops.exit_confidence_softmax(
                states, self._norm[0], head.weight, eps, lm_head_table=head.table
            ),
            "state": lambda: ops.exit_confidence_cosine(states, states),
            "classifier": lambda: ops.exit_confidence_mlp(states, self._classifier),
            "fill": lambda: ops.kv_fill(*filled, eps=eps, **places),
        }
