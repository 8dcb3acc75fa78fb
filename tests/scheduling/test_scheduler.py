"""The requests of an iteration: order, budgets, chunks, preemption, drafts."""

from __future__ import annotations

from typing import Any

import pytest

from eecore import EngineConfig, Full, SamplingParams, SelfSpeculative
from eecore.exits import Exit
from eecore.scheduling.pages import PageAllocator
from eecore.scheduling.scheduler import Scheduler, Work
from eecore.scheduling.sequence import Sequence, SequenceStatus


class Bench:
    """A scheduler, and an engine's part played by hand."""

    def __init__(self, **config: int) -> None:
        self.config = EngineConfig(**{"kv_cache_tokens": 64, "page_size": 4, **config})
        self.pages = PageAllocator(self.config.num_pages, self.config.page_size)
        self.scheduler = Scheduler(self.config, self.pages)
        self.count = 0

    def add(
        self, prompt_tokens: int, max_tokens: int = 16, exit: Exit | None = None, **sampling: Any
    ) -> Sequence:
        sequence = Sequence(
            request_id=str(self.count),
            prompt_ids=[1] * prompt_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, **sampling),
            exit=exit or Full(),
            arrival=self.count,
            eos_token_ids=frozenset(),
        )
        self.count += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self, emitted: int = 1) -> list[Work]:
        """Schedule, and act as if the model ran: each decoding request emits ``emitted`` tokens."""
        works = self.scheduler.schedule()
        for work in works:
            sequence = work.sequence
            count = 0
            if not work.is_prefill:
                count = emitted
                sequence.num_computed += emitted
            else:
                sequence.num_computed += work.num_tokens
                if not sequence.output_ids and sequence.num_computed == sequence.num_prompt_tokens:
                    count = 1
            sequence.output_ids += [2] * count
            self.scheduler.crop([sequence])
        return works


def summary(works: list[Work]) -> list[tuple[str, int]]:
    return [(work.sequence.request_id, work.num_tokens) for work in works]


def test_admission_is_first_come_first_served() -> None:
    bench = Bench(max_num_seqs=2)
    a, b, c = (bench.add(3) for _ in range(3))
    assert summary(bench.step()) == [("0", 3), ("1", 3)]
    assert (a.status, b.status, c.status) == (
        SequenceStatus.RUNNING,
        SequenceStatus.RUNNING,
        SequenceStatus.WAITING,
    )
    bench.scheduler.finish(a)
    assert summary(bench.step()) == [("1", 1), ("2", 3)]


def test_a_large_request_is_not_overtaken() -> None:
    bench = Bench()
    bench.add(40)
    bench.step()
    bench.add(30)  # has to wait for pages
    small = bench.add(2)
    assert summary(bench.step()) == [("0", 1)]
    assert small.status is SequenceStatus.WAITING


def test_prefill_goes_in_chunks_next_to_decoding() -> None:
    bench = Bench(max_prefill_chunk=5)
    bench.add(2)
    bench.step()
    bench.add(12)
    assert summary(bench.step()) == [("0", 1), ("1", 5)]
    assert summary(bench.step()) == [("0", 1), ("1", 5)]
    assert summary(bench.step()) == [("0", 1), ("1", 2)]
    assert summary(bench.step()) == [("0", 1), ("1", 1)]


def test_the_batch_budget_cuts_chunks_and_keeps_the_rest_waiting() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.add(6)
    bench.add(6)
    bench.add(3)
    assert summary(bench.step()) == [("0", 6), ("1", 2)]
    assert summary(bench.step()) == [("0", 1), ("1", 4), ("2", 3)]


def test_with_a_budget_of_one_the_oldest_goes_on() -> None:
    bench = Bench(max_batch_tokens=1)
    bench.add(1)
    bench.add(1)
    assert [summary(bench.step()) for _ in range(3)] == [[("0", 1)]] * 3


def test_the_youngest_is_preempted_first_and_comes_back_first() -> None:
    bench = Bench(kv_cache_tokens=24)
    sequences = [bench.add(7) for _ in range(3)]
    bench.step()  # 2 pages each: the cache is full
    assert bench.pages.num_free == 0
    bench.add(1)
    bench.step()  # positions 7: still 2 pages each
    works = bench.step()  # position 8 needs a third page
    assert summary(works) == [("0", 1), ("1", 1)]
    youngest = sequences[2]
    assert youngest.status is SequenceStatus.WAITING
    assert (youngest.num_computed, youngest.pages) == (0, [])
    assert youngest.counters.preemptions == 1
    assert [s.request_id for s in bench.scheduler.waiting] == ["2", "3"]
    bench.scheduler.finish(sequences[0])
    works = bench.step()
    assert summary(works) == [("1", 1), ("2", 8), ("3", 1)]
    # The replay is the prompt and the first of the two tokens; the second is yet to run.
    assert youngest.prefill_target == 8
    bench.step()
    assert youngest.is_decoding


def test_greedy_drafts_are_cut_rather_than_preempt() -> None:
    bench = Bench(kv_cache_tokens=16)
    spec, other = bench.add(6, 10, SelfSpeculative(1, 6)), bench.add(6, 10)
    bench.step()
    works = bench.scheduler.schedule()
    assert [work.max_drafts for work in works] == [1, 0]  # only slot 7 of its two pages is free
    assert other.counters.preemptions == spec.counters.preemptions == 0


def test_sampled_drafts_preempt_rather_than_be_cut() -> None:
    """The number of drafts decides the random numbers that are drawn, so it must not vary."""
    bench = Bench(kv_cache_tokens=16)
    spec = bench.add(6, 10, SelfSpeculative(1, 6), temperature=1.0)
    bench.scheduler.schedule()
    spec.num_computed = 6
    spec.output_ids.append(2)
    other = bench.add(2, 10)
    other_works = bench.step()
    assert [(w.sequence, w.max_drafts) for w in other_works] == [(spec, 6)]
    assert other.status is SequenceStatus.WAITING


def test_drafts_never_pass_max_tokens() -> None:
    bench = Bench()
    sequence = bench.add(2, 5, SelfSpeculative(1, 6))
    bench.step()
    (work,) = bench.scheduler.schedule()
    assert work.max_drafts == 3  # 4 left, and the verification gives one of them
    sequence.output_ids += [2] * 3
    sequence.num_computed += 3
    (work,) = bench.scheduler.schedule()
    assert work.max_drafts == 0


def test_drafts_count_in_the_budget() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.add(3, exit=SelfSpeculative(1, 5))
    bench.step()
    bench.add(10)
    assert summary(bench.step()) == [("0", 1), ("1", 2)]


@pytest.mark.parametrize("where", ["waiting", "running", "preempted", "held"])
def test_finish_from_anywhere(where: str) -> None:
    bench = Bench()
    sequence = bench.add(4)
    if where != "waiting":
        bench.step()
    if where == "preempted":
        bench.scheduler.preempt(sequence)
    if where == "held":
        bench.scheduler.hold(sequence)
    bench.scheduler.finish(sequence)
    assert sequence.status is SequenceStatus.FINISHED
    assert not bench.scheduler.requests
    assert bench.pages.num_free == bench.pages.num_pages


@pytest.mark.parametrize(
    "field",
    ["kv_cache_tokens", "page_size", "max_num_seqs", "max_batch_tokens", "max_prefill_chunk"],
)
def test_engine_settings_below_one_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field}: expected a whole number, 1"):
        EngineConfig(**{field: 0})


def ahead(bench: Bench, works: list[Work]) -> list[tuple[str, int]]:
    return [(w.sequence.request_id, w.max_drafts) for w in bench.scheduler.schedule_ahead(works)]


def test_only_requests_that_certainly_go_on_are_scheduled_ahead() -> None:
    bench = Bench()
    longer, last = bench.add(3, max_tokens=4), bench.add(3, max_tokens=2)
    drafting = bench.add(3, max_tokens=6, exit=SelfSpeculative(1, 4))
    bench.step()
    works = bench.scheduler.schedule()
    assert [work.max_drafts for work in works] == [0, 0, 4]
    # The drafting one has at least one of its five tokens by then, and drafts one fewer than left.
    assert ahead(bench, works) == [("0", 0), ("2", 3)]
    assert (len(longer.pages), len(last.pages)) == (2, 1)
    # Rounds of five tokens and of four; but there are only eight positions with keys to come.
    assert len(drafting.pages) == 2
    bench.scheduler.finish(longer)
    assert ahead(bench, works) == [("2", 3)]
    drafting.is_resting = True
    assert ahead(bench, works) == [("2", 0)]


def test_nothing_is_scheduled_ahead_when_another_request_could_run() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add(3)
    bench.step()
    works = bench.scheduler.schedule()
    assert ahead(bench, works) == [("0", 0)]
    bench.add(3)
    assert ahead(bench, works) == []  # a place is free for it
    bench.step()
    bench.add(3)
    works = bench.scheduler.schedule()
    assert ahead(bench, works) == [("0", 0), ("1", 0)]  # no place: it waits anyway
    assert ahead(bench, works[:1]) == []  # one was left out, and is next


def test_scheduling_ahead_takes_no_pages_from_a_request() -> None:
    bench = Bench(kv_cache_tokens=16)
    sequences = [bench.add(4), bench.add(3), bench.add(2)]
    bench.step()
    works = bench.scheduler.schedule()
    held = [len(sequence.pages) for sequence in sequences]
    assert (held, bench.pages.num_free) == ([2, 1, 1], 0)
    assert ahead(bench, works) == []  # the second one needs another page
    assert [len(sequence.pages) for sequence in sequences] == held
    assert all(sequence.status is SequenceStatus.RUNNING for sequence in sequences)


def test_ahead_keeps_to_the_budget() -> None:
    bench = Bench(max_batch_tokens=8)
    bench.add(3, exit=SelfSpeculative(1, 4))
    bench.step()
    works = bench.scheduler.schedule()
    assert ahead(bench, works) == [("0", 4)]
    bench.add(2, exit=SelfSpeculative(1, 4))
    bench.step()
    both = bench.scheduler.schedule()
    assert len(both) == 2
    assert ahead(bench, both) == []


# On hold


def test_what_is_on_hold_is_left_out_and_goes_on_where_it_was() -> None:
    bench = Bench()
    held, other = bench.add(6), bench.add(2)
    bench.step()
    pages = list(held.pages)
    bench.scheduler.hold(held)
    assert summary(bench.step()) == [("1", 1)]
    assert (held.status, held.pages) == (SequenceStatus.HELD, pages)
    bench.scheduler.resume(held)
    assert bench.scheduler.running == [held, other]
    assert summary(bench.step()) == [("0", 1), ("1", 1)]
    assert held.counters.preemptions == 0


def test_pages_on_hold_go_before_a_request_is_preempted() -> None:
    bench = Bench(kv_cache_tokens=24)
    sequences = [bench.add(7) for _ in range(3)]
    bench.step()  # 2 pages each: the cache is full
    first, second, third = sequences
    bench.scheduler.hold(first)
    bench.scheduler.hold(second)
    bench.step()
    bench.step()  # the third needs another page: the second's go, the youngest on hold
    assert (len(first.pages), len(second.pages), len(third.pages)) == (2, 0, 3)
    assert [s.counters.preemptions for s in sequences] == [0, 1, 0]
    assert (second.status, second.num_computed) == (SequenceStatus.HELD, 0)
    bench.scheduler.resume(second)
    assert second.status is SequenceStatus.WAITING
