"""An iteration: the prompts' pass, then a program for each family of decoding rows.

Rows of one family share a program, whatever their policies: an exit step, a loop of a looped model,
or a round for each way to draft. The family of a row does not depend on the other rows.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

import torch

from eecore.decoding.capture import Capture, RunProgram
from eecore.decoding.chunk_pass import ChunkKind, ChunkPass, ChunkRows
from eecore.decoding.draft_kind import DraftKind, draft_kind
from eecore.decoding.draft_step import DraftStep
from eecore.decoding.exit_step import ExitKind, ExitStep, exit_kind
from eecore.decoding.loop_step import LoopKind, LoopStep, Race, goes_by_loops, loop_kind
from eecore.decoding.memory import Array, HostSide, power_of_two
from eecore.decoding.prefill import Chunk, Prefill, encode
from eecore.models import DraftHead, KVCache, Network
from eecore.planning.draft_state import guided_of
from eecore.planning.planner import Planner
from eecore.planning.route import DraftPath
from eecore.planning.row import Outcome, Row
from eecore.scheduling.scheduler import Work
from eecore.scheduling.sequence import Sequence, SequenceStatus

# Programs that are kept; the least recently used one is dropped first, but never the last one.
MAX_PROGRAMS = 256
# Bytes that the kept programs hold together.
MAX_PROGRAM_BYTES = 1 << 29

Kind = ExitKind | DraftKind | ChunkKind
AnyProgram = ExitStep | DraftStep | ChunkPass
PROGRAMS: dict[type[Kind], Any] = {
    ExitKind: ExitStep,
    LoopKind: LoopStep,
    DraftKind: DraftStep,
    ChunkKind: ChunkPass,
}
"""The program of each kind."""


@dataclass(eq=False, slots=True)
class Run:
    """A launched run of a program, which the device may not have finished."""

    program: ExitStep | DraftStep
    rows: list[Row]
    arrived: HostSide
    is_first: bool = False
    """Whether the program had never run before."""

    def land(self) -> list[Outcome]:
        """The outcomes of the sequences that are still running."""
        running = []
        for i, row in enumerate(self.rows):
            if row.work.sequence.status is SequenceStatus.RUNNING:
                running.append((i, row))
        return self.program.outcomes(running, self.arrived)


@dataclass(eq=False)
class Flight:
    """A launched iteration: a run for each program that its rows need, one after another."""

    works: list[Work]
    runs: list[Run]
    is_planned: bool = False
    """Whether the next round of some row has to be planned: the host looks drafts up, or chooses
    how to draft.
    """
    sequences: list[Sequence] = field(default_factory=list, init=False)
    places: dict[Sequence, tuple[Run, int]] = field(default_factory=dict, init=False)
    """The run of each sequence in flight, and its row there."""

    def __post_init__(self) -> None:
        for work in self.works:
            self.sequences.append(work.sequence)
        for run in self.runs:
            for i, row in enumerate(run.rows):
                self.places[row.work.sequence] = run, i

    @property
    def is_over(self) -> bool:
        """Whether no running sequence needs the outcome any more."""
        return SequenceStatus.RUNNING not in [sequence.status for sequence in self.sequences]

    def of(self, run: Run, works: list[Work]) -> list[Work]:
        """The works whose sequences are in a run."""
        if len(self.runs) == 1:
            return works
        return [work for work in works if self.places[work.sequence][0] is run]


class Iterations:
    """The iterations of one model over one cache.

    Args:
        ahead: whether a program's next run is launched before the outcome of this one is known;
            None: if ``run`` returns early.
        max_chunk: the longest chunk of a prompt. Beside rows that decode, prompts of a looped model
            run no more than such a chunk does in one loop.
    """

    def __init__(
        self,
        model: Network,
        kv: KVCache,
        run: RunProgram,
        *,
        ahead: bool | None = None,
        max_chunk: int,
    ) -> None:
        self.model, self.kv, self._max_chunk = model, kv, max_chunk
        self._keyed: DraftHead | None = None
        if model.draft_head is not None and kv.of_head is not None:
            self._keyed = model.draft_head
            self._keyed.prepare(kv.of_head)
        model.prepare(kv)
        # Which positions of a text are certain, which a state needs, only the host knows.
        has_states = kv.deltas is not None
        self.ahead = (run.returns_early if ahead is None else ahead) and not has_states
        self.run = run
        self._run_chunk = self._run_by_size if run.captures_chunks and not has_states else None
        self.planner = Planner(model, torch.get_num_threads(), ahead=self.ahead)
        # Without launches ahead: the last exit step, and the last program of rounds, by whether a
        # draft head drafts after its rounds.
        self._last: ExitStep | None = None
        self._is_looped = model.config.num_loops > 1
        # The last program of one loop, whose rows may go on with their next loop.
        self._passed: LoopStep | None = None
        self._races: dict[int, Race] = {}
        # Chunks of prompts that have loops left to run.
        self._begun: dict[Sequence, Chunk] = {}
        self._drafted: dict[bool, DraftStep] = {}
        # The end of the last iteration, and the sequences that decoded in it.
        self._ended: tuple[float, list[Sequence]] | None = None
        self._programs: OrderedDict[Kind, AnyProgram] = OrderedDict()
        self._program_bytes: dict[Kind, int] = {}

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
            most = self._max_chunk if decoding else None
            for outcome in self._prefill(prompts, most):
                outcomes[outcome.sequence] = outcome
        rows = self.planner.plan(decoding, others_wait=others_wait)
        families = self._families(rows)
        if len(families) == 1 and not prompts:
            found = self._run_family(families[0], since)
            self._ended = time.perf_counter(), sequences
            return found
        for family in families:
            for outcome in self._run_family(family, None):
                outcomes[outcome.sequence] = outcome
        return [outcomes[work.sequence] for work in works]

    @torch.inference_mode()
    def _prefill(self, prompts: list[Work], most: int | None) -> list[Outcome]:
        """Run a chunk of each prompt, after the encoder has read its input; ``most`` as for
        ``Prefill.run``.
        """
        unread = [work.sequence for work in prompts if work.sequence.tokens_to_encode]
        if unread:
            encode(self.model, self.kv, unread)
        begun = self._begun
        for sequence, chunk in list(begun.items()):
            if sequence.status is not SequenceStatus.RUNNING or sequence.pages is not chunk.pages:
                del begun[sequence]
        return Prefill(self.model, self.kv, prompts, begun, self._run_chunk).run(most)

    def _run_by_size(self, kind: ChunkKind, token_ids: Array, rows: ChunkRows) -> ChunkPass:
        """Run the layers of prompts' chunks by the program of their size, and return it."""
        program: ChunkPass = self._program(kind)
        program.load(token_ids, rows)
        self.run(program)
        self._keep(program)
        return program

    def _run_family(self, family: list[Row], since: float | None) -> list[Outcome]:
        """Run the program that these rows share, and learn from it.

        Args:
            family: the rows.
            since: the end of the last iteration of the same requests; None where other work was
                done in between.
        """
        last = None
        if family[0].route.path is None:
            last, self._last = self._last, None  # a failed run leaves nothing to continue from
            if self._is_looped and isinstance(last, LoopStep) != self._by_loops(family):
                last = None
        run = self._run(last) if last is not None and last.goes_on(family) else self._launch(family)
        outcomes = run.land()
        seconds = None if since is None or run.is_first else time.perf_counter() - since
        if self._is_looped and seconds is not None:
            race, by_loops = self._race(family), isinstance(run.program, LoopStep)
            if race is None:
                seconds = None if by_loops else seconds  # one loop is no round of full depth
            elif race.by_loops == by_loops:
                race.learn(sum(len(outcome.token_ids) for outcome in outcomes), seconds)
        self.planner.learn(family, outcomes, seconds)
        if family[0].ahead or family[0].route.path is not None:
            self._keep_ahead(outcomes)
        return outcomes

    def _keep_ahead(self, outcomes: list[Outcome]) -> None:
        """Keep the drafts of a head for the next round."""
        for outcome in outcomes:
            draft = outcome.sequence.draft
            assert draft is not None
            draft.ahead = outcome.ahead

    def launch(
        self, works: list[Work], after: Flight | None = None, *, others_wait: bool = False
    ) -> Flight | None:
        """Start an iteration without prompts, and return before its outcome is known.

        Args:
            works: sequences, each with pages for whatever the iteration computes.
            after: the iteration in flight, if any. All sequences take part in it, and continue
                after their tokens there, in the same programs.
            others_wait: whether waiting requests need these to end.

        Returns:
            The iteration in flight; None, with nothing launched, where a row needs another program
            than it has in flight, or depends on more than the tokens there.
        """
        if not self.ahead:
            return None
        if after is None:
            if any(map(self._must_land, works)):
                return None
            rows = self.planner.plan(works, others_wait=others_wait)
            runs = [self._launch(family) for family in self._families(rows)]
            works = [row.work for row in rows]
            return Flight(works, runs, any(map(_is_planned, rows)))
        if not after.is_planned:
            for run in after.runs:
                if not run.program.follow(after.of(run, works)):
                    break
            else:
                return Flight(works, [self._run(run.program) for run in after.runs])
        in_flight = {sequence: (run.rows[i], i) for sequence, (run, i) in after.places.items()}
        rows = self.planner.plan(works, others_wait=others_wait, in_flight=in_flight)
        steps = []
        for family in self._families(rows):
            step = self._load_after(family, after)
            if step is None:
                self.planner.put_back()
                return None
            steps.append(step)
        works = [row.work for row in rows]
        return Flight(works, [self._run(step) for step in steps], after.is_planned)

    def _load_after(self, rows: list[Row], after: Flight) -> ExitStep | DraftStep | None:
        """Load rows that share a program to continue after a run of it in flight; None where they
        are not all in one run, or need another program.
        """
        run, _ = after.places[rows[0].work.sequence]
        step = run.program
        if self._is_looped and isinstance(step, LoopStep):
            return None  # which rows have made their token is not known yet
        followers, places = [], after.places
        for row in rows:
            if places[row.work.sequence][0] is not run:
                return None
        is_exit = rows[0].route.path is None and isinstance(step, ExitStep)
        if is_exit and step.follow([row.work for row in rows]):
            return step
        for row in rows:
            if row.follows is None:
                _, place = places[row.work.sequence]
                row = Row(*row[:-3], place, run.rows[place].most_tokens, row.given)
            followers.append(row)
        fits = isinstance(step, DraftStep) and step.fits(followers)
        if not fits and step.kind != self._kind(followers):
            return None
        step.load(followers)
        return step

    def land(self, flight: Flight) -> list[Outcome]:
        """The outcomes of an iteration in flight, in the order of its works, without those of
        sequences that have ended; a head's drafts are kept for the next round.
        """
        last, self._ended = self._ended, None
        found: list[list[Outcome]] = []
        for run in flight.runs:
            found.append(run.land())
        outcomes = found[0]
        if len(found) > 1:
            by_sequence = {outcome.sequence: outcome for its in found for outcome in its}
            outcomes = [by_sequence[s] for s in flight.sequences if s in by_sequence]
        if self.planner.held is not None and len(outcomes) == len(flight.works):
            sequences, now, seconds = flight.sequences, time.perf_counter(), None
            is_timed = len(found) == 1 and not flight.runs[0].is_first
            if self._is_looped and isinstance(flight.runs[0].program, LoopStep):
                is_timed = False  # one loop is no round of full depth
            if is_timed and last is not None and last[1] == sequences:
                seconds = now - last[0]
            for run, its in zip(flight.runs, found, strict=True):
                self.planner.learn(run.rows, its, seconds)
            self._ended = now, sequences
        self._keep_ahead(outcomes)
        return outcomes

    def _must_land(self, work: Work) -> bool:
        """Whether the next run of a row needs the outcome of the last one on the host."""
        sequence = work.sequence
        follows = sequence.parent is not None or guided_of(sequence) is not None
        return work.is_prefill or follows

    def _launch(self, rows: list[Row]) -> Run:
        """Load rows that share a program, and run it."""
        step = self._same_again(rows) or self._program(self._kind(rows))
        if self._is_looped and isinstance(step, LoopStep):
            step.take(self._passed)
            self._passed = step
        step.load(rows)
        return self._run(step)

    def _kind(self, rows: list[Row]) -> ExitKind | DraftKind:
        """The kind of program that rows share."""
        if self._is_looped and self._by_loops(rows):
            stack_size = self.model.config.num_layers // self.model.config.num_loops
            return loop_kind(rows, stack_size=stack_size, page_size=self.kv.page_size)
        make_kind: Any = exit_kind if rows[0].route.path is None else draft_kind
        head = self._keyed if rows[0].route.path is None else self.model.draft_head
        kind: ExitKind | DraftKind = make_kind(
            rows, page_size=self.kv.page_size, ahead=self.ahead, head=head
        )
        return kind

    def _by_loops(self, rows: list[Row]) -> bool:
        """Whether rows of a looped model, all of one family, run loop by loop: where some may exit
        earlier than others, and that is faster; also where all are in the middle of a token.
        """
        if not goes_by_loops(rows[0]):
            return False
        race, passed = self._race(rows), self._passed
        if race is not None:
            return self.ahead or race.by_loops
        return passed is not None and all(row.sequence in passed.under_way for row in rows)

    def _race(self, rows: list[Row]) -> Race | None:
        """The race of the two ways to run rows of a looped model; None where there is one way."""
        ways = {(row.route.depth, row.route.points) for row in rows}
        if len(rows) == 1 or not (len(ways) > 1 or rows[0].route.points):
            return None
        size = power_of_two(len(rows))
        return self._races.setdefault(size, Race(size)) if goes_by_loops(rows[0]) else None

    def _run(self, step: ExitStep | DraftStep) -> Run:
        """Run a program whose rows are loaded."""
        self.run(step)
        is_first = not step.has_run and self._keep(step)
        if not self.ahead:
            if isinstance(step, ExitStep):
                self._last = step
            else:
                self._drafted[step.kind.drafts_ahead] = step
        return Run(step, step.rows, step.fetch(), is_first)

    def _same_again(self, rows: list[Row]) -> DraftStep | None:
        """The program of the last round of drafts, if it was of the same rows and fits them: this
        is quicker than to compare kinds of programs, which are large.
        """
        step = self._drafted.get(max([row.ahead for row in rows]) > 0)
        return step if step is not None and step.fits(rows) else None

    def _families(self, rows: list[Row]) -> list[list[Row]]:
        """Rows grouped by program: by how they draft and, with a draft head that has keys of its
        own, by whether they give the head keys, which rows that may exit early do not. Rows of a
        looped model also by whether they may be in loops of their own.
        """
        is_one = self._keyed is None and len({id(row.route.path) for row in rows}) == 1
        if is_one and not self._is_looped:
            return [rows]  # quicker than to compare paths, which are large
        families: dict[tuple[DraftPath | None, bool], list[Row]] = {}
        for row in rows:
            keeps = self._keyed is None or row.route.fills_head
            if self._is_looped:
                keeps = goes_by_loops(row)
            families.setdefault((row.route.path, keeps), []).append(row)
        return [rows] if len(families) == 1 else list(families.values())

    def _program(self, kind: Kind) -> Any:
        """The program of a kind, which is made when it is first needed."""
        program = self._programs.get(kind)
        if program is None:
            with torch.inference_mode():
                program = self._programs[kind] = PROGRAMS[type(kind)](self.model, self.kv, kind)
            self._forget_programs()
        self._programs.move_to_end(kind)
        return program

    def _keep(self, program: AnyProgram) -> bool:
        """Count the memory of a program after its first run; returns whether this was the first."""
        if program.has_run:
            return False
        program.has_run = True
        self._program_bytes[program.kind] = program.num_bytes + self.run.num_bytes(program)
        self._forget_programs()
        return True

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
            if program is self._passed:
                self._passed = None
            self._drafted = {k: v for k, v in self._drafted.items() if v is not program}


def _is_planned(row: Row) -> bool:
    """Whether the row's next round has to be planned."""
    route = row.route
    return route.auto is not None or (
        route.path is not None and route.path.is_given and not row.ahead
    )
