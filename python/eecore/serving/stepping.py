"""The engine's process: it loads a model, steps its engine, and sends the server what each step
added.

One thread turns the server's messages into requests while the other one steps. The results of a
step are one message.
"""

from __future__ import annotations

import os
import queue
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import eecore
from eecore.config import T5Config
from eecore.engine.callers import Add, Cancel, Message, News, Read, Reset
from eecore.engine.engine import Engine
from eecore.engine.intake import ASKED
from eecore.engine.worker import Stepper
from eecore.exits import ExitClassifier
from eecore.guide import Guide
from eecore.serving.engine_process import Listener
from eecore.serving.wire import (
    FromEngine,
    Loaded,
    Occupancy,
    Request,
    Start,
    ToEngine,
    classifier_of,
    decode,
    encode,
    exit_of,
    plain_error,
    plain_step,
)

# Seconds between reports of how full the engine is while no request comes or goes.
SAYS_SECONDS = 0.1
# Threads that wait for guides to be compiled; a guide that is known needs none.
COMPILING = 64


def run_engine(listener: Listener) -> None:
    """Run until the server has gone, or the model cannot be loaded.

    Args:
        listener: passes on the server's messages, first a :class:`Start`.
    """

    def say(message: FromEngine) -> None:
        listener.channel.send_bytes(encode(message))

    def pass_on(message: Warning | str, *_where: Any, **_more: Any) -> None:
        with suppress(OSError):
            say(FromEngine(warning=str(message)))

    warnings.showwarning = pass_on
    try:
        engine = _load(decode(listener.heard.get(), ToEngine).start)
    except BaseException as error:
        say(FromEngine(failed=plain_error(error)))
        return
    network = engine.network
    ASKED.add(network)  # the server's process, which outlives this one, asks the user itself
    config, head = network.config, network.draft_head
    loaded = Loaded(
        model=None if isinstance(config, T5Config) else config,
        encoder_model=config if isinstance(config, T5Config) else None,
        device=str(network.device),
        source=network.source,
        vocabulary_sha256=None if head is None else head.vocabulary_sha256,
        limits=engine.config,
        has_prefix_cache=engine.has_prefix_cache,
    )
    requests = _Requests(engine, say)
    listener.does = requests.take
    say(FromEngine(loaded=loaded))
    with suppress(OSError):
        _step(Stepper(engine), requests.inbox, say)


def _load(start: Start) -> Engine:
    if start.threads is not None:
        torch.set_num_threads(start.threads)
    options: dict[str, Any] = {
        name: Path(os.fsdecode(value)) if isinstance(value, bytes) else value
        for name, value in start.options.items()
    }
    model = eecore.load(start.path, **options)
    limits = model.engine_config
    if start.max_num_seqs is not None:
        limits = replace(limits, max_num_seqs=start.max_num_seqs)
    return model.engine(limits)


class _Requests:
    """Turns the server's messages into requests of the engine."""

    def __init__(self, engine: Engine, say: Any) -> None:
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._engine, self._say = engine, say
        self._classifiers: dict[str, ExitClassifier] = {}
        self._compiling = ThreadPoolExecutor(COMPILING)

    def take(self, data: bytes) -> None:
        """Carry out a message; guides are compiled in other threads."""
        message: ToEngine = decode(data, ToEngine)
        if message.add is not None:
            self._add(message.add)
        elif message.cancel is not None:
            self.inbox.put(Cancel(message.cancel))
        elif message.read is not None:
            self.inbox.put(Read(*message.read))
        elif message.compile is not None:
            number, guide = message.compile
            if self._engine.is_compiled(guide):
                self._compile(number, guide)
            else:
                self._compiling.submit(self._compile, number, guide)
        elif message.classifier is not None:
            digest, tensors = message.classifier
            self._classifiers[digest] = classifier_of(tensors)
        elif message.resets_cache:
            self.inbox.put(Reset())

    def _add(self, request: Request) -> None:
        try:
            policy = exit_of(request.exit, self._classifiers)
            ids = request.prompt_ids, request.input_ids
            sequence = self._engine.intake.trusted(*ids, policy, request.sampling)
            sequence.request_id = request.name
            if sequence.text is not None and sequence.text.watches:
                sequence.text.show(request.special_texts)
            else:  # nothing here depends on the guide
                sequence.text = None
            self.inbox.put(Add(request.key, sequence, request.whole))
        except Exception as error:
            with suppress(OSError):
                self._say(FromEngine(ended=[(request.key, plain_error(error))]))

    def _compile(self, number: int, guide: Guide) -> None:
        error = None
        try:
            self._engine.compile(guide)
        except Exception as its:
            error = plain_error(its)
        with suppress(OSError):
            self._say(FromEngine(compiled=(number, error)))


def _step(stepper: Stepper, inbox: queue.SimpleQueue[Message], say: Any) -> None:
    """Step the engine and send what each step added, until the server has gone."""
    said_at, is_news = 0.0, True
    while True:
        if not stepper.can_step and not is_news:
            stepper.do(inbox.get())
            is_news = True
        while not inbox.empty():
            stepper.do(inbox.get())
            is_news = True
        message = _message(stepper.step() if stepper.can_step else [])
        now = time.monotonic()
        if not stepper.can_step or any(step.output is not None for _, step, _ in message.steps):
            is_news = True
        if is_news or (message.steps and now > said_at + SAYS_SECONDS):
            names = Occupancy.__struct_fields__
            message.occupancy = Occupancy(*(getattr(stepper.engine, name) for name in names))
            said_at, is_news = now, False
        if message.steps or message.ended or message.occupancy is not None:
            say(message)


def _message(news: list[News]) -> FromEngine:
    """The message about a step."""
    message = FromEngine(steps=[], ended=[])
    for key, item in news:
        if isinstance(item, Exception):
            message.ended.append((key, plain_error(item)))
        else:
            message.steps.append(plain_step(key, item))
    return message
