"""The cost of an exit check in a captured program: its kernels, counted in the emulator."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from test_confident_exit import linear_classifier, mlp_classifier
from test_exit_rows import LAYER, Point, measure_of

import eecore
import emulated
from devices import as_on_cuda, engine_of
from eecore import ConfidentExit, FixedExit, Full, SamplingParams, SelfSpeculative, ops
from eecore.decoding.capture import CallByCall
from eecore.decoding.control import Always, Program
from eecore.exits import Exit
from emulated_graphs import Graph, InEmulatedGraph, new_stream, take_captured
from tiers import in_all
from tiny_models import random_prompts

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD = ["exit_confidence_softmax_kernel", "logit_summary_kernel"]
CHECKS: dict[str, tuple[Exit, list[str]]] = {
    "softmax": (ConfidentExit(0.3), HEAD),
    "softmax_all": (ConfidentExit(0.3, batch="all"), HEAD),
    "state": (ConfidentExit(0.8, measure="state"), ["exit_confidence_cosine_kernel"]),
    "classifier": (
        ConfidentExit(0.55, measure="classifier", classifier=linear_classifier()),
        ["exit_confidence_mlp_kernel"],
    ),
    "deep_classifier": (
        ConfidentExit(0.55, measure="classifier", classifier=mlp_classifier()),
        ["exit_confidence_mlp_kernel"],
    ),
    "fixed": (FixedExit(2), ["exit_rows_kernel"]),
}


class Captured(CallByCall):
    """Runs programs call by call, and captures each as well; the graph is not launched."""

    def __init__(self, stream: ctypes.c_void_p) -> None:
        self._stream = stream
        self.kernels: list[list[str]] = []
        """The kernels of each program with decisions."""

    def __call__(self, program: Program) -> None:
        program.run(Always())  # a capture loads no kernel
        kernels = self.of(partial(program.run, InEmulatedGraph(self._stream)))
        if "if" in kernels:
            self.kernels.append(kernels)
        program.send()
        super().__call__(program)

    def of(self, work: Callable[[], None]) -> list[str]:
        """The kernels of some work that has already run once."""
        take_captured()
        graph = Graph(self._stream)
        try:
            work()
            graph.end()
        finally:
            del graph  # before its stream, whatever has failed
        return take_captured()


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Captured]:
    emulated.route(monkeypatch)
    with new_stream() as stream:
        yield Captured(stream)


def kernels_of_checks(kernels: list[str]) -> list[list[str]]:
    """The kernels between the last product of a layer and each IF node."""
    checks, check = [], []
    for name in kernels:
        if name == "if":
            checks.append(check)
        check = [] if name in ("if", "skinny_linear_kernel") else [*check, name]
    return checks


@pytest.mark.parametrize("num_rows", [3, *in_all(1)])
@pytest.mark.parametrize("mode", CHECKS)
def test_kernels_of_a_check(
    tiny_directory: Path, captured: Captured, mode: str, num_rows: int
) -> None:
    """One row, or several that exit each alone or all together."""
    policy, expected = CHECKS[mode]
    model = as_on_cuda(eecore.load(tiny_directory, device="cpu", kv_cache_tokens=512))
    model.run_program = captured
    policies = [policy] * num_rows
    if mode == "fixed":  # beside one that goes on
        policies.append(Full())
    prompts = random_prompts(*range(1, len(policies) + 1))
    outputs = eecore.generate(model, prompts, exit=policies, max_tokens=2)
    assert [len(output.token_ids) for output in outputs] == [2] * len(prompts)
    assert captured.kernels
    for kernels in captured.kernels:
        checks = kernels_of_checks(kernels)
        assert checks
        assert checks == [expected] * len(checks)
        assert "place_head_kernel" not in kernels  # the head places its own results


def test_no_kernel_checks_whether_rows_draft(agreeing_directory: Path, captured: Captured) -> None:
    """The ops that begin a round and that take over a draft decide it."""
    model = as_on_cuda(eecore.load(agreeing_directory, device="cpu", kv_cache_tokens=512))
    model.run_program = captured
    eecore.generate(model, random_prompts(3), exit=SelfSpeculative(2, 3), max_tokens=4)
    assert captured.kernels
    for kernels in captured.kernels:
        before = [kernels[i - 1] for i, name in enumerate(kernels) if name == "if"]
        assert before[0] == "begin_round_kernel"
        assert set(before[1:]) == {"append_drafts_kernel"}


@pytest.mark.parametrize(
    ("kind", "measuring", "most"),
    [
        ("softmax", HEAD, 32),
        ("cosine", ["exit_confidence_cosine_kernel"], 8),
        ("linear", ["exit_confidence_mlp_kernel"], 8),
        ("mlp", ["exit_confidence_mlp_kernel", "exit_confidence_mlp_finish_kernel"], 32),
    ],
)
def test_rows_that_one_block_does_not_end_leave_in_a_launch_of_its_own(
    captured: Captured, kind: str, measuring: list[str], most: int
) -> None:
    for num_rows in (1, most, most + 1):
        point = Point(num_rows, 100)
        measure = measure_of(kind, point.hidden)
        arguments = point.hidden, LAYER, point.rows, point.active

        check = partial(ops.exit_rows, *arguments, thresholds=point.thresholds, measure=measure)
        check()
        kernels = captured.of(check)
        norms = kind == "softmax" and num_rows > 8  # of more rows than its blocks norm
        expected = ["rms_norm_kernel"] * norms + measuring
        assert kernels == expected + ["exit_rows_kernel"] * (num_rows > most), num_rows


@pytest.mark.parametrize(
    ("policy", "together", "passes"),
    [
        (ConfidentExit(0.0, exit_points=(2,)), [], 1),  # its token is known
        (ConfidentExit(1.0 - 2.0**-24, exit_points=(2,)), [], 2),
        (ConfidentExit(0.0, exit_points=(2,)), [FixedExit(2)], 2),
        (ConfidentExit(0.0, exit_points=(2,)), [Full(), ConfidentExit(0.0, exit_points=(2,))], 2),
        (
            ConfidentExit(0.0, exit_points=(1, 2, 3)),
            [Full()],
            2,
        ),  # no row is checked after the first exit point
        (ConfidentExit(0.0, measure="state", exit_points=(2,)), [], 1),
    ],
)
def test_the_head_is_read_once_for_a_token(
    tiny_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    policy: Exit,
    together: list[Exit],
    passes: int,
) -> None:
    """A row that exits where the head measured it takes its token from that measure."""
    policies = [policy, *together]
    tokens = {}
    for kernels in ("cpu", "emulated"):
        model = eecore.load(tiny_directory, device="cpu", kv_cache_tokens=512)
        if kernels == "emulated":
            emulated.route(monkeypatch)
            as_on_cuda(model)
        engine = engine_of(model)
        for i, each in enumerate(policies):
            engine.add_request(
                random_prompts(i + 1)[0], exit=each, sampling=SamplingParams(max_tokens=3)
            )
        engine.step()  # the prompts' pass
        if kernels == "emulated":
            head = model.network.measure.lm_head
            with emulated.counting(head=head) as counted:
                engine.step()
            heads = [each for each in counted if each.name == "exit_confidence_softmax_kernel"]
            read = [each.watched["head"][1] for each in heads if each.watched]
            assert sum(read) == passes * head.nbytes
        outputs = [step.output for step in engine.run() if step.output is not None]
        tokens[kernels] = {output.request_id: output.token_ids for output in outputs}
    assert tokens["emulated"] == tokens["cpu"]
    assert len(tokens["cpu"]) == len(policies)
