"""An iteration: the prompts' pass, then a program for each family of decoding rows.

Rows of one family share a program, whatever their policies: an exit step, or a round for each way
to draft. The family of a row does not depend on the other rows.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from eecore.decoding.capture import Capture, RunProgram
from eecore.decoding.draft_kind import DraftKind, draft_kind
from eecore.decoding.draft_step import DraftStep
from eecore.decoding.exit_step import ExitKind, ExitStep, exit_kind
from eecore.decoding.memory import HostSide
from eecore.decoding.prefill import Prefill, encode
from eecore.decoding.sampling import follows_text, needs_logits
from eecore.models import KeyedHead, KVCache, Network
from eecore.planning.draft_state import draft_state
from eecore.planning.planner import Planner
from eecore.planning.proposal import NOTHING
from eecore.planning.route import GIVEN, DraftPath
from eecore.planning.row import Outcome, Row
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence, SequenceStatus

# Programs that are kept; the least recently used one is dropped first, but never the last one.
MAX_PROGRAMS = 256
# Bytes that the kept programs hold together.
MAX_PROGRAM_BYTES = 1 << 29


@dataclass(eq=False)
class Flight:
    """A launched run of a program, which the device may not have finished."""

    program: ExitStep | DraftStep
    rows: list[Row]
    arrived: HostSide
    is_first: bool = False
    """Whether the program had never run before."""

    @property
    def works(self) -> list[Work]:
        return [row.work for row in self.rows]

    @property
    def is_over(self) -> bool:
        """Whether no running sequence needs the outcome any more."""
        return not any(row.sequence.status is SequenceStatus.RUNNING for row in self.rows)

    @cached_property
    def places(self) -> dict[Sequence, int]:
        """The program's row of each sequence in flight."""
        return {row.work.sequence: i for i, row in enumerate(self.rows)}

    def land(self) -> list[Outcome]:
        """The outcomes of the sequences that are still running."""
        running = []
        for i, row in enumerate(self.rows):
            if row.work.sequence.status is SequenceStatus.RUNNING:
                running.append((i, row))
        return self.program.outcomes(running, self.arrived)


class Iterations:
    """The iterations of one model over one cache.

    Args:
        ahead: whether a program's next run is launched before the outcome of this one is known;
            None: if ``run`` returns early.
        history_tokens: tokens of past outputs that are kept to draft from.
    """

    def __init__(
        self,
        model: Network,
        kv: KVCache,
        run: RunProgram,
        *,
        ahead: bool | None = None,
        history_tokens: int = 0,
    ) -> None:
        self.model, self.kv = model, kv
        self._keyed: KeyedHead | None = None
        if isinstance(model.draft_head, KeyedHead):
            self._keyed = model.draft_head
            assert kv.of_head is not None
            self._keyed.prepare(kv.of_head)
        model.prepare(kv)
        self.ahead = run.returns_early if ahead is None else ahead
        self.run = run
        self.planner = Planner(model, torch.get_num_threads(), history_tokens)
        self._last: ExitStep | None = None
        # The last program of rounds, by whether a draft head drafts after its rounds.
        self._drafted: dict[bool, DraftStep] = {}
        # The end of the last iteration, and the sequences that decoded in it.
        self._ended: tuple[float, list[Sequence]] | None = None
        self._programs: OrderedDict[ExitKind | DraftKind, ExitStep | DraftStep] = OrderedDict()
        self._program_bytes: dict[ExitKind | DraftKind, int] = {}

    @property
    def captures(self) -> list[Capture]:
        """The captures of the kept programs, with their times and memory."""
        return self.run.captures

    def iterate(self, works: list[Work], *, others_wait: bool = False) -> list[Outcome]:
        """Run all works, and return one outcome for each, in order; no sequence is updated yet.

        Args:
            others_wait: whether waiting requests need these to end.
        """
        self.planner.num_threads = torch.get_num_threads()
        last, self._ended = self._ended, None
        prompts = [work for work in works if work.is_prefill]
        decoding = [work for work in works if not work.is_prefill] if prompts else works
        sequences = [work.sequence for work in decoding]
        since = None if last is None or prompts or last[1] != sequences else last[0]
        outcomes: dict[Sequence, Outcome] = {}
        if prompts:
            for outcome in self._prefill(prompts):
                outcomes[outcome.sequence] = outcome
        families = self._families(self.planner.plan(decoding, others_wait=others_wait))
        if len(families) == 1 and not prompts:
            found = self._run_family(families[0], since)
            self._ended = time.perf_counter(), sequences
            return found
        for family in families:
            for outcome in self._run_family(family, None):
                outcomes[outcome.sequence] = outcome
        return [outcomes[work.sequence] for work in works]

    @torch.inference_mode()
    def _prefill(self, prompts: list[Work]) -> list[Outcome]:
        """Run a chunk of each prompt, after the encoder has read its input."""
        unread = [work.sequence for work in prompts if work.sequence.tokens_to_encode]
        if unread:
            encode(self.model, self.kv, unread)
        return Prefill(self.model, self.kv, prompts).run()

    def _run_family(self, family: list[Row], since: float | None) -> list[Outcome]:
        """Run the program that these rows share, and learn from it.

        Args:
            family: the rows.
            since: the end of the last iteration of the same requests; None where other work was
                done in between.
        """
        outcomes, is_first = None, False
        last, self._last = self._last, None  # after a failed run there is nothing to continue from
        if last is not None and family[0].route.path is None and last.goes_on(family):
            self.run(last)
            outcomes = last.outcomes(list(enumerate(last.rows)), last.fetch())
        self._last = last
        if outcomes is None:
            flight = self._launch(family, None)
            assert flight is not None
            outcomes, is_first = flight.land(), flight.is_first
        seconds = None if since is None or is_first else time.perf_counter() - since
        self.planner.learn(family, outcomes, seconds)
        if family[0].ahead or family[0].route.path is not None:
            self._keep_ahead(outcomes)
        return outcomes

    def _keep_ahead(self, outcomes: list[Outcome]) -> None:
        """Keep the drafts of a head for the next round."""
        for outcome in outcomes:
            outcome.sequence.draft.ahead = outcome.ahead

    def launch(self, works: list[Work], after: Flight | None = None) -> Flight | None:
        """Start an iteration that is a single run, and return before its outcome is known.

        Args:
            works: sequences, each with pages for whatever the iteration computes.
            after: the run in flight, if any. Its sequences continue after their tokens there, in
                the same program.

        Returns:
            The run in flight; None, without any effect, where the iteration is not a single run, or
            where a row depends on more of the run in flight than its tokens.
        """
        if not self.ahead:
            return None
        if after is not None and after.program.follow(works):
            step = after.program
            self.run(step)
            if isinstance(step, ExitStep):
                self._last = step
            return Flight(step, step.rows, step.fetch())
        if any(map(self._must_land, works)):
            return None
        families = self._families(self.planner.plan(works))
        if len(families) != 1:
            return None
        self._ended = None  # else the next iteration would be timed from before this one
        return self._launch(families[0], after)

    def land(self, flight: Flight) -> list[Outcome]:
        """The outcomes of a run in flight; a head's drafts are kept for the next round."""
        outcomes = flight.land()
        self._keep_ahead(outcomes)
        return outcomes

    def _must_land(self, work: Work) -> bool:
        """Whether the next run of a row needs the outcome of the last one on the host."""
        sequence = work.sequence
        draft, sampling = draft_state(sequence, self.model.config.exit_layers), sequence.sampling
        route = draft.route
        if work.is_prefill or follows_text(sampling) or route.adaptive or route.auto is not None:
            return True
        if route.path == GIVEN and (not route.ahead or draft.guided is not None):
            return True  # the host finds these drafts; only a draft head's are on the device
        # The host looks up the logits of tokens that are not the most probable ones.
        looks = needs_logits(sampling) and sampling.logprobs is not None
        return looks and route.path is not None and not route.path.is_given

    def _launch(self, rows: list[Row], after: Flight | None) -> Flight | None:
        """Start a run of the program that rows share; None where ``after`` runs another program."""
        if after is not None:
            rows = [_following(row, after) for row in rows]
        step: ExitStep | DraftStep | None = self._same_again(rows)
        if step is None:
            make_kind: Any = exit_kind if rows[0].route.path is None else draft_kind
            head = self._keyed if rows[0].route.path is None else self.model.draft_head
            kind = make_kind(rows, page_size=self.kv.page_size, ahead=self.ahead, head=head)
            if after is not None and after.program.kind != kind:
                return None
            step = self._program(kind)
        self._last = None if self._last is step else self._last
        step.load(rows)
        self.run(step)
        if isinstance(step, ExitStep):
            self._last = step
        else:
            self._drafted[step.kind.drafts_ahead] = step
        is_first = not step.has_run
        if is_first:
            step.has_run = True
            self._program_bytes[step.kind] = step.num_bytes + self.run.num_bytes(step)
            self._forget_programs()
        return Flight(step, rows, step.fetch(), is_first)

    def _same_again(self, rows: list[Row]) -> DraftStep | None:
        """The program of the last round of drafts, if it was of the same rows and fits them: this
        is quicker than to compare kinds of programs, which are large.
        """
        if self.ahead or rows[0].route.path is None:
            return None
        step = self._drafted.get(max([row.ahead for row in rows]) > 0)
        return step if step is not None and step.fits(rows) else None

    def _families(self, rows: list[Row]) -> list[list[Row]]:
        """Rows grouped by program: by how they draft and, with a draft head that has keys of its
        own, by whether they give the head keys, which rows that may exit early do not.
        """
        families: dict[tuple[DraftPath | None, bool], list[Row]] = {}
        for row in rows:
            keeps = self._keyed is None or row.route.fills_head
            families.setdefault((row.route.path, keeps), []).append(row)
        return [rows] if len(families) == 1 else list(families.values())

    def _program(self, kind: ExitKind | DraftKind) -> ExitStep | DraftStep:
        """The program of a kind, which is made when it is first needed."""
        program = self._programs.get(kind)
        if program is None:
            make: Any = ExitStep if isinstance(kind, ExitKind) else DraftStep
            with torch.inference_mode():
                program = self._programs[kind] = make(self.model, self.kv, kind)
            self._forget_programs()
        self._programs.move_to_end(kind)
        return program

    @property
    def program_bytes(self) -> int:
        """Bytes that the kept programs hold."""
        return sum(self._program_bytes.values())

    def _forget_programs(self) -> None:
        """Drop programs beyond the limits."""
        while len(self._programs) > 1 and (
            len(self._programs) > MAX_PROGRAMS or self.program_bytes > MAX_PROGRAM_BYTES
        ):
            kind, program = self._programs.popitem(last=False)
            self._program_bytes.pop(kind, None)
            if program is self._last:
                self._last = None
            self._drafted = {k: v for k, v in self._drafted.items() if v is not program}


def _following(row: Row, flight: Flight) -> Row:
    """A row, set to continue after the run in flight if its sequence takes part in that run."""
    place = flight.places.get(row.work.sequence)
    if place is None:
        return row
    pending = flight.works[place].most_tokens
    return row._replace(follows=place, pending=pending, given=NOTHING)
