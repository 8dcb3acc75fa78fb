"""Captured graphs name what they lack, and harm no request when they fail or are freed."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from eecore import ops
from eecore.decoding.capture import run_program_on
from eecore.ops import graphs


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "cuda_module", None)


@pytest.mark.usefixtures("without_cuda")
@pytest.mark.parametrize(
    ("is_built", "got"), [(False, "a build without eecore._cuda"), (True, "no GPU")]
)
def test_a_body_without_cuda_is_refused(
    monkeypatch: pytest.MonkeyPatch, is_built: bool, got: str
) -> None:
    monkeypatch.setattr(graphs, "build_info", lambda: {"cuda": is_built})
    flag = torch.zeros(1, dtype=torch.bool)
    expected = f"captured_body: expected CUDA kernels and a GPU for them, got {got}"
    with pytest.raises(RuntimeError, match=expected), ops.captured_body(flag, when=True):
        pass


@pytest.mark.usefixtures("without_cuda")
def test_a_graph_without_cuda_is_refused() -> None:
    graph = ops.CapturedGraph(torch.device("cuda"))
    with (
        pytest.raises(RuntimeError, match=r"CapturedGraph\.capture: expected CUDA kernels"),
        graph.capture(None),  # type: ignore[arg-type]
    ):
        pass


def test_graphs_need_the_pools_of_torchs_own_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(RuntimeError, match=r"PYTORCH_CUDA_ALLOC_CONF: .*got backend:cudaMalloc"):
        run_program_on(torch.device("cuda"))


class Held:
    """A stand-in for an object of CUDA."""

    def __init__(self, *_: object) -> None: ...


def test_a_capture_that_fails_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller that keeps the exception does not keep the stream from being captured again."""
    made: list[weakref.ref[Held]] = []

    def make(*_: object) -> Held:
        held = Held()
        made.append(weakref.ref(held))
        return held

    module = SimpleNamespace(CapturedGraph=make, ConditionalBody=make)
    monkeypatch.setattr(graphs, "cuda_module", module)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    stream = SimpleNamespace(cuda_stream=1, device_index=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    graph = ops.CapturedGraph(torch.device("cuda", 0))
    flag = torch.zeros(1, dtype=torch.bool)
    with (
        pytest.raises(ZeroDivisionError) as raised,
        graph.capture(stream),  # type: ignore[arg-type]
        ops.captured_body(flag, when=True),
    ):
        raise ZeroDivisionError
    assert raised.value.__traceback__ is not None
    assert [held() for held in made] == [None, None]
