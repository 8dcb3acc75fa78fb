"""What the process of an engine does: loads a model, steps its engine, says what came of it.

The thread that hears the server makes requests of what it says while another one steps; what came
of a step is one message.
"""

from __future__ import annotations

import queue
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import torch

import eecore
from eecore.channel import Channel, Message
from eecore.engine.async_engine import Prepared
from eecore.engine.engine import Engine
from eecore.engine.intake import ASKED
from eecore.output import StepOutput
from eecore.serving.ear import Ear
from eecore.serving.wire import Loaded, Occupancy, Start, Wire, plain_error

__all__ = ["run_engine"]

# How often it says how full the engine is while nobody comes or goes.
SAYS_SECONDS = 0.1
# Threads that wait for guides to be compiled; who asks for one that is known does not need one.
COMPILING = 64


def run_engine(ear: Ear) -> None:
    """Run until the server has gone, or the model cannot be loaded.

    Args:
        ear: hears what the server says, first a :class:`Start`.
    """
    wire, channel = Wire(), ear.channel

    def pass_on(message: Warning | str, *_where: Any, **_more: Any) -> None:
        with suppress(OSError):
            channel.send(("warning", str(message)))

    warnings.showwarning = pass_on
    try:
        model, engine = _load(wire.value(ear.heard.get()[1]))
    except BaseException as error:
        channel.send(("failed", *plain_error(error)))
        return
    network = model.network
    ASKED.add(network)  # the server itself asks, which outlives this process
    head = network.draft_head
    loaded = Loaded(
        model=network.config,
        device=str(network.device),
        source=network.source,
        vocabulary_sha256=None if head is None else head.vocabulary_sha256,
        limits=engine.config,
        has_prefix_cache=engine.has_prefix_cache,
    )
    stepping = _Stepping(engine, wire, channel)
    ear.does = _Listening(engine, wire, channel, stepping.inbox).do
    channel.send(("loaded", wire.plain(loaded)))
    stepping.run()


def _load(start: Start) -> tuple[eecore.Model, Engine]:
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    model = eecore.load(start.path, **start.options)
    limits = model.engine_config
    if start.max_num_seqs is not None:
        limits = replace(limits, max_num_seqs=start.max_num_seqs)
    return model, model.engine(limits)


class _Listening:
    """Makes requests of what the server says, beside the steps.

    Args:
        engine: prepares them.
        wire: of the channel.
        channel: to the server.
        inbox: of who steps.
    """

    def __init__(
        self, engine: Engine, wire: Wire, channel: Channel, inbox: queue.SimpleQueue[Message]
    ) -> None:
        self._engine, self._wire, self._channel, self._inbox = engine, wire, channel, inbox
        self._compiling = ThreadPoolExecutor(COMPILING)

    def do(self, message: Message) -> None:
        """As is said; guides beside all else."""
        what, *values = message
        if what == "add":
            self._add(*values)
        elif what == "guide":
            number, guide = values[0], self._wire.value(values[1])
            if self._engine.is_compiled(guide):
                self._compile(number, guide)
            else:
                self._compiling.submit(self._compile, number, guide)
        elif what == "classifier":
            self._wire.keep(*values)
        else:
            self._inbox.put(message)

    def _add(
        self,
        name: str,
        prompt: list[int],
        exit: Any,
        sampling: Any,
        special_texts: dict[int, str],
        whole: bool,
    ) -> None:
        try:
            policy, params = self._wire.value(exit), self._wire.value(sampling)
            request = self._engine.prepare(prompt, exit=policy, sampling=params)
            if request.text is not None and request.text.watches:
                request.text.show(special_texts)
            else:  # nothing here depends on it
                request.text = None
            self._inbox.put(("add", name, request, whole))
        except Exception as error:
            self._inbox.put(("refuse", name, error))

    def _compile(self, number: int, guide: Any) -> None:
        error = None
        try:
            self._engine.compile(guide)
        except Exception as its:
            error = plain_error(its)
        with suppress(OSError):
            self._channel.send(("compiled", number, error))


class _Stepping:
    """Steps the engine, and says what came of it.

    Args:
        engine: whom nobody else steps.
        wire: of the channel.
        channel: to the server.
    """

    def __init__(self, engine: Engine, wire: Wire, channel: Channel) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._engine, self._wire, self._channel = engine, wire, channel
        self._does: dict[str, Callable[..., None]] = {
            "add": self._add,
            "refuse": self._leave,
            "cancel": self._cancel,
            "hold": engine.hold,
            "resume": engine.resume,
            "reset_prefix_cache": engine.reset_prefix_cache,
        }
        self._whole: set[str] = set()
        """Requests of which the server wants the output alone."""
        self._left: list[tuple[str, Any]] = []
        """Those that ended without an output, each with the error that it was."""
        self._is_changed = True
        """Whether somebody has come or gone since it was said how full the engine is."""
        self._said_at = 0.0

    def run(self) -> None:
        """Until the server has gone."""
        with suppress(OSError):
            while True:
                if not self._engine.has_runnable:
                    self._say([])
                    self._do(*self.inbox.get())
                with suppress(queue.Empty):
                    while True:
                        self._do(*self.inbox.get_nowait())
                self._say(self._step() if self._engine.has_runnable else [])

    def _do(self, what: str, *values: Any) -> None:
        self._does[what](*values)
        self._is_changed = True

    def _add(self, name: str, request: Prepared, whole: bool) -> None:
        try:
            self._engine.enqueue(request, name)
        except Exception as error:
            self._leave(name, error)
        else:
            if whole:
                self._whole.add(name)

    def _cancel(self, name: str) -> None:
        self._engine.cancel(name)
        self._leave(name)

    def _leave(self, name: str, error: Exception | None = None) -> None:
        self._whole.discard(name)
        self._left.append((name, None if error is None else plain_error(error)))

    def _step(self) -> list[StepOutput]:
        """One step for everybody; an error of it ends all requests."""
        try:
            return self._engine.step()
        except Exception as error:
            for name in self._engine.requests:
                self._engine.cancel(name)
                self._leave(name, error)
            self._is_changed = True
            return []

    def _say(self, steps: list[StepOutput]) -> None:
        """What came of a step, and how full the engine is, where that may be news."""
        rows = []
        for step in steps:
            if step.finished:
                self._is_changed = True
            elif step.request_id in self._whole:
                continue
            self._whole.discard(step.request_id)
            text = None if step.piece is None else step.text
            rows.append((self._wire.plain_step(step), text))
        now, occupancy = time.monotonic(), None
        if self._is_changed or (steps and now > self._said_at + SAYS_SECONDS):
            numbers = {f.name: getattr(self._engine, f.name) for f in fields(Occupancy)}
            occupancy = self._wire.plain(Occupancy(**numbers))
            self._said_at = now
        if rows or self._left or occupancy is not None:
            self._channel.send(("steps", rows, self._left, occupancy))
            self._left, self._is_changed = [], False
