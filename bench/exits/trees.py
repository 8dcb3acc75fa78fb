"""Trees of drafts compared with chains, counted on a model's own answers.

python -m bench trees [--prompts 6] [--tokens 64]

SmolLM2-135M-Instruct's draft head drafts after every token of its greedy answers. A chain is the
head's first choice, and its first choice after that; a tree also has second and third choices, the
likeliest paths first. Both grow until a path is less likely than a threshold. The benchmark counts
the rows to verify and the accepted drafts; the cost of a round follows from assumed costs of a row
and of a step of the head relative to a pass of full depth. No time is measured. Writes
bench/results/trees.json and its table in bench/results.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import eecore
from bench.harness.command import parser, say
from bench.harness.prompts import KINDS, prompts_of
from bench.harness.results import Figures, Report
from bench.harness.smollm2 import LONGEST_PROMPT, chat, loaded, smollm2_file
from eecore.exits import Full
from eecore.lab.evaluation.tables import markdown_table
from eecore.lab.training.draft_head import DraftHead, HeadSizes
from eecore.lab.training.head_keys import TextKeys, keys_at
from eecore.models import KVCache, LlamaModel
from eecore.models.readers.head_file import HeadFile

MAX_ROWS = 8  # that a round verifies
CHOICES = 3  # of the head after each token of a tree
THRESHOLDS = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8)
ROW_COSTS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)
"""Costs of a verified row, in passes of full depth."""
STEP_COST = 0.06
"""Cost of a step of the head, in passes of full depth."""


class Path(NamedTuple):
    """A draft and the drafts before it."""

    tokens: tuple[int, ...]
    likely: float
    """The head's probability that the whole path is accepted."""


@dataclass
class Count:
    """Counts over the rounds of one shape and threshold."""

    rounds: int = 0
    rows: int = 0
    steps: int = 0
    accepted: int = 0

    def add(self, paths: Sequence[Path], truth: Sequence[int]) -> None:
        """Count one round: its paths, compared with the tokens that follow in the answer."""
        self.rounds += 1
        self.rows += len(paths)
        self.steps += 1 + max((len(path.tokens) for path in paths), default=0)
        self.accepted += max(
            (len(p.tokens) for p in paths if p.tokens == tuple(truth[: len(p.tokens)])), default=0
        )

    def speed(self, row_cost: float) -> float:
        """Tokens per pass of full depth."""
        passes = self.rounds + row_cost * self.rows + STEP_COST * self.steps
        return (self.rounds + self.accepted) / passes


@dataclass
class Grown:
    """The paths that a round may draft after one token, the likeliest first."""

    state: dict[tuple[int, ...], Tensor]
    paths: list[Path] = field(default_factory=list)
    open: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)

    def take(self) -> Path | None:
        """Take the likeliest open path; None if there is none or ``paths`` is full."""
        if not self.open or len(self.paths) == MAX_ROWS:
            return None
        likely, tokens = heapq.heappop(self.open)
        self.paths.append(Path(tokens, -likely))
        return self.paths[-1]


class Head:
    """A model's draft head in floats, which gives more than its first choice."""

    def __init__(self, model: eecore.Model) -> None:
        network = model.network
        assert isinstance(network, LlamaModel)
        found = network.draft_head
        if found is None:
            raise SystemExit("expected a model with a draft head, got none")
        settings = found.settings
        file = HeadFile(found.path, settings)
        sizes = HeadSizes(
            hidden_size=settings.hidden_size,
            num_taps=len(settings.taps),
            intermediate_size=settings.intermediate_size,
            num_blocks=settings.num_blocks,
            num_attended=len(settings.attended),
            queries=settings.queries,
        )
        eps = network.config.rms_norm_eps
        self.network, self.taps, self._attended = network, settings.taps, settings.attended
        self._head = DraftHead(sizes, eps, network.weights.final_norm)
        with torch.no_grad():
            tensors = file.floats
            for name, stored in self._head.tensor_names.items():
                getattr(self._head, name).copy_(tensors[stored])
        self._vocabulary = file.vocabulary
        self._rows = network.weights.lm_head.weight[file.vocabulary].float()

    def begin(self, text: Sequence[int], first: int) -> tuple[Tensor, TextKeys | None]:
        """States [n, hidden_size] at each position of a text from ``first`` on, and its keys."""
        network = self.network
        kv = KVCache.allocate(
            network.config, 1, len(text), device=network.device, dtype=network.dtype
        )
        batch, hidden, begun = network.whole_text(len(text)), network.embed(torch.tensor(text)), 0
        tapped = []
        for tap in self.taps:
            hidden = network.layers(begun, tap, hidden, kv, batch)
            begun = tap
            tapped.append(hidden[first:].float())
        states = self._head.begin(torch.stack(tapped, 1))
        if not self._attended:
            return states, None
        keys = keys_at(kv, self._attended, batch.slot_mapping).bfloat16()
        positions = batch.positions[first:]
        cos_sin = network.cos_sin(len(text) + MAX_ROWS, self._attended[0][0])
        begins = torch.zeros_like(positions)
        return states, TextKeys.of([keys], begins, positions, cos_sin)

    def step(
        self, states: Tensor, tokens: Sequence[int], seen: TextKeys | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The states after tokens, and the likeliest next ones: probabilities and ids."""
        states = self._head.step(states, self.network.embed(torch.tensor(tokens)), seen)
        logits = functional.linear(self._head.output(states), self._rows)
        best = logits.softmax(-1).topk(CHOICES)
        return states, best.values, self._vocabulary[best.indices]


def grown(
    head: Head, begun: tuple[Tensor, TextKeys | None], after: Sequence[int], choices: int
) -> list[Grown]:
    """The drafts after each token of ``after``; ``begun``: the result of :meth:`Head.begin`."""
    states, every = begun
    all_grown = [Grown({(): state}) for state in states]
    latest = [(i, Path((), 1.0)) for i in range(len(all_grown))]
    while latest:
        seen = every
        if every is not None:
            part = every.rows(torch.tensor([i for i, _ in latest]))
            deeper = torch.tensor([len(path.tokens) for _, path in latest])
            seen = replace(part, positions=part.positions + deeper)
        states, likely, ids = head.step(
            torch.stack([all_grown[i].state[path.tokens[:-1]] for i, path in latest]),
            [path.tokens[-1] if path.tokens else after[i] for i, path in latest],
            seen,
        )
        for row, (i, path) in enumerate(latest):
            g = all_grown[i]
            g.state[path.tokens] = states[row]
            for p, token in zip(likely[row, :choices], ids[row, :choices], strict=True):
                heapq.heappush(g.open, (-path.likely * float(p), (*path.tokens, int(token))))
        taken = [(i, g.take()) for i, g in enumerate(all_grown)]
        latest = [(i, path) for i, path in taken if path is not None]
    return all_grown


@torch.inference_mode()
def count(model: eecore.Model, head: Head, kind: str, prompts: int, most: int) -> dict[Any, Count]:
    """Counts by shape and threshold."""
    counts = {(s, t): Count() for s in ("chain", "tree") for t in THRESHOLDS}
    for text in prompts_of(kind, prompts):
        prompt = chat(model, text)
        if len(prompt) > LONGEST_PROMPT:
            continue
        (output,) = eecore.generate(model, [prompt], exit=Full(), max_tokens=most)
        answer = output.token_ids
        begun = head.begin([*prompt, *answer[:-2]], len(prompt) - 1)
        for shape, choices in (("chain", 1), ("tree", CHOICES)):
            for i, each in enumerate(grown(head, begun, answer[:-1], choices)):
                truth = answer[i + 1 :]
                for threshold in THRESHOLDS:
                    paths = [path for path in each.paths if path.likely >= threshold]
                    counts[shape, threshold].add(paths, truth)
    return counts


def row_of(kind: str, row_cost: float, counts: dict[Any, Count]) -> dict[str, Any]:
    """Figures of chains and trees, each at its best threshold."""
    row: dict[str, Any] = {"kind": kind, "row_cost": row_cost}
    for shape in ("chain", "tree"):
        best = max(
            (c for (s, _), c in counts.items() if s == shape), key=lambda c: c.speed(row_cost)
        )
        row[shape] = {
            "speed": best.speed(row_cost),
            "rows": best.rows / best.rounds,
            "stood": best.accepted / best.rounds,
        }
    return row


def markdown(result: Figures) -> str:
    head = ["prompts", "a row costs", "chain: rows", "accepted", "speed-up"]
    head += ["tree: rows", "accepted", "speed-up", "tree / chain"]
    lines = [
        [
            row["kind"],
            f"{row['row_cost']:.2f}",
            *(
                cell
                for shape in ("chain", "tree")
                for cell in (
                    f"{row[shape]['rows']:.2f}",
                    f"{row[shape]['stood']:.2f}",
                    f"{row[shape]['speed']:.2f}x",
                )
            ),
            f"{row['tree']['speed'] / row['chain']['speed']:.2f}",
        ]
        for row in result["rows"]
    ]
    about = (
        f"SmolLM2-135M-Instruct and its draft head, {result['prompts']} prompts of each kind, "
        f"greedy answers of at most {result['tokens']} tokens, drafts of the head alone after "
        f"each of their tokens: at most {MAX_ROWS} rows, {CHOICES} choices after each. Costs in "
        f"passes of full depth, {STEP_COST} for a step of the head; each shape at its best "
        "threshold. "
        "Counted, not timed. `python -m bench trees`"
    )
    return f"{markdown_table(head, lines)}\n\n{about}"


REPORTS = (Report("trees", {"trees": markdown}, {"rows": ("kind", "row_cost")}),)


def main(words: Sequence[str]) -> None:
    made = parser("trees", __doc__, threads=2)
    made.add_argument("--prompts", type=int, default=6, help="of each kind")
    made.add_argument("--tokens", type=int, default=64, help="tokens of an answer, at most")
    arguments = made.parse_args(words)
    torch.set_num_threads(arguments.threads)
    rows = []
    with smollm2_file() as file:
        model = loaded(file, "float32")
    head = Head(model)
    for kind in KINDS:
        counts = count(model, head, kind, arguments.prompts, arguments.tokens)
        rows += [row_of(kind, row_cost, counts) for row_cost in ROW_COSTS]
        say(rows[-1])
    result = {"prompts": arguments.prompts, "tokens": arguments.tokens, "rows": rows}
    REPORTS[0].finish(result, arguments)
