"""The ops that a program calls on the CPU, recorded once and replayed by one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from eecore import _C

__all__ = ["CallTrace", "Tape"]


class CallTrace(NamedTuple):
    """A call that a replay made."""

    op: str
    num_tokens: int
    """Rows of the call; -1 for an op without rows."""
    num_seqs: int
    begin_layer: int
    """The first layer of ``decoder_layers``, else 0."""
    end_layer: int
    seconds: float


class Tape:
    """The ops that a program calls on the CPU, recorded once and replayed by one call, many times.

    A program calls ops of this module on its own tensors, whose contents are read at the time of
    the replay: data, numbers of rows, and flags that skip a part. It may also allocate with
    ``torch.empty`` and similar functions, make constants with ``torch.tensor``, and take views.
    All threads are awake from the first kernel of a replay to its last. ``len(tape)`` is the number
    of recorded calls.
    """

    def __init__(self) -> None:
        self._tape = _C.Tape()
        self._kept: dict[int, Tensor] = {}
        self.num_bytes = 0
        """Bytes of the tensors that were made during the recording and that the tape keeps."""

    def __len__(self) -> int:
        return len(self._tape)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record the ops that this thread calls; none runs. An exception leaves an empty tape.

        Shapes, dtypes and strides are checked as usual; values are checked neither now nor at
        replay.
        Every tensor that an op is given lives as long as the tape.

        Raises:
            RuntimeError: the thread records already, the tape has been recorded, or an op is not
                one of eecore's.
        """
        self._tape.begin()
        try:
            recording = _Recording(self._kept)
            with recording:
                yield
            self._tape.end()
            self.num_bytes = recording.num_bytes
        except BaseException:
            self._tape.cancel()
            self._kept.clear()
            raise

    @contextmanager
    def rows(self, num_tokens: Tensor, num_seqs: Tensor | None = None) -> Iterator[None]:
        """Calls recorded here have as many rows at replay as the counts hold at that time.

        There are never more rows than the calls were recorded with. A call without tokens is
        skipped, except for :func:`exit_rows` and :func:`select_rows`, which then report no rows.
        The rows are the first ones of each tensor. The innermost ``rows`` counts.

        Args:
            num_tokens: int32 [1]; the sequences of an op that has only sequences.
            num_seqs: int32 [1], for ops that have both; the rows asked of :func:`exit_rows`.
                ``num_tokens`` when None.
        """
        counts = (num_tokens, num_tokens if num_seqs is None else num_seqs)
        for name, count in zip(("num_tokens", "num_seqs"), counts, strict=True):
            self._keep(count, name, torch.int32)
        outer = self._tape.read_rows(counts[0].data_ptr(), counts[1].data_ptr())
        try:
            yield
        finally:
            self._tape.read_rows(*outer)

    @contextmanager
    def unless(self, flag: Tensor) -> Iterator[None]:
        """Calls recorded here are skipped in a replay if ``flag``, bool [1], is set by then."""
        self._keep(flag, "flag", torch.bool)
        opened = self._tape.open_jump(flag.data_ptr())
        try:
            yield
        finally:
            self._tape.close_jump(opened)

    def replay(self) -> None:
        """Run the calls, without the interpreter's lock; replays of one tape follow one another.

        Raises:
            RuntimeError: this thread, or this tape, is recording.
        """
        self._tape.replay()

    def trace(self) -> list[CallTrace]:
        """Replay, and return the calls that were made, in order, with the time of each."""
        return [CallTrace(*call) for call in self._tape.trace()]

    def _keep(self, tensor: Tensor, name: str, dtype: torch.dtype) -> None:
        if tensor.dtype != dtype or tensor.shape != (1,) or tensor.device.type != "cpu":
            raise RuntimeError(
                f"tape: {name}: expected {dtype} [1] on the CPU, got {tensor.dtype} "
                f"{list(tensor.shape)} on {tensor.device}"
            )
        self._kept[id(tensor)] = tensor


class _Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets calls through that a tape can hold, and keeps the tensors given to eecore's ops."""

    _ALLOCATIONS = frozenset(
        {
            "aten::detach_",  # a part of torch.tensor
            "aten::empty",
            "aten::empty_like",
            "aten::empty_permuted",
            "aten::empty_strided",
            "aten::new_empty",
            "aten::new_empty_strided",
        }
    )

    def __init__(self, kept: dict[int, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._made: set[int] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes of the storages that were made and are kept."""
        storages = [tensor.untyped_storage() for tensor in self._kept.values()]
        made = {s._cdata: s.nbytes() for s in storages if s._cdata in self._made}
        return sum(made.values())

    def _note(self, made: Any) -> Any:
        """Remember the storages of a call's results."""
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, Tensor):
                self._made.add(tensor.untyped_storage()._cdata)
        return made

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: otherwise torch imports all of its compiler, which takes a second."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if func.namespace == "eecore":
            for tensor in (*args, *kwargs.values()):
                if isinstance(tensor, Tensor):
                    self._keep(tensor, name)
            return self._note(func(*args, **kwargs))
        if name in self._ALLOCATIONS:
            return self._note(func(*args, **kwargs))
        # In inference mode this mode has to decompose composite ops; some of them copy.
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        if func.is_view:
            return func(*args, **kwargs)
        raise RuntimeError(f"a program calls eecore's ops alone, got {name}")

    def _keep(self, tensor: Tensor, name: str) -> None:
        if tensor.device.type != "cpu":
            raise RuntimeError(f"a tape runs on the CPU, got {name} of a tensor on {tensor.device}")
        self._kept[id(tensor)] = tensor
