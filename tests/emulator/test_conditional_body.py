"""Captured graphs and their IF nodes, whose bodies run when a flag on the device says so.

Graphs are captured and launched in the emulator, which takes any order that a graph's dependencies
leave open.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_exit_rows import LAYER, Point, measure_of
from torch import Tensor

import emulated
import reference
from eecore import ops
from eecore.ops import exits
from emulated_graphs import NULL, Body, Graph, new_condition, new_stream, only_when

NUM_LAYERS, NUM_SEQS = 12, 3


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.c_void_p]:
    """An emulated stream that the ops launch on, of which one has been launched before."""
    emulated.route(monkeypatch)
    ExitChecks().check(0)
    with new_stream() as made:
        yield made


class ExitChecks:
    """Exit checks at three layers, each in the body of the last one, and their decisions."""

    layers = (3, 6, 9)

    def __init__(self) -> None:
        self.confidence = torch.zeros(len(self.layers), NUM_SEQS)
        self.thresholds = torch.full((NUM_SEQS,), 0.5)
        self.status = torch.zeros(NUM_SEQS, dtype=torch.bool)
        self.exit_layer = torch.zeros(NUM_SEQS, dtype=torch.int32)
        self.masks = [
            ops.AcceptMask(
                torch.empty(NUM_SEQS, dtype=torch.int32),
                torch.empty(1, dtype=torch.int32),
                torch.empty(1, dtype=torch.bool),
            )
            for _ in self.layers
        ]

    def check(self, index: int) -> Tensor:
        """Accept rows after a layer; returns the flag of whether all rows are accepted."""
        mask = self.masks[index]
        layer, confidence = self.layers[index], self.confidence[index]
        exits._accept_mask(confidence, self.thresholds, layer, self.status, self.exit_layer, *mask)
        return mask.all_accepted

    def reset(self, confidence: Tensor) -> None:
        self.confidence.copy_(confidence)
        self.status.zero_()
        self.exit_layer.fill_(NUM_LAYERS)
        for mask in self.masks:
            mask.num_survivors.fill_(-1)  # rows that are not checked keep it

    def expected(self) -> tuple[list[int], int]:
        """The expected exit layers, and the number of checks that run."""
        status = torch.zeros(NUM_SEQS, dtype=torch.bool)
        exits = torch.full((NUM_SEQS,), NUM_LAYERS, dtype=torch.int32)
        for i, layer in enumerate(self.layers):
            status, exits, survivors = reference.accept_mask(
                self.confidence[i], self.thresholds, layer, status, exits
            )
            if not len(survivors):
                return exits.tolist(), i + 1
        return exits.tolist(), len(self.layers)


def capture(stream: ctypes.c_void_p, checks: ExitChecks) -> Graph:
    """Capture the first check, then each in a body that runs unless all rows are accepted."""

    def from_check(index: int) -> None:
        flag = checks.check(index)
        if index + 1 < len(checks.layers):
            with only_when(stream, flag, when=False):
                from_check(index + 1)

    graph = Graph(stream)
    from_check(0)
    graph.end()
    return graph


@pytest.mark.parametrize("seed", range(2))
def test_deeper_checks_run_only_while_a_row_survives(stream: ctypes.c_void_p, seed: int) -> None:
    checks = ExitChecks()
    checks.reset(torch.ones(3, NUM_SEQS))
    graph = capture(stream, checks)
    assert checks.exit_layer.tolist() == [NUM_LAYERS] * NUM_SEQS  # capturing runs nothing
    depths = set()
    for _ in range(20):
        checks.reset(torch.rand(3, NUM_SEQS))
        graph.launch(seed)
        exits, depth = checks.expected()
        assert checks.exit_layer.tolist() == exits
        ran = [mask.num_survivors.item() >= 0 for mask in checks.masks]
        assert ran == [index < depth for index in range(3)]
        depths.add(depth)
    assert len(depths) > 1


@pytest.mark.parametrize("when", [False, True])
@pytest.mark.parametrize("seed", range(2))
def test_what_follows_runs_after_the_body(stream: ctypes.c_void_p, when: bool, seed: int) -> None:
    checks = ExitChecks()
    flag = torch.zeros(1, dtype=torch.bool)
    graph = Graph(stream)
    with only_when(stream, flag, when):
        checks.check(0)
    checks.check(1)  # sees what the body has accepted
    graph.end()
    for flag_value in (False, True, True, False):
        flag.fill_(flag_value)
        checks.reset(torch.ones(3, NUM_SEQS))
        graph.launch(seed)
        first = 3 if flag_value == when else 6
        assert checks.exit_layer.tolist() == [first] * NUM_SEQS


def test_two_bodies_follow_each_other(stream: ctypes.c_void_p) -> None:
    checks = ExitChecks()
    flags = torch.zeros(2, dtype=torch.bool)
    graph = Graph(stream)
    for index in range(2):
        with only_when(stream, flags[index : index + 1], when=True):
            checks.check(index)
    graph.end()
    for wanted, first in (((0, 0), 12), ((0, 1), 6), ((1, 0), 3), ((1, 1), 3)):
        flags.copy_(torch.tensor(wanted, dtype=torch.bool))
        checks.reset(torch.ones(3, NUM_SEQS))
        graph.launch()
        assert checks.exit_layer.tolist() == [first] * NUM_SEQS


def test_a_stream_that_is_not_captured_is_refused(stream: ctypes.c_void_p) -> None:
    flag = torch.zeros(1, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="expected a stream that is being captured, got one"):
        Body(stream, flag, when=True)
    graph = Graph(stream)  # and nothing is left of it
    Body(stream, flag, when=True).end()
    graph.end()
    graph.launch()


def test_captures_and_bodies_end_once(stream: ctypes.c_void_p) -> None:
    graph = Graph(stream)
    body = Body(stream, torch.zeros(1, dtype=torch.bool), when=True)
    body.end()
    with pytest.raises(RuntimeError, match="a conditional body: expected one that is open"):
        body.end()
    with pytest.raises(RuntimeError, match="expected one whose capture has ended"):
        graph.launch()
    graph.end()
    with pytest.raises(RuntimeError, match="a captured graph: expected an open capture"):
        graph.end()


def test_a_stream_is_captured_once_at_a_time(stream: ctypes.c_void_p) -> None:
    graph = Graph(stream)
    with pytest.raises(RuntimeError, match="cudaStreamBeginCaptureToGraph: "):
        Graph(stream)
    with pytest.raises(RuntimeError, match="cudaStreamBeginCaptureToGraph: "):
        Graph(NULL)
    del graph  # given up: the stream can be captured again
    Graph(stream).end()


def test_a_capture_around_an_open_body_fails(stream: ctypes.c_void_p) -> None:
    flag = torch.zeros(1, dtype=torch.bool)
    graph = Graph(stream)
    body = Body(stream, flag, when=True)
    with pytest.raises(RuntimeError, match="bodies to have ended, got an open one"):
        graph.end()
    with pytest.raises(RuntimeError, match="and an open capture, got another"):
        body.end()


def test_a_body_around_an_open_one_does_not_end(stream: ctypes.c_void_p) -> None:
    flag = torch.zeros(1, dtype=torch.bool)
    graph = Graph(stream)
    outer, inner = Body(stream, flag, when=True), Body(stream, flag, when=False)
    with pytest.raises(RuntimeError, match="expected the bodies inside to have ended"):
        outer.end()
    del inner, outer, graph
    Graph(stream).end()  # all of it was given up


@pytest.mark.parametrize("graph_goes_first", [False, True])
def test_a_body_that_is_given_up_leaves_other_captures_alone(
    stream: ctypes.c_void_p, graph_goes_first: bool
) -> None:
    """An exception in the body does that; its objects may be freed in any order."""
    flag = torch.zeros(1, dtype=torch.bool)
    checks = ExitChecks()
    checks.reset(torch.ones(3, NUM_SEQS))
    graph = Graph(stream)
    body = Body(stream, flag, when=True)
    if graph_goes_first:
        del graph
        graph = Graph(stream)
    del body
    checks.check(1)
    graph.end()
    graph.launch()
    assert checks.exit_layer.tolist() == [6] * NUM_SEQS


class DecidingChecks:
    """Exit checks whose op decides whether the body after it runs, at three layers."""

    def __init__(self, num_rows: int, kind: str | None) -> None:
        self.point = Point(num_rows, 100)
        self.states = [Point(num_rows, 100 + i).hidden[:, :100] for i in range(3)]
        self.measures = [None if kind is None else measure_of(kind, h) for h in self.states]
        self.confidence = torch.zeros(3, num_rows)
        self.fresh = [tensor.clone() for tensor in self.point.rows]

    def run(self, stream: ctypes.c_void_p | None, index: int = 0) -> None:
        """Run the checks into a graph, or call by call without a stream."""
        rows, measure = self.point.rows, self.measures[index]
        is_last = index == 2
        condition = None if is_last or stream is None else new_condition(stream)
        ops.exit_rows(
            *(self.states[index], LAYER + index, rows, self.point.active),
            thresholds=self.point.thresholds,
            confidence=self.confidence[index] if measure is None else None,
            measure=measure,
            condition=condition,
        )
        if is_last:
            return
        if stream is not None:
            with only_when(stream, rows.all_exited, when=False, condition=condition):
                self.run(stream, index + 1)
        elif not rows.all_exited:
            self.run(None, index + 1)

    def reset(self, seed: int) -> None:
        """Set the rows to be checked at all points, their confidences and their thresholds."""
        generator = torch.Generator().manual_seed(seed)
        for tensor, value in zip(self.point.rows, self.fresh, strict=True):
            tensor.copy_(value)
        rows, count = self.point.rows, len(self.fresh[0])
        rows.exited.zero_()
        rows.accepted.zero_()
        rows.exit_after.fill_(LAYER + 2)
        rows.together.fill_(seed % 2 == 1)
        self.confidence.copy_(torch.rand(3, count, generator=generator))
        said = self.confidence
        if self.measures[0] is not None:
            pairs = zip(self.measures, self.states, strict=True)
            said = torch.stack([measure(states) for measure, states in pairs if measure])
        least, most = said.aminmax(dim=0)
        share = torch.rand(count, generator=generator) * 1.4 - 0.2
        self.point.thresholds.copy_(torch.lerp(least, most, share))


@pytest.mark.parametrize("num_rows", [1, 9])
@pytest.mark.parametrize("kind", [None, "cosine", "linear"])  # those without a workspace
def test_the_op_that_lets_rows_leave_decides_on_the_body(
    stream: ctypes.c_void_p, monkeypatch: pytest.MonkeyPatch, kind: str | None, num_rows: int
) -> None:
    checks = DecidingChecks(num_rows, kind)
    checks.reset(0)
    checks.run(None)
    kept: list[Tensor] = []  # what a graph writes stays where it is
    empty = torch.empty

    def keeping(*arguments: Any, **given: Any) -> Tensor:
        kept.append(empty(*arguments, **given))
        return kept[-1]

    graph = Graph(stream)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", keeping)
        checks.run(stream)
    graph.end()
    depths = set()
    for seed in range(12):
        checks.reset(seed)
        checks.run(None)
        expected = [tensor.clone() for tensor in checks.point.rows]
        depths.add(int(expected[6].max()))
        checks.reset(seed)
        graph.launch(seed)
        for name, want, got in zip(
            checks.point.rows._fields, expected, checks.point.rows, strict=True
        ):
            assert torch.equal(got, want), name
    if num_rows == 1:
        assert len(depths) > 1


def test_a_condition_belongs_to_the_graph_that_it_was_made_in(stream: ctypes.c_void_p) -> None:
    flag = torch.zeros(1, dtype=torch.bool)
    with pytest.raises(RuntimeError, match="expected a stream that is being captured, got one"):
        new_condition(stream)
    graph = Graph(stream)
    outer, inner = new_condition(stream), new_condition(stream)
    with only_when(stream, flag, when=False, condition=outer):
        with pytest.raises(RuntimeError, match="cudaGraphAddNode of a condition: "):
            Body(stream, flag, when=False, condition=inner)
        with pytest.raises(RuntimeError, match="cudaGraphAddNode of a condition: "):
            Body(stream, flag, when=False, condition=outer)
    Body(stream, flag, when=False, condition=inner).end()
    graph.end()
