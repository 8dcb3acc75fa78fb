"""Captured graphs and their IF nodes, whose bodies run when a flag on the device says so.

Graphs are captured and launched in the emulator, which takes any order that a graph's dependencies
leave open.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import emulated
import reference
from eecore import ops
from eecore.ops import exits

NUM_LAYERS, NUM_SEQS = 12, 3
NULL = ctypes.c_void_p(None)


def call(name: str, *arguments: Any) -> Any:
    """A function of graph_calls.cpp that gives a pointer or nothing."""
    function = getattr(emulated.library(), f"eecore_emulator_{name}")
    function.restype = ctypes.c_void_p
    return function(*arguments)


def call_guarded(name: str, *arguments: Any) -> Any:
    """The same of one that may throw: RuntimeError with its message."""
    message = ctypes.create_string_buffer(1000)
    result = call(name, *arguments, message, len(message))
    if message.value:
        raise RuntimeError(message.value.decode())
    return result


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[ctypes.c_void_p]:
    """An emulated stream that the ops launch on, of which one has been launched before."""
    emulated.route(monkeypatch)
    ExitChecks().check(0)
    made = ctypes.c_void_p(call("new_stream"))
    call("use_stream", made)
    yield made
    call("use_stream", NULL)
    call("delete_stream", made)


class Graph:
    """A graph; its capture begins here."""

    def __init__(self, stream: ctypes.c_void_p) -> None:
        self._pointer: ctypes.c_void_p | None = None
        self._stream = stream
        self._pointer = ctypes.c_void_p(call_guarded("new_graph", stream))

    def end(self) -> None:
        call_guarded("end_graph", self._pointer)

    def launch(self, seed: int = 0) -> None:
        emulated.set_seed(seed)
        call_guarded("launch_graph", self._pointer, self._stream)

    def __del__(self) -> None:
        if self._pointer is not None:
            call("delete_graph", self._pointer)


class Body:
    """A conditional body that the ops are captured into."""

    def __init__(self, stream: ctypes.c_void_p, flag: Tensor, when: bool) -> None:
        self._pointer: ctypes.c_void_p | None = None
        made = call_guarded("new_body", stream, ctypes.c_void_p(flag.data_ptr()), int(when))
        self._pointer = ctypes.c_void_p(made)

    def end(self) -> None:
        call_guarded("end_body", self._pointer)

    def __del__(self) -> None:
        if self._pointer is not None:
            call("delete_body", self._pointer)


@contextmanager
def only_when(stream: ctypes.c_void_p, flag: Tensor, when: bool) -> Iterator[None]:
    body = Body(stream, flag, when)
    yield
    body.end()


class ExitChecks:
    """Exit checks at three layers, each in the body of the one before; what they decide."""

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
        """Accepts after a layer; the flag that says whether all rows are accepted."""
        mask = self.masks[index]
        layer, confidence = self.layers[index], self.confidence[index]
        exits._accept_mask(confidence, self.thresholds, layer, self.status, self.exit_layer, *mask)
        return mask.all_accepted

    def reset(self, confidence: Tensor) -> None:
        self.confidence.copy_(confidence)
        self.status.zero_()
        self.exit_layer.fill_(NUM_LAYERS)
        for mask in self.masks:
            mask.num_survivors.fill_(-1)  # who was not checked keeps it

    def expected(self) -> tuple[list[int], int]:
        """Exit layers, and how many checks run."""
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
    """First check, then each in the body that runs unless all are accepted already."""

    def from_check(index: int) -> None:
        flag = checks.check(index)
        if index + 1 < len(checks.layers):
            with only_when(stream, flag, when=False):
                from_check(index + 1)

    graph = Graph(stream)
    from_check(0)
    graph.end()
    return graph


@pytest.mark.parametrize("seed", range(6))
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
@pytest.mark.parametrize("seed", range(4))
def test_what_follows_runs_behind_the_body(stream: ctypes.c_void_p, when: bool, seed: int) -> None:
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
    with pytest.raises(RuntimeError, match="and the capture not, got another"):
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
    """As an exception in it would, in whatever order what it held goes."""
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
