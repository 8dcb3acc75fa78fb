"""Looked-up drafts that are proposed before the round in flight has ended, as on a GPU.

python -m bench late [--prompts 8] [--tokens 128]

The model answers greedily at full depth. Then rounds of ``lookup`` are replayed on its answers
twice: each round is proposed from the whole text, and each round is proposed while the last one is
still in flight, from the text before it and the drafts that it verifies. The figures do not depend
on the machine. Writes bench/results/late.json and its table in bench/results/drafts.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import eecore
from bench.harness.command import parser, say
from bench.harness.prompts import KINDS, prompts_of
from bench.harness.replay import Answer
from bench.harness.results import Figures, Report
from bench.harness.rows import Row
from bench.harness.smollm2 import LONGEST_PROMPT, chat, loaded, smollm2_file
from eecore.config import SamplingParams
from eecore.exits import PromptLookup
from eecore.lab.evaluation.tables import markdown_table
from eecore.planning.draft_state import draft_state
from eecore.planning.sources import given_by_policy
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence as Request


class Counts(NamedTuple):
    """Counts of an answer's rounds."""

    rounds: int
    drafted: int
    accepted: int


def replayed(answer: Answer, num_layers: int, *, late: bool) -> Counts:
    """The rounds of an answer.

    Args:
        answer: the prompt and its greedy tokens.
        num_layers: layers of the model.
        late: whether a round is proposed before the last one has ended.
    """
    policy, tokens = PromptLookup(), answer.tokens
    sampling = SamplingParams(max_tokens=len(tokens), ignore_eos=True)
    request = Request("0", list(answer.prompt), sampling, policy, 0, frozenset())
    request.output_ids.append(tokens[0])
    draft_state(request, range(1, num_layers + 1))
    known, rounds, drafted, accepted = 1, 0, 0, 0
    in_flight: list[int] | None = None
    while known < len(tokens):
        left = len(tokens) - len(request.output_ids) - 1
        work = Work(request, 1, max(0, min(policy.num_drafts, left)))
        (proposed,) = given_by_policy([work], [in_flight])
        request.output_ids[:] = tokens[:known]
        verified = proposed[: len(tokens) - known - 1]
        right = answer.num_accepted(known, verified)
        known += right + 1
        rounds, drafted, accepted = rounds + 1, drafted + len(verified), accepted + right
        if late:
            in_flight = proposed
        else:
            request.output_ids[:] = tokens[:known]
    return Counts(rounds, drafted, accepted)


def answers_of(model: eecore.Model, prompts: Sequence[list[int]], tokens: int) -> list[Answer]:
    outputs = eecore.generate(model, list(prompts), exit="full", max_tokens=tokens)
    return [
        Answer(prompt, output.token_ids, ())
        for prompt, output in zip(prompts, outputs, strict=True)
        if len(output.token_ids) > 1
    ]


def rows_of(kind: str, answers: Sequence[Answer], num_layers: int) -> list[Row]:
    """A row for rounds that wait, and one for rounds that do not."""
    rows: list[Row] = []
    for late in (False, True):
        found = [replayed(answer, num_layers, late=late) for answer in answers]
        rounds, drafted, accepted = (sum(column) for column in zip(*found, strict=True))
        made = sum(len(answer.tokens) - 1 for answer in answers)
        rows.append(
            {
                "kind": kind,
                "late": late,
                "answers": len(answers),
                "tokens_per_round": made / rounds,
                "drafted_per_round": drafted / rounds,
                "acceptance_rate": accepted / max(drafted, 1),
            }
        )
    return rows


def markdown(result: Figures) -> str:
    rows = {(row["kind"], row["late"]): row for row in result["rows"]}
    lines = []
    for kind in dict.fromkeys(kind for kind, _ in rows):
        known, late = rows[kind, False], rows[kind, True]
        cells = [f"{kind} ({known['answers']})"]
        for row in (known, late):
            cells += [f"{row['tokens_per_round']:.2f}", f"{row['acceptance_rate']:.0%}"]
        cells.append(f"{late['tokens_per_round'] / known['tokens_per_round']:.2f}")
        lines.append(cells)
    columns = ["prompts", "text known: tokens a round", "accepted"]
    columns += ["round in flight: tokens a round", "accepted", "ratio"]
    about = (
        f"`lookup` replayed on greedy answers of {result['model']}, of at most {result['tokens']} "
        "tokens. `python -m bench late`"
    )
    return f"{markdown_table(columns, lines, text_columns=1)}\n\n{about}"


REPORTS = (Report("late", {"rounds in flight": markdown}, {"rows": ("kind", "late")}),)


def main(words: Sequence[str]) -> None:
    made = parser("late", __doc__)
    made.add_argument("--prompts", type=int, default=8, help="of each kind")
    made.add_argument("--tokens", type=int, default=128, help="tokens of an answer, at most")
    arguments = made.parse_args(words)
    rows: list[Row] = []
    with smollm2_file() as file:
        model = loaded(file, "file", exits=False)
        for kind in KINDS:
            try:
                prompts = prompts_of(kind, arguments.prompts)
            except ImportError as error:
                say(f"{kind} is left out: {error}")
                continue
            ids = [chat(model, prompt) for prompt in prompts]
            ids = [prompt for prompt in ids if len(prompt) <= LONGEST_PROMPT]
            answers = answers_of(model, ids, arguments.tokens)
            rows += rows_of(kind, answers, model.config.num_layers)
            say(rows[-2:])
        result: Figures = {"model": file.stem, "tokens": arguments.tokens, "rows": rows}
    REPORTS[0].finish(result, arguments)
