"""Iteration-level batching: which requests run in the next iteration, and with which pages.

Running requests come first, oldest first; then waiting ones are admitted while pages, places and
the token budget last. When pages run out the youngest running request is preempted: its pages go
back, it waits at the head of the queue, and its KV is recomputed later. The oldest request can
always run, since a request that could not fit alone is refused on arrival. An encoder's input is
read in one iteration, and counts against the budget; an input that is larger than the budget has an
iteration to itself.

A request on hold is in neither queue. It keeps its pages until other requests run out of pages: the
pages of requests on hold are taken first.

With a prefix cache a request begins after the cached pages of its first tokens. Pages without an
owner count as free, and are used before any request loses pages.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from itertools import chain, islice
from operator import itemgetter
from typing import NamedTuple

from eecore.config import EngineConfig
from eecore.scheduling.pages import PageAllocator
from eecore.scheduling.sequence import Sequence, SequenceStatus


class Work(NamedTuple):
    """The work of one sequence in an iteration, from position ``num_computed`` on."""

    sequence: Sequence
    num_tokens: int
    """Prefill chunk length; 1 for a decoding sequence."""
    max_drafts: int = 0
    """Drafts for which pages are held; 0 unless the sequence speculates."""
    is_prefill: bool = False
    """A chunk of a prompt, or of a replay."""

    @property
    def num_rows(self) -> int:
        """Positions of decoder and encoder, which count against the budget of an iteration."""
        return self.num_tokens + self.max_drafts + self.sequence.tokens_to_encode


class Scheduler:
    """Owns the requests, the queues and the pages.

    Args:
        draft_keys: positions after its drafts for which a speculating request gets pages where
            pages are free: a draft head with layers of its own drafts there for the next round.

    Attributes:
        requests: unfinished requests by id, in the order of their arrival.
        running: running requests, in the same order.
        held: requests on hold, which are not scheduled until they are resumed.
    """

    def __init__(self, config: EngineConfig, pages: PageAllocator, *, draft_keys: int = 0) -> None:
        self._config, self._draft_keys = config, draft_keys
        self.pages = pages
        self.requests: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.held: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._works: dict[Sequence, Work] = {}
        """The works of the requests that decoded last, which are reused."""

    def add(self, sequence: Sequence) -> Sequence:
        """Add a request, whose id is unused, by one operation; returns it."""
        return self.requests.setdefault(sequence.request_id, sequence)

    @property
    def has_runnable(self) -> bool:
        if self.running:
            return True
        return any(s.status is not SequenceStatus.HELD for s in list(self.requests.values()))

    @property
    def waiting(self) -> deque[Sequence]:
        """The waiting requests in the order of their arrival, in which they are admitted."""
        fresh = len(self.requests) - len(self.running) - len(self.held) - len(self._waiting)
        if fresh > 0:
            newest = list(islice(reversed(self.requests.values()), fresh))
            self._waiting.extend(reversed(newest))
        return self._waiting

    def schedule(self) -> list[Work]:
        """The next iteration's work, with pages allocated for all of it."""
        works, budget = self._go_on(self._config.max_batch_tokens)
        waiting = self.waiting
        if waiting:
            works += self._admit(waiting, budget, is_first=not works)
        return works

    def _go_on(self, budget: int) -> tuple[list[Work], int]:
        """The work of the running requests, and what is left of the budget."""
        works: list[Work] = []
        growing: list[tuple[Sequence, int]] = []
        page_size, before, self._works = self.pages.page_size, self._works, {}
        num_free = self.pages.num_free
        for sequence in list(self.running):
            if sequence.status is not SequenceStatus.RUNNING or budget <= 0:
                continue  # preempted by an older one just now, or out of budget
            if sequence.probe is not None and sequence.is_decoding:
                sequence = _probe_of(sequence)
            written = len(sequence.output_ids)
            num_tokens = len(sequence.prompt_ids) + written
            if written and sequence.num_computed == num_tokens - 1:
                drafts = 0
                if sequence.max_drafts and not sequence.is_resting:  # as _wanted_drafts
                    left = sequence.sampling.max_tokens - written
                    drafts = max(0, min(sequence.max_drafts, left - 1))
                positions = num_tokens + drafts + (self._draft_keys if drafts else 0)
                missing = -(-positions // page_size) - len(sequence.pages)
                if missing <= num_free:
                    if missing > 0:
                        growing.append((sequence, missing))
                        num_free -= missing
                    work = before.get(sequence)
                    if work is None or work.max_drafts != drafts:
                        work = Work(sequence, 1, drafts)
                    self._works[sequence] = work
                    works.append(work)  # the usual case
                    budget -= 1 + drafts
                    continue
            if works and sequence.tokens_to_encode >= budget:
                continue
            self._add_pages(growing)
            growing.clear()
            work = self._work_for(sequence, budget)
            is_running = self._reserve(sequence, work)
            if is_running:
                works.append(self._with_drafts(work))
                budget -= works[-1].num_rows
            num_free = self.pages.num_free
        if growing:
            self._add_pages(growing)
        return works, budget

    def schedule_ahead(self, running: list[Work]) -> list[Work]:
        """The iteration after one of decoding sequences that is in flight, with pages for it.

        Empty when no sequence goes on for certain, or when :meth:`schedule` would do more than
        continue them: admit a request, take pages from a request, or split the batch.
        """
        if self.waiting and len(self.running) < self._config.max_num_seqs:
            return []
        works: list[Work] = []
        growing: list[tuple[Sequence, int]] = []
        page_size, num_going, missing, most_tokens = self.pages.page_size, 0, 0, 0
        for work in running:
            sequence, before = work.sequence, work.max_drafts
            if sequence.status is not SequenceStatus.RUNNING:
                continue
            num_going += 1
            # Tokens left if the iteration gives only one.
            left = sequence.sampling.max_tokens - len(sequence.output_ids) - 1
            if left <= 0:
                continue
            drafts = 0 if sequence.is_resting else max(0, min(sequence.max_drafts, left - 1))
            if drafts != before:
                known = self._works.get(sequence)
                if known is None or known.max_drafts != drafts:
                    known = self._works[sequence] = Work(sequence, 1, drafts)
                work = known
            works.append(work)
            most = sequence.num_computed + min(1 + before + 1 + drafts, left + 1)
            if drafts:
                most += self._draft_keys
            pages = -(-most // page_size) - len(sequence.pages)
            if pages > 0:
                missing += pages
                growing.append((sequence, pages))
            most_tokens += 1 + drafts
        if num_going < len(self.running) or missing > self.pages.num_free:
            return []
        if most_tokens > self._config.max_batch_tokens:
            return []
        if growing:
            self._add_pages(growing)
        return works

    def _work_for(self, sequence: Sequence, budget: int) -> Work:
        if sequence.is_decoding:
            return Work(sequence, 1, _required_drafts(sequence))
        left = sequence.prefill_target - sequence.num_computed
        budget = max(1, budget - sequence.tokens_to_encode)
        most = min(left, budget, self._config.max_prefill_chunk)
        if sequence.keep_at > sequence.num_computed:
            most = min(most, sequence.keep_at - sequence.num_computed)
        return Work(sequence, most, is_prefill=True)

    def _with_drafts(self, work: Work) -> Work:
        """The work with as many drafts as the request wants and free pages allow; no preemption."""
        sequence = work.sequence
        room = (len(sequence.pages) + self.pages.num_free) * self.pages.page_size
        drafts = min(_wanted_drafts(sequence), room - sequence.num_tokens)
        if work.is_prefill or drafts <= work.max_drafts:
            return work
        self._grow(sequence, sequence.num_tokens + drafts)
        return Work(sequence, 1, drafts)

    def _add_pages(self, missing: Ordered[tuple[Sequence, int]]) -> None:
        """Allocate so many more pages for each of these requests."""
        pages = iter(self.pages.allocate(sum(map(itemgetter(1), missing))))
        for sequence, count in missing:
            sequence.pages += islice(pages, count)

    def _grow(self, sequence: Sequence, num_positions: int) -> None:
        missing = -(-num_positions // self.pages.page_size) - len(sequence.pages)
        if missing > 0:
            sequence.pages += self.pages.allocate(missing)

    def _reserve(self, sequence: Sequence, work: Work) -> bool:
        """Allocate the work's pages, preempting the youngest requests as needed; False if the
        sequence itself was preempted.
        """
        positions = sequence.num_computed + work.num_tokens + work.max_drafts
        while (missing := self.pages.pages_for(positions) - len(sequence.pages)) > (
            self.pages.num_free
        ):
            if self._reclaim(missing):
                break
            youngest = self.running[-1]
            self.preempt(youngest)
            if youngest in (sequence, sequence.parent):
                return False
        self._grow(sequence, positions)
        return True

    def _admit(self, waiting: deque[Sequence], budget: int, *, is_first: bool) -> list[Work]:
        works: list[Work] = []
        while waiting and budget > 0 and len(self.running) < self._config.max_num_seqs:
            sequence = waiting[0]
            if sequence.tokens_to_encode >= budget and (works or not is_first):
                break
            if not self._give_pages(sequence):
                break
            waiting.popleft()
            self._run(sequence)
            work = self._work_for(sequence, budget)
            self._grow(sequence, sequence.num_computed + work.num_tokens)
            works.append(work)
            budget -= work.num_rows
        return works

    def _give_pages(self, sequence: Sequence) -> bool:
        """Give a sequence the cached pages of its first tokens, and pages for an encoder's input;
        False, and nothing given, without room for all its tokens and the next ones: it would be
        preempted at once.
        """
        cached = self.pages.share(sequence)
        following = min(1, sequence.tokens_left) + _required_drafts(sequence)
        needed = self.pages.pages_for(sequence.num_tokens + following)
        inputs = self.pages.pages_for(len(sequence.input_ids or ()))
        if not (self._reclaim(needed - len(cached) + inputs) and self._reclaim_state()):
            self.pages.free(cached)
            return False
        self.pages.begin_state(sequence, len(cached))
        sequence.input_pages = self.pages.allocate(inputs)
        sequence.pages, sequence.num_computed = cached, len(cached) * self.pages.page_size
        if not sequence.counters.preemptions:  # a replay finds its own pages
            sequence.cached_tokens = sequence.num_computed
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages; it will replay what is not in the prefix cache."""
        waiting = self.waiting
        self.running.remove(sequence)
        self._wait(sequence, waiting)
        self._evict(sequence)

    def hold(self, sequence: Sequence) -> None:
        """Take a sequence out of scheduling and change nothing else."""
        waiting, before = self.waiting, sequence.status
        if before not in (SequenceStatus.RUNNING, SequenceStatus.WAITING):
            return
        sequence.status = SequenceStatus.HELD
        queue = self.running if before is SequenceStatus.RUNNING else waiting
        queue.remove(sequence)
        self.held.append(sequence)

    def resume(self, sequence: Sequence) -> None:
        """Let a sequence on hold go on where it was, or replay if its pages or place are gone."""
        waiting = self.waiting
        if sequence.status is not SequenceStatus.HELD:
            return
        self.held.remove(sequence)
        if sequence.has_pages and len(self.running) < self._config.max_num_seqs:
            self._run(sequence)
        else:
            if sequence.has_pages:
                self._evict(sequence)
            self._wait(sequence, waiting)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = SequenceStatus.RUNNING
        bisect.insort(self.running, sequence, key=lambda s: s.arrival)

    def _wait(self, sequence: Sequence, waiting: deque[Sequence]) -> None:
        """Queue a sequence before all later arrivals, as if it had waited since its own arrival."""
        sequence.status = SequenceStatus.WAITING
        waiting.insert(bisect.bisect(waiting, sequence.arrival, key=lambda s: s.arrival), sequence)

    def _evict(self, sequence: Sequence) -> None:
        """Take a sequence's pages, and with them all that it has computed."""
        self.pages.publish(sequence)
        self.pages.release(sequence)
        _forget_pages(sequence, preemptions=1)

    def _reclaim(self, count: int) -> bool:
        """Make ``count`` pages free, taking those of requests on hold as needed; False, and nothing
        taken, when these are not enough.
        """
        if count <= self.pages.num_free:
            return True
        holding = [sequence for sequence in self.held if sequence.has_pages]
        theirs = chain.from_iterable((*s.pages, *s.input_pages) for s in holding)
        if count > self.pages.num_free + self.pages.num_freed_by(theirs):
            return False
        for sequence in sorted(holding, key=lambda s: s.arrival, reverse=True):
            self._evict(sequence)
            if count <= self.pages.num_free:
                break
        return True

    def _reclaim_state(self) -> bool:
        """Make a state free, taking that of the youngest request on hold as needed."""
        states = self.pages.states
        if states is None or states.num_free:
            return True
        holding = [sequence for sequence in self.held if sequence.state]
        if holding:
            self._evict(max(holding, key=lambda s: s.arrival))
        return bool(holding)

    def crop(self, sequences: Iterable[Sequence]) -> None:
        """Give back the pages after each one's last computed position (LayerSkip §4.3)."""
        surplus: list[int] = []
        for sequence in sequences:
            keep = -(-sequence.num_computed // self.pages.page_size)
            surplus += sequence.pages[keep:]
            del sequence.pages[keep:]
        self.pages.free(surplus)

    def finish(self, sequence: Sequence) -> None:
        """Remove a sequence from its queue and free its pages."""
        sequence.status = SequenceStatus.FINISHED
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence in self.held:
            self.held.remove(sequence)
        del self.requests[sequence.request_id]
        self.pages.release(sequence)
        _forget_pages(sequence)


def _probe_of(sequence: Sequence) -> Sequence:
    """The probe that runs next in the place of a sequence, over its pages."""
    probe, probes = sequence.probe, sequence.probes
    assert probe is not None
    assert probes is not None
    if probe.pages is not sequence.pages:
        probe = sequence.probe = probes.begin(sequence)
    return probe


def _forget_pages(sequence: Sequence, preemptions: int = 0) -> None:
    """Reset a sequence whose pages are gone, and with them all that it has computed."""
    s = sequence
    s.counters.preemptions += preemptions
    s.pages, s.input_pages, s.num_computed, s.is_encoded = [], [], 0, False


def _wanted_drafts(sequence: Sequence) -> int:
    if sequence.is_resting:
        return 0
    return max(0, min(sequence.max_drafts, sequence.tokens_left - 1))


def _required_drafts(sequence: Sequence) -> int:
    """Drafts that a round must have: those of a probe, the first of which are no guesses, and of a
    sampled request. The tokens that it draws depend on the number of drafts, and must not depend on
    how many pages happen to be free.
    """
    is_sampled = sequence.sampling.temperature > 0.0
    return _wanted_drafts(sequence) if is_sampled or sequence.parent is not None else 0
