"""A model whose engine runs in a process of its own, which is started again when it ends.

Here are its tokenizer, its limits and all that decides whether a request can be served; its weights
are there alone.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import time
import warnings
from dataclasses import dataclass, replace

import torch

from eecore.config import AnyModelConfig, EngineConfig, SamplingParams
from eecore.engine.async_engine import AsyncEngine, Prepared
from eecore.engine.client import Client
from eecore.engine.faults import LOGGER
from eecore.engine.intake import Intake
from eecore.errors import EngineLostError, RequestError
from eecore.exits import Exit
from eecore.guide import Guide
from eecore.models import ModelSource, load_tokenizer
from eecore.output import StepOutput
from eecore.serving.connection import Connection
from eecore.serving.wire import Start

__all__ = ["RemoteModel", "Start"]

# Between the end of a process and the start of the next: doubled each time, up to the last.
FIRST_WAIT_S, LAST_WAIT_S = 1.0, 30.0
# An engine that was there for so long has shown that it can be.
STEADY_S = 60.0
# Starts in a row that may fail before there is no other one.
MOST_FAILURES = 5
# For a guide to be compiled, which takes milliseconds.
GUIDE_S = 60.0


@dataclass(frozen=True)
class _HeadFacts:
    """What is known here of its draft head."""

    vocabulary_sha256: str


@dataclass(frozen=True, eq=False)
class _Facts:
    """What is known here of a model."""

    config: AnyModelConfig
    device: torch.device
    source: ModelSource | None
    draft_head: _HeadFacts | None


class RemoteModel:
    """A model for :func:`eecore.serving.settings.service_of`.

    Args:
        start: what the process is to load.

    Raises:
        ModelError: as :func:`eecore.load` raises it.
        EngineLostError: the process ended while it loaded.
    """

    def __init__(self, start: Start) -> None:
        self._engine = engine = RemoteEngine(start)
        self.network, self.tokenizer = engine.facts, engine.tokenizer
        self.config, self.engine_config = engine.facts.config, engine.engine.config

    def async_engine(self, config: EngineConfig | None = None) -> AsyncEngine:
        """Streams of its engine; to close it ends the process.

        Raises:
            RequestError: for other limits than those it was started with.
        """
        if config not in (None, self.engine_config):
            raise RequestError(f"config: expected {self.engine_config}, got {config}")
        return AsyncEngine(self._engine)

    def close(self) -> None:
        """End the process."""
        self._engine.let_go()


class RemoteEngine:
    """The engine of a process, as :class:`eecore.engine.sharing.Sharing` has it.

    A thread of its own hears what the process says, and starts another one when it has ended: the
    requests that it had end by an error then.
    """

    def __init__(self, start: Start) -> None:
        began = time.monotonic()
        self._connection = self._starting = Connection(start)
        try:
            loaded = self._connection.loaded()
            with warnings.catch_warnings():  # the process has said so
                warnings.simplefilter("ignore")
                self.tokenizer = load_tokenizer(start.path, loaded.model.vocab_size)
        except BaseException:
            self._connection.end()
            raise
        self._load_s = time.monotonic() - began
        limits, vocabulary = loaded.limits, loaded.vocabulary_sha256
        head = None if vocabulary is None else _HeadFacts(vocabulary)
        self.facts = _Facts(loaded.model, torch.device(loaded.device), loaded.source, head)
        # What is free then may be less: the limits stay.
        options = {**start.options, "kv_cache_tokens": limits.kv_cache_tokens}
        self._start = replace(start, options=options)
        self.engine = RemoteView(self, limits, loaded.has_prefix_cache)
        self.num_restarts = 0
        self.failure: Exception | None = None
        self._retry_after = 1
        self._numbers = itertools.count()
        self._closing = threading.Event()
        threading.Thread(target=self._keep, name="eecore", daemon=True).start()

    # For callers, on any thread

    @property
    def is_up(self) -> bool:
        """Whether there is a process that takes requests."""
        return not self._connection.is_lost

    @property
    def connection(self) -> Connection:
        """To the process.

        Raises:
            EngineLostError: there is none just now.
        """
        if not self.is_up:
            raise self._lost("its process has ended")
        return self._connection

    def open(self, client: Client, name: str | None = None) -> None:
        """Queue a client's request, of which there is one.

        Raises:
            RequestError: the name is in use.
            EngineLostError: there is no engine just now.
        """
        (request,) = client.requests
        connection = self.connection
        names = (f"request-{number}" for number in self._numbers) if name is None else (name,)
        for claimed in names:
            if connection.clients.setdefault(claimed, client) is client:
                break
            if name is not None:
                raise RequestError(f"request_id: {name!r} is in use")
        request.request_id = claimed
        client.unfinished = {claimed: None}
        connection.add(claimed, client, request)
        if connection.is_lost:  # behind the above: who is lost now ends it too
            connection.leave(claimed, self._lost("its process has ended"))

    def take(self, client: Client) -> StepOutput | None:
        """The next step if it is there.

        Raises:
            Exception: whatever ended the request without an output.
        """
        try:
            item = client.mail.get_nowait()
        except queue.Empty:
            return None
        if client.held and client.is_low:
            self._connection.resume(client)
        if isinstance(item, Exception):
            raise item
        return item

    def close(self, client: Client) -> None:
        """Cancel what is unfinished; waits for nothing."""
        self._connection.cancel(client)

    def reset_prefix_cache(self) -> None:
        """Forget what pages hold that no unfinished request has."""
        self._connection.say("reset_prefix_cache")

    def let_go(self) -> None:
        """End the process, and start no other one."""
        self._closing.set()
        for connection in (self._starting, self._connection):
            connection.end()

    def _lost(self, how: str) -> EngineLostError:
        words = f"engine: expected it to answer, but {how}; it is being started again"
        return EngineLostError(words, self._retry_after)

    # The thread that hears it

    def _keep(self) -> None:
        """Hear it, and start it again, until nobody needs it."""
        wait = FIRST_WAIT_S
        while True:
            connection, since = self._connection, time.monotonic()
            try:
                connection.listen()
            except Exception:
                LOGGER.exception("what the engine's process says cannot be understood")
            how = connection.end()
            if time.monotonic() - since > STEADY_S:
                wait = FIRST_WAIT_S
            self._retry_after = math.ceil(wait + self._load_s)
            connection.lose(self._lost(how))
            if not self._start_again(how, wait):
                return
            wait = min(2 * wait, LAST_WAIT_S)

    def _start_again(self, how: str, wait: float) -> bool:
        """Another process; False: nobody needs it any more, or it cannot be."""
        for _ in range(MOST_FAILURES):
            if not self._closing.is_set():
                LOGGER.error("engine: %s; it is started again in %g s", how, wait)
            if self._closing.wait(wait):
                return False
            wait = min(2 * wait, LAST_WAIT_S)
            try:
                self._starting = Connection(self._start)
                if self._closing.is_set():  # behind the above: who closes now ends it
                    raise EngineLostError("engine: expected an open one, got one that closes")
                self._starting.loaded()
            except Exception as error:
                how = f"{type(error).__name__}: {error}"
                self._starting.end()
                continue
            self._connection = self._starting
            self.num_restarts += 1
            return True
        self.failure = EngineLostError(
            f"engine: expected it to start again, got {MOST_FAILURES} failures, the last by {how}"
        )
        return False


class RemoteView:
    """What can be seen of an engine from here, as :class:`eecore.engine.sharing.EngineView` has it.

    Args:
        remote: the engine.
        limits: that it was started with.
        has_prefix_cache: whether it shares pages.
    """

    def __init__(self, remote: RemoteEngine, limits: EngineConfig, has_prefix_cache: bool) -> None:
        self._remote, self.config, self.has_prefix_cache = remote, limits, has_prefix_cache
        self.num_layers = remote.facts.config.num_layers
        guides = RemoteGuides(remote)
        self._intake = Intake(remote.facts, remote.tokenizer, limits, guides)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._remote._connection.clients)

    @property
    def num_running(self) -> int:
        return self._remote._connection.occupancy.num_running

    @property
    def num_waiting(self) -> int:
        return self._remote._connection.occupancy.num_waiting

    @property
    def num_held(self) -> int:
        return self._remote._connection.occupancy.num_held

    @property
    def num_used_pages(self) -> int:
        return self._remote._connection.occupancy.num_used_pages

    @property
    def num_cached_pages(self) -> int:
        return self._remote._connection.occupancy.num_cached_pages

    @property
    def num_failed_iterations(self) -> int:
        return self._remote._connection.occupancy.num_failed_iterations

    def prepare(
        self,
        prompt: str | list[int],
        *,
        exit: Exit | str | None = None,
        sampling: SamplingParams | None = None,
    ) -> Prepared:
        """A request, checked and tokenized here; what it follows is compiled there.

        Raises:
            RequestError: for a prompt, setting or length that the engine can never serve.
            EngineLostError: there is no engine just now.
        """
        _ = self._remote.connection
        return self._intake.sequence(prompt, exit, sampling)

    def compile(self, guide: Guide) -> None:
        """Have a guide compiled before a request that follows it.

        Raises:
            GuideError: it cannot be, or nothing can follow it.
            EngineLostError: there is no engine just now.
        """
        self._intake.guides.follow(guide)


class RemoteGuides:
    """Guides, compiled where they are followed."""

    def __init__(self, remote: RemoteEngine) -> None:
        self._remote = remote
        self._numbers = itertools.count()

    def follow(self, guide: Guide) -> None:
        """Have it compiled.

        Raises:
            GuideError: it cannot be, or nothing can follow it.
            EngineLostError: there is no engine just now.
        """
        self._remote.connection.compile(next(self._numbers), guide, GUIDE_S)
