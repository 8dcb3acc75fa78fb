"""A model whose engine runs in a process of its own, which is started again when it ends.

Here are its tokenizer, its limits and all that decides whether a request can be served; its weights
are there alone.
"""

from __future__ import annotations

import itertools
import math
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec
import torch

from eecore.channel import Channel
from eecore.config import AnyModelConfig, EngineConfig, SamplingParams
from eecore.engine.async_engine import AsyncEngine, Prepared
from eecore.engine.callers import Add, Caller, Callers, Cancel, Message, News, Read
from eecore.engine.faults import LOGGER, described
from eecore.engine.intake import Intake
from eecore.engine.text import Piece, TextStream
from eecore.engine.worker import LOOK_S
from eecore.errors import EngineLostError, RequestError
from eecore.exits import Exit
from eecore.guide import Guide
from eecore.models import ModelSource, load_tokenizer
from eecore.output import StepOutput
from eecore.serving.wire import (
    FromEngine,
    Loaded,
    Occupancy,
    Request,
    Start,
    ToEngine,
    decode,
    encode,
    error_of,
    plain_classifier,
    plain_exit,
)

__all__ = ["RemoteModel", "Start"]

# Looks where this process does, not where it happens to be.
PROGRAM = (
    "import sys; end = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
    "from eecore.serving.engine_process import main; main(end)"
)
# For a process that has been told to end, before it is killed.
ENDING_SECONDS = 1.0
# Between the end of a process and the start of the next.
FIRST_WAIT_S = 1.0
# The wait is doubled each time, up to this.
LAST_WAIT_S = 30.0
# An engine that was there for so long has shown that it can be.
STEADY_S = 60.0
# Starts in a row that may fail before there is no other one.
MAX_FAILURES = 5
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
        self.config, self.engine_config = engine.facts.config, engine.config

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


class _Process:
    """A process that has been started.

    Args:
        start: what it is to do.
    """

    def __init__(self, start: Start) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._channel = Channel(ours)
        self.is_lost = False
        self.classifiers: set[str] = set()
        """The digests of those that it has."""
        self.say(ToEngine(start=start))

    def say(self, message: ToEngine) -> None:
        """Send a message; it is lost where the process is.

        Raises:
            UnicodeEncodeError: it has text that UTF-8 cannot say.
        """
        data = encode(message)
        with suppress(OSError):
            self._channel.send_bytes(data)

    def hear(self) -> FromEngine | None:
        """The next message; None when the process has ended."""
        data = self._channel.receive_bytes()
        return None if data is None else decode(data, FromEngine)

    def loaded(self) -> Loaded:
        """Wait until model and engine are there.

        Raises:
            EngineLostError: the process has ended.
            Exception: what kept it from loading the model.
        """
        while (message := self.hear()) is not None:
            if message.failed is not None:
                raise error_of(message.failed)
            if message.loaded is not None:
                return message.loaded
            if message.warning is not None:
                warnings.warn(message.warning, stacklevel=2)
        raise EngineLostError(f"engine: expected it to load the model, but {self.end()}")

    def end(self) -> str:
        """End the process, if it has not; how it ended, in words."""
        self._channel.close()
        try:
            code = self.process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended, with exit code {code}"


class RemoteEngine(Callers):
    """The engine of a process, as far as it can be seen from here, and its callers in this one.

    A thread tells the process what callers ask for. Another one hears it, and starts the next
    process when it has ended: the requests that it had end by an error then.
    """

    num_running: int
    num_waiting: int
    num_held: int
    num_used_pages: int
    num_cached_pages: int
    num_failed_iterations: int

    def __init__(self, start: Start) -> None:
        super().__init__()
        began = time.monotonic()
        self._process = self._starting = _Process(start)
        try:
            loaded = self._process.loaded()
            config = loaded.model or loaded.encoder_model
            assert config is not None
            with warnings.catch_warnings():  # the process has said so
                warnings.simplefilter("ignore")
                self.tokenizer = load_tokenizer(start.path, config.vocab_size)
        except BaseException:
            self._process.end()
            raise
        self._load_s = time.monotonic() - began
        limits, vocabulary = loaded.limits, loaded.vocabulary_sha256
        head = None if vocabulary is None else _HeadFacts(vocabulary)
        self.facts = _Facts(config, torch.device(loaded.device), loaded.source, head)
        # What is free then may be less: the limits stay.
        options = {**start.options, "kv_cache_tokens": limits.kv_cache_tokens}
        self._start = msgspec.structs.replace(start, options=options)
        self.config, self.has_prefix_cache = limits, loaded.has_prefix_cache
        self.num_layers = config.num_layers
        self._intake = Intake(self.facts, self.tokenizer, limits, self)
        self._take_occupancy(Occupancy())
        self._retry_after = 1
        self._guides = itertools.count()
        self.answers: dict[int, Future[None]] = {}
        """What is waited for, by the numbers of guides."""
        self._closing = threading.Event()
        for work in (self._keep, self._send):
            threading.Thread(target=work, name="eecore", daemon=True).start()

    # For callers, on any thread

    @property
    def engine(self) -> RemoteEngine:  # type: ignore[override]
        """What :class:`eecore.engine.view.EngineView` says of an engine."""
        return self

    @property
    def has_unfinished(self) -> bool:
        return self.num_unfinished > 0

    @property
    def is_up(self) -> bool:  # type: ignore[override]
        """Whether there is a process that takes requests."""
        return not self._process.is_lost

    def check(self) -> None:
        """See to it that there is a process.

        Raises:
            EngineLostError: there is none just now.
        """
        if not self.is_up:
            raise self._lost("its process has ended")

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
        self.check()
        return self._intake.sequence(prompt, exit, sampling)

    def follow(self, guide: Guide) -> None:
        """As :meth:`compile`; the engine has the way through it."""
        self.compile(guide)

    def compile(self, guide: Guide) -> None:
        """Have a guide compiled, and wait until it has been.

        Raises:
            GuideError: it cannot be, or nothing can follow it.
            EngineLostError: the process has ended, or does not answer.
        """
        self.check()
        number, answer, process = next(self._guides), Future[None](), self._process
        self.answers[number] = answer
        try:
            self.inbox.put(ToEngine(compile=(number, guide)))
            if not process.is_lost:  # after the above: what is lost now ends what is waited for
                wait([answer], GUIDE_S)
            if not answer.done():
                raise EngineLostError("engine: expected it to compile a guide, got no answer")
            answer.result()
        finally:
            self.answers.pop(number, None)

    def let_go(self) -> None:
        """End the process, and start no other one."""
        self._closing.set()
        self.inbox.put(None)
        for process in (self._starting, self._process):
            process.end()

    def _lost(self, how: str) -> EngineLostError:
        words = f"engine: expected it to answer, but {how}; it is being started again"
        return EngineLostError(words, self._retry_after)

    # The thread that tells it

    def _send(self) -> None:
        looked_at = time.monotonic()
        while not self._closing.is_set():
            item: Message | Caller | ToEngine | None = None
            with suppress(queue.Empty):
                item = self.inbox.get(timeout=LOOK_S if self._names else None)
            if isinstance(item, ToEngine):
                self._process.say(item)
            elif item is not None:
                for message in self.messages(item):
                    self._tell(message)
            if time.monotonic() > looked_at + LOOK_S:
                looked_at = time.monotonic()
                self.look_for_gone()

    def _tell(self, message: Message) -> None:
        process = self._process
        if isinstance(message, Add):
            try:
                self._add(process, *message)
            except Exception as error:
                self.deliver([(message.key, error)])
            if process.is_lost:  # after the above: what is lost now has ended it
                self.deliver([(message.key, self._lost("its process has ended"))])
        elif isinstance(message, Cancel):
            process.say(ToEngine(cancel=message.key))
        elif isinstance(message, Read):
            process.say(ToEngine(read=(message.key, message.num_steps)))
        else:
            process.say(ToEngine(resets_cache=True))

    def _add(self, process: _Process, key: int, request: Prepared, whole: bool) -> None:
        classifier = getattr(request.exit, "classifier", None)
        if classifier is not None and classifier.sha256 not in process.classifiers:
            tensors = plain_classifier(classifier)
            process.say(ToEngine(classifier=(classifier.sha256, tensors)))
            process.classifiers.add(classifier.sha256)
        plain = Request(
            key,
            request.request_id,
            request.prompt_ids,
            request.input_ids,
            plain_exit(request.exit),
            request.sampling,
            dict(request.text.special_texts) if request.text is not None else {},
            whole,
        )
        process.say(ToEngine(add=plain))

    # The thread that hears it

    def _keep(self) -> None:
        """Hear it, and start it again, until there is no need for it."""
        wait = FIRST_WAIT_S
        while True:
            process, since = self._process, time.monotonic()
            try:
                while (message := process.hear()) is not None:
                    self._take(message)
            except Exception:
                LOGGER.exception("what the engine's process says cannot be understood")
            how = process.end()
            if time.monotonic() - since > STEADY_S:
                wait = FIRST_WAIT_S
            self._retry_after = math.ceil(wait + self._load_s)
            self._lose(process, self._lost(how))
            if not self._start_again(how, wait):
                return
            wait = min(2 * wait, LAST_WAIT_S)

    def _take(self, message: FromEngine) -> None:
        """Pass on what the process says."""
        if message.warning is not None:
            warnings.warn(message.warning, stacklevel=2)
        if message.occupancy is not None:
            self._take_occupancy(message.occupancy)
        if message.compiled is not None:
            number, error = message.compiled
            answer = self.answers.get(number)
            if answer is not None and error is None:
                answer.set_result(None)
            elif answer is not None and error is not None:
                answer.set_exception(error_of(error))
        news: list[News] = [(key, error_of(error)) for key, error in message.ended]
        for key, step, text in message.steps:
            _, request = self._requests.get(key, (None, None))
            if request is None:
                continue
            try:
                news.append((key, _with_text(request, step, text)))
            except Exception as error:  # of its tokenizer, say: it harms no other request
                LOGGER.error("request %r ends by an error", request.request_id, exc_info=error)
                news.append((key, RuntimeError(f"engine: {described(error)}")))
                self.inbox.put(Cancel(key))
        self.deliver(news)

    def _take_occupancy(self, occupancy: Occupancy) -> None:
        vars(self).update(msgspec.structs.asdict(occupancy))

    def _lose(self, process: _Process, error: Exception) -> None:
        """The process is gone, and so are its requests."""
        process.is_lost = True
        self._take_occupancy(Occupancy())
        self.deliver([(key, error) for key in list(self._requests)])
        for answer in list(self.answers.values()):
            with suppress(Exception):  # it has been given meanwhile
                answer.set_exception(error)

    def _start_again(self, how: str, wait: float) -> bool:
        """Another process; False: there is no need for it any more, or it cannot be."""
        for _ in range(MAX_FAILURES):
            if not self._closing.is_set():
                LOGGER.error("engine: %s; it is started again in %g s", how, wait)
            if self._closing.wait(wait):
                return False
            wait = min(2 * wait, LAST_WAIT_S)
            try:
                self._starting = _Process(self._start)
                if self._closing.is_set():  # after the above: who closes now ends it
                    raise EngineLostError("engine: expected an open one, got one that closes")
                self._starting.loaded()
            except Exception as error:
                how = f"{type(error).__name__}: {error}"
                self._starting.end()
                continue
            self._process = self._starting
            self.num_restarts += 1
            return True
        self.failure = EngineLostError(
            f"engine: expected it to start again, got {MAX_FAILURES} failures, the last by {how}"
        )
        return False


def _with_text(request: Prepared, step: StepOutput, text: str | None) -> StepOutput:
    """A step with its text; what the process has not decoded is decoded here."""
    if text is not None:
        return replace(step, piece=lambda: text)
    stream: TextStream | None = request.text
    if stream is None:
        return step
    ids, output = request.output_ids, step.output
    ids += step.token_ids if output is None else output.token_ids[len(ids) :]
    if output is None:
        return replace(step, piece=Piece(stream, len(ids), final=False))
    count = len(ids) - (bool(ids) and ids[-1] in request.stop_set)
    decoded = stream.decoded
    decoded = stream.whole(stream.after(decoded, ids[decoded.num_tokens : count]))
    stream.keep(decoded)
    output = replace(output, text=decoded.text)
    return replace(step, output=output, piece=Piece(stream, count, final=True))
