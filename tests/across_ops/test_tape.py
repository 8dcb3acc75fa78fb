"""Tapes: a replay does what the calls would, with what the memory holds by then."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from eecore import ops

LAYERS, HIDDEN, INNER, HEADS, HEAD_DIM, VOCAB = 3, 32, 48, 4, 8, 50
PAGE_SIZE, NUM_PAGES, MAX_POSITION = 4, 12, 16


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Memory(NamedTuple):
    """The tensors of a small decoder: one token of each sequence, which has pages of its own."""

    weights: ops.DecoderWeights
    lm_head: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cos_sin: torch.Tensor
    query_start_loc: torch.Tensor
    hidden: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    thresholds: torch.Tensor
    status: torch.Tensor
    exit_layer: torch.Tensor
    count: torch.Tensor
    """int32 [1]: how many sequences there are."""

    @classmethod
    def of(cls, num_seqs: int) -> Memory:
        size = HEADS * HEAD_DIM
        cache = (LAYERS, NUM_PAGES, PAGE_SIZE, HEADS, HEAD_DIM)
        angles = normal(MAX_POSITION, HEAD_DIM // 2)
        return cls(
            weights=ops.DecoderWeights(
                attention_norm=1 + normal(LAYERS, HIDDEN) / 8,
                qkv=ops.Matrix(normal(LAYERS, 3 * size, HIDDEN) / 6),
                q_norm=None,
                k_norm=None,
                o=ops.Matrix(normal(LAYERS, HIDDEN, size) / 6),
                mlp_norm=1 + normal(LAYERS, HIDDEN) / 8,
                gate_up=ops.Matrix(normal(LAYERS, 2 * INNER, HIDDEN) / 6),
                down=ops.Matrix(normal(LAYERS, HIDDEN, INNER) / 7),
            ),
            lm_head=normal(VOCAB, HIDDEN),
            k_cache=torch.zeros(cache),
            v_cache=torch.zeros(cache),
            cos_sin=torch.cat((angles.cos(), angles.sin()), 1),
            query_start_loc=torch.arange(num_seqs + 1, dtype=torch.int32),
            hidden=torch.empty(num_seqs, HIDDEN),
            positions=torch.empty(num_seqs, dtype=torch.int64),
            slot_mapping=torch.empty(num_seqs, dtype=torch.int64),
            page_table=torch.arange(3 * num_seqs, dtype=torch.int32).view(num_seqs, 3),
            seq_lens=torch.empty(num_seqs, dtype=torch.int32),
            thresholds=torch.full((num_seqs,), 0.1),
            status=torch.empty(num_seqs, dtype=torch.bool),
            exit_layer=torch.empty(num_seqs, dtype=torch.int32),
            count=int32(num_seqs),
        )

    def clone(self) -> Memory:
        changing = {"k_cache", "v_cache", "hidden", "positions", "slot_mapping", "seq_lens"}
        changing |= {"status", "exit_layer", "count"}
        fields = self._asdict()
        return Memory(**{name: t.clone() if name in changing else t for name, t in fields.items()})

    def load(self, position: int, seed: int) -> None:
        """Load every sequence's next token, at `position`."""
        self.hidden.copy_(normal(*self.hidden.shape, seed=seed))
        self.positions.fill_(position)
        page, offset = divmod(position, PAGE_SIZE)
        self.slot_mapping.copy_(self.page_table[:, page] * PAGE_SIZE + offset)
        self.seq_lens.fill_(position + 1)
        self.status.fill_(False)
        self.exit_layer.fill_(-1)


class Results(NamedTuple):
    hidden: torch.Tensor
    head: ops.SoftmaxConfidence
    mask: ops.AcceptMask


def layers(memory: Memory, hidden: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return ops.decoder_layers(
        hidden,
        memory.weights,
        memory.k_cache,
        memory.v_cache,
        memory.slot_mapping,
        memory.positions,
        memory.cos_sin,
        memory.page_table,
        memory.seq_lens,
        memory.query_start_loc,
        begin_layer=begin,
        end_layer=end,
        scale=HEAD_DIM**-0.5,
        fixed_split_size=16,
    )


def program(memory: Memory) -> Results:
    """All layers, with an exit point before the last, at which rows that would exit are marked."""
    hidden = layers(memory, memory.hidden, 0, LAYERS - 1)
    norm = memory.weights.attention_norm[0]
    head = ops.exit_confidence_softmax(hidden, norm, memory.lm_head, 1e-6)
    mask = ops.accept_mask(
        head.confidence, memory.thresholds, LAYERS - 1, memory.status, memory.exit_layer
    )
    hidden = layers(memory, hidden, LAYERS - 1, LAYERS)
    return Results(ops.skinny_linear(hidden, memory.lm_head), head, mask)


def recorded(memory: Memory) -> tuple[ops.Tape, Results]:
    tape = ops.Tape()
    with tape.record(), tape.rows(memory.count):
        results = program(memory)
    return tape, results


def flat(results: Results, memory: Memory) -> list[torch.Tensor]:
    state = [memory.k_cache, memory.v_cache, memory.status, memory.exit_layer]
    return [results.hidden, *results.head, *results.mask, *state]


def same(got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


class Adder:
    """Each call adds ones to a row of its own, which shows the calls that ran."""

    def __init__(self, num_calls: int, rows: int = 1) -> None:
        self.ran = [torch.zeros(rows, 1) for _ in range(num_calls)]
        self._one, self._weight = torch.ones(rows, 1), torch.ones(1, 1)

    def call(self, index: int) -> None:
        out = self.ran[index]
        ops.skinny_linear(self._one, self._weight, residual=out, out=out)

    def take(self) -> list[float]:
        """How many rows each call added to since the last time."""
        counts = [float(out.sum()) for out in self.ran]
        for out in self.ran:
            out.zero_()
        return counts


# Replays


def test_replays_do_what_the_calls_would_on_what_the_memory_holds_by_then() -> None:
    memory = Memory.of(3)
    tape, results = recorded(memory)
    assert len(tape) == 5
    beside = memory.clone()
    for position in range(6):
        for each in (memory, beside):
            each.load(position, seed=position)
        tape.replay()
        same(flat(results, memory), flat(program(beside), beside))


def test_values_are_not_checked_while_recording_and_shapes_are() -> None:
    memory = Memory.of(2)
    for tensor in (memory.positions, memory.slot_mapping, memory.seq_lens, memory.exit_layer):
        tensor.fill_(1 << 20)
    tape = ops.Tape()
    with tape.record():
        layers(memory, memory.hidden, 0, LAYERS)
        ops.kv_fill(
            memory.hidden,
            memory.exit_layer,
            memory.weights.attention_norm,
            memory.weights.qkv.rows(slice(HEADS * HEAD_DIM, None)),
            memory.k_cache,
            memory.v_cache,
            memory.slot_mapping,
        )
        starts = torch.empty(3, dtype=torch.int32)
        probs = torch.empty(6, VOCAB)
        ops.speculative_accept(
            torch.empty(4, dtype=torch.int64),
            starts,
            draft_probs=probs[:4],
            target_probs=probs,
            uniform=torch.empty(6),
        )
        with pytest.raises(RuntimeError, match=r"slot_mapping: expected int64 \[num_tokens=3\]"):
            layers(memory, torch.empty(3, HIDDEN), 0, LAYERS)
    assert len(tape) == 3


# Row counts


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_replay_has_as_many_rows_as_the_count_says(count: int) -> None:
    memory = Memory.of(3)
    tape, results = recorded(memory)
    for tensor in (results.hidden, *results.head, *results.mask):
        tensor.fill_(7 if tensor.dtype != torch.bool else 0)
    memory.load(0, seed=3)
    memory.count.fill_(count)
    few = memory.clone()
    tape.replay()

    expected = few
    if count > 0:
        narrow = {
            name: getattr(few, name)[:count]
            for name in ("hidden", "positions", "slot_mapping", "page_table", "seq_lens")
        }
        narrow |= {name: getattr(few, name)[:count] for name in ("thresholds", "status")}
        narrow |= {"exit_layer": few.exit_layer[:count]}
        narrow |= {"query_start_loc": few.query_start_loc[: count + 1]}
        expected_results = program(few._replace(**narrow))
        assert torch.equal(results.hidden[:count], expected_results.hidden)
        for a, b in zip(results.head, expected_results.head, strict=True):
            assert torch.equal(a[:count], b)
        assert torch.equal(results.mask.num_survivors, expected_results.mask.num_survivors)
    for name in ("k_cache", "v_cache", "status", "exit_layer"):
        assert torch.equal(getattr(memory, name), getattr(expected, name))
    assert bool((results.hidden[count:] == 7).all())
    assert bool((results.head.token[count:] == 7).all())


@pytest.mark.parametrize(("count", "ran"), [(-5, 0), (2, 2), (3, 3), (1000, 3)])
def test_counts_are_held_to_the_rows_recorded(count: int, ran: int) -> None:
    adder, rows = Adder(1, rows=3), int32(1)
    tape = ops.Tape()
    with tape.record(), tape.rows(rows):
        adder.call(0)
    rows.fill_(count)
    tape.replay()
    assert adder.take() == [ran]
    rows.fill_(3)
    tape.replay()
    assert adder.take() == [3]


def test_the_innermost_rows_count() -> None:
    adder, two, one = Adder(4, rows=3), int32(2), int32(1)
    tape = ops.Tape()
    with tape.record():
        with tape.rows(two):
            adder.call(0)
            with tape.rows(one):
                adder.call(1)
            adder.call(2)
        adder.call(3)
    tape.replay()
    assert adder.take() == [2, 1, 2, 3]


def test_tokens_and_sequences_are_counted_apart() -> None:
    """Recorded with sequences of two queries and one; the replay has the first one alone."""
    caches = normal(2, 4, 2, 1, 8)
    q, starts, out = normal(3, 1, 8), int32(0, 2, 3), torch.full((3, 1, 8), 7.0)
    pages, lens = int32(0, 1, 2, 3).view(2, 2), int32(3, 4)
    tokens, seqs = int32(2), int32(1)

    def attend(rows: slice, sequences: slice, out: torch.Tensor | None) -> torch.Tensor:
        upto = slice(0, sequences.stop + 1)
        return ops.paged_attention(
            q[rows],
            *caches,
            pages[sequences],
            lens[sequences],
            starts[upto],
            scale=1.0,
            fixed_split_size=16,
            out=out,
        )

    tape = ops.Tape()
    with tape.record(), tape.rows(tokens, seqs):
        attend(slice(0, 3), slice(0, 2), out)
    tape.replay()
    assert torch.equal(out[:2], attend(slice(0, 2), slice(0, 1), None))
    assert bool((out[2] == 7).all())


def test_rows_exit_and_the_others_move_up() -> None:
    """Row 2 has no check and exits by its layer count; at the second replay no row is left."""
    no, whole, one = torch.zeros(4, dtype=torch.bool), int32(0, 0, 0, 0), torch.ones(4)
    hidden = normal(4, HIDDEN)
    before = hidden.clone()
    active = ops.ActiveRows(
        row=int32(0, 1, 2, 3),
        positions=torch.arange(4),
        slot_mapping=torch.arange(4),
        seq_lens=int32(5, 6, 7, 8),
        page_table=int32(0, 1, 2, 3)[:, None],
        num_active=int32(4),
    )
    rows = ops.ExitingRows(
        exit_after=int32(9, 9, 2, 9),
        together=no,
        fills=~no,
        kind=whole + 2,
        accepted=no.clone(),
        exited=no.clone(),
        exit_layer=whole.clone(),
        fill_from=whole.clone(),
        measured_at=whole.clone(),
        confidence=torch.zeros(4),
        token=torch.zeros(4, dtype=torch.int64),
        logprob=torch.zeros(4),
        token_at=whole.clone(),
        pending=whole.clone(),
        hidden=torch.zeros(4, HIDDEN),
        all_exited=torch.tensor([False]),
    )
    thresholds, confidence = torch.tensor([0.5, 0.5, float("inf"), 0.5]), torch.zeros(4)
    tape = ops.Tape()
    with tape.record(), tape.rows(active.num_active):
        asked = ops.select_rows(hidden, row=active.row, thresholds=thresholds)
        with tape.rows(active.num_active, asked.count):
            ops.exit_rows(
                hidden,
                *(2, rows, active),
                thresholds=thresholds,
                confidence=confidence,
                asked=asked.index,
            )
        ops.compact_rows(rows.exited, active, hidden)

    confidence.copy_(torch.tensor([0.1, 0.9, 0.2, 0.0]))  # of rows 0, 1 and 3
    tape.replay()
    assert asked.index[: asked.count].tolist() == [0, 1, 3]
    assert rows.exited.tolist() == [False, True, True, False]
    assert active.row[: active.num_active].tolist() == [0, 3]
    assert active.seq_lens[:2].tolist() == [5, 8]
    assert torch.equal(hidden[:2], before[[0, 3]])

    confidence.copy_(one)
    tape.replay()
    assert rows.all_exited.item()
    assert active.num_active.item() == 0
    assert torch.equal(rows.hidden, before)

    rows.all_exited.fill_(False)
    tape.replay()  # without rows it still says so
    assert rows.all_exited.item()
    assert asked.count.item() == 0


@pytest.mark.parametrize("count", [torch.zeros(1), int32(1, 2), torch.tensor(1)])
def test_counts_of_another_kind_are_refused(count: torch.Tensor) -> None:
    tape = ops.Tape()
    with (
        tape.record(),
        pytest.raises(RuntimeError, match=r"num_tokens: expected torch.int32 \[1\] on the CPU"),
        tape.rows(count),
    ):
        pass


# Jumps


@pytest.mark.parametrize("outer", [False, True])
@pytest.mark.parametrize("inner", [False, True])
def test_calls_under_a_flag_are_jumped_over(outer: bool, inner: bool) -> None:
    adder = Adder(5)
    flags = torch.tensor([outer]), torch.tensor([inner])
    tape = ops.Tape()
    with tape.record():
        adder.call(0)
        with tape.unless(flags[0]):
            adder.call(1)
            with tape.unless(flags[1]):
                adder.call(2)
            adder.call(3)
        adder.call(4)
    for _ in range(2):
        tape.replay()
        assert adder.take() == [1, not outer, not (outer or inner), not outer, 1]
    for flag in flags:
        flag.logical_not_()
    tape.replay()
    assert adder.take() == [1, outer, outer and inner, outer, 1]


def test_a_flag_that_a_call_sets_is_read_afterwards() -> None:
    memory, adder = Memory.of(2), Adder(2)
    confidence = torch.tensor([0.5, 0.5])
    tape = ops.Tape()
    with tape.record():
        mask = ops.accept_mask(confidence, memory.thresholds, 1, memory.status, memory.exit_layer)
        with tape.unless(mask.all_accepted):
            adder.call(0)
        adder.call(1)
    for value, expected in ((0.5, [0, 1]), (0.0, [1, 1])):
        memory.load(0, seed=0)
        confidence[1] = value
        tape.replay()
        assert adder.take() == expected


def test_a_flag_of_another_kind_is_refused() -> None:
    tape = ops.Tape()
    with (
        tape.record(),
        pytest.raises(RuntimeError, match=r"flag: expected torch.bool \[1\] .* got torch.int32"),
        tape.unless(int32(0)),
    ):
        pass


# What a program may do


def copied(x: torch.Tensor) -> torch.Tensor:
    return x.t().reshape(-1)


@pytest.mark.parametrize(
    ("foreign", "name"),
    [
        (lambda x: x + 1, "aten::add"),
        (lambda x: x.zero_(), "aten::zero_"),
        (lambda x: torch.zeros_like(x), "aten::"),
        (lambda x: x.clone(), "aten::clone"),
        (lambda x: x.float().double(), "aten::_to_copy"),
        (lambda x: x.sum().item(), "aten::sum"),
        (lambda x: x[0, 0].item(), "aten::_local_scalar_dense"),
        (copied, "aten::clone"),
    ],
)
@pytest.mark.parametrize("inference", [False, True])
def test_other_ops_are_refused_by_name(foreign: Any, name: str, inference: bool) -> None:
    x, adder = normal(2, 3), Adder(1)
    tape = ops.Tape()

    def record() -> None:
        with tape.record():
            adder.call(0)
            foreign(x)

    message = f"a program calls eecore's ops alone, got {name}"
    with torch.inference_mode(inference), pytest.raises(RuntimeError, match=message):
        record()
    assert len(tape) == 0


@pytest.mark.parametrize("inference", [False, True])
def test_allocations_and_views_are_let_through(inference: bool) -> None:
    x = normal(4, 6)
    tape = ops.Tape()
    with torch.inference_mode(inference), tape.record():
        empty = (
            torch.empty(2, 3),
            x.new_empty(4),
            torch.empty_like(x),
            torch.empty_strided((2,), (2,)),
        )
        assert [tuple(t.shape) for t in empty] == [(2, 3), (4,), (4, 6), (2,)]
        for view in (
            x.view(24),
            x.reshape(2, 12),
            x[1],
            x[:, 2:4],
            x.t(),
            x[None].expand(3, 4, 6),
            x.as_strided((2, 2), (6, 1)),
            *x.unbind(),
            *x.split(2),
            x.unflatten(1, (2, 3)),
            x.flatten(),
            x.detach(),
            x.contiguous(),
            x.to(torch.float32),
        ):
            assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert len(tape) == 0


@pytest.mark.parametrize("inference", [False, True])
def test_constants_hold_what_they_were_made_of(inference: bool) -> None:
    out = torch.zeros(1, 2)
    tape = ops.Tape()
    with torch.inference_mode(inference), tape.record():
        weight = torch.tensor([[1.0, 0.0], [0.0, 3.0]])
        ops.skinny_linear(torch.tensor([[2.0, 5.0]]), weight, out=out)
    del weight
    gc.collect()
    tape.replay()
    assert out.tolist() == [[2.0, 15.0]]


def test_tensors_that_a_program_drops_live_as_long_as_the_tape() -> None:
    out = torch.zeros(2, 3)

    def record() -> tuple[ops.Tape, weakref.ref[torch.Tensor]]:
        x, flag, count = torch.ones(2, 3), torch.tensor([False]), int32(2)
        tape = ops.Tape()
        with tape.record(), tape.rows(count), tape.unless(flag):
            between = ops.skinny_linear(x, torch.empty(3, 3))
            ops.skinny_linear(between, torch.empty(3, 3), out=out)
        return tape, weakref.ref(x)

    tape, alive = record()
    gc.collect()
    assert alive() is not None
    tape.replay()
    del tape
    gc.collect()
    assert alive() is None


# Recording


def test_a_thread_records_one_tape_at_a_time() -> None:
    tape, other, adder = ops.Tape(), ops.Tape(), Adder(1)
    with tape.record():
        for again in (tape, other):
            with (
                pytest.raises(RuntimeError, match="this thread is already recording"),
                again.record(),
            ):
                pass
            with pytest.raises(RuntimeError, match="no replay during a recording"):
                again.replay()
        adder.call(0)
    assert len(tape) == 1
    tape.replay()
    assert adder.take() == [1]


def test_a_tape_is_recorded_once() -> None:
    tape, adder = ops.Tape(), Adder(1)
    with tape.record():
        adder.call(0)
    with pytest.raises(RuntimeError, match="recorded once"), tape.record():
        pass
    tape.replay()
    assert adder.take() == [1]


def test_an_exception_leaves_no_recorder_and_an_empty_tape() -> None:
    tape, adder, one, flag = ops.Tape(), Adder(2), int32(1), torch.tensor([True])

    def record() -> None:
        with tape.record(), tape.rows(one), tape.unless(flag):
            adder.call(0)
            raise KeyError

    with pytest.raises(KeyError):
        record()
    assert len(tape) == 0
    adder.call(0)
    assert adder.take() == [1, 0]
    with tape.record():
        adder.call(1)
    tape.replay()
    assert adder.take() == [0, 1]


def test_threads_replay_tapes_of_their_own_side_by_side() -> None:
    memories = [Memory.of(2) for _ in range(2)]
    outcomes: dict[int, list[torch.Tensor]] = {}

    def work(index: int) -> None:
        torch.set_num_threads(2)
        memory = memories[index]
        tape, results = recorded(memory)
        for position in range(8):
            memory.load(position, seed=10 * index + position)
            tape.replay()
        outcomes[index] = [t.clone() for t in flat(results, memory)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index in range(2):
        memory = Memory.of(2)
        for position in range(8):
            memory.load(position, seed=10 * index + position)
            results = program(memory)
        same(outcomes[index], flat(results, memory))


def test_a_trace_tells_the_calls_of_a_replay() -> None:
    count = torch.tensor([2], dtype=torch.int32)
    flag = torch.tensor([False])
    hidden, head = torch.randn(3, 8), torch.randn(5, 8)
    tape = ops.Tape()
    with tape.record(), tape.rows(count):
        ops.exit_confidence_softmax(hidden, None, head, 1e-6)
        with tape.unless(flag):
            ops.exit_confidence_cosine(hidden, hidden)
    calls = tape.trace()
    assert [call.op for call in calls] == ["exit_confidence_softmax", "exit_confidence_cosine"]
    assert {call.num_tokens for call in calls} == {2}
    assert all(call.seconds >= 0 for call in calls)
    flag.fill_(True)
    assert len(tape.trace()) == 1
