"""A model whose engine runs in a process of its own, which is started again when it ends.

The server's process has the tokenizer, the limits and everything that decides whether a request can
be served. Only the engine's process has the weights.
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
from functools import partial

import msgspec
import torch

from eecore.channel import Channel
from eecore.config import AnyModelConfig, EngineConfig, SamplingParams
from eecore.engine.async_engine import AsyncEngine, Prepared
from eecore.engine.callers import Add, Caller, Callers, Cancel, Message, News, Read
from eecore.engine.faults import LOGGER, described
from eecore.engine.intake import Intake
from eecore.engine.text import TextStream
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

# Import eecore from where this process does, whatever the working directory.
PROGRAM = (
    "import sys; end = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
    "from eecore.serving.engine_process import main; main(end)"
)
# Seconds for a process that has been told to end, before it is killed.
ENDING_SECONDS = 1.0
# Seconds between the end of a process and the start of the next.
FIRST_WAIT_S = 1.0
# Seconds up to which the wait doubles with each failure.
LAST_WAIT_S = 30.0
# Seconds after which a process counts as started well.
STEADY_S = 60.0
# Failures in a row after which no further process is started.
MAX_FAILURES = 5
# Seconds for compiling a guide, which takes milliseconds.
GUIDE_S = 60.0


@dataclass(frozen=True)
class _HeadFacts:
    """The facts of the draft head that the server needs."""

    vocabulary_sha256: str


@dataclass(frozen=True, eq=False)
class _Facts:
    """The facts of the model that the server needs."""

    config: AnyModelConfig
    device: torch.device
    source: ModelSource | None
    draft_head: _HeadFacts | None


class RemoteModel:
    """A model for :func:`eecore.serving.settings.service_of`, with its engine in another process.

    Args:
        start: the first message to that process: what to load.

    Raises:
        ModelError: as :func:`eecore.load` raises it.
        EngineLostError: the process ended while it loaded.
    """

    def __init__(self, start: Start) -> None:
        self._engine = engine = RemoteEngine(start)
        self.network, self.tokenizer = engine.facts, engine.tokenizer
        self.config, self.engine_config = engine.facts.config, engine.config

    def async_engine(self, config: EngineConfig | None = None) -> AsyncEngine:
        """The engine as an :class:`~eecore.AsyncEngine`; closing it ends the process.

        Raises:
            RequestError: ``config`` has other limits than the engine was started with.
        """
        if config not in (None, self.engine_config):
            raise RequestError(f"config: expected {self.engine_config}, got {config}")
        return AsyncEngine(self._engine)

    def close(self) -> None:
        """End the process."""
        self._engine.let_go()


class _Process:
    """A running process of an engine."""

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
        """The digests of the classifiers that it has."""
        self.say(ToEngine(start=start))

    def say(self, message: ToEngine) -> None:
        """Send a message; a process that has ended never reads it.

        Raises:
            UnicodeEncodeError: the message has text that UTF-8 cannot express.
        """
        data = encode(message)
        with suppress(OSError):
            self._channel.send_bytes(data)

    def hear(self) -> FromEngine | None:
        """The next message; None when the process has ended."""
        data = self._channel.receive_bytes()
        return None if data is None else decode(data, FromEngine)

    def loaded(self) -> Loaded:
        """Wait until model and engine are loaded.

        Raises:
            EngineLostError: the process has ended.
            Exception: the error that loading the model raised there.
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
        """End the process, if it has not ended; returns how it ended, in words."""
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
    """The engine of another process, and its callers in this one.

    One thread sends what the callers ask for. Another one receives, and starts the next process
    when one has ended: requests that were running then end with an error.
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
            with warnings.catch_warnings():  # the other process has warned
                warnings.simplefilter("ignore")
                self.tokenizer = load_tokenizer(start.path, config.vocab_size)
        except BaseException:
            self._process.end()
            raise
        self._load_s = time.monotonic() - began
        limits, vocabulary = loaded.limits, loaded.vocabulary_sha256
        head = None if vocabulary is None else _HeadFacts(vocabulary)
        self.facts = _Facts(config, torch.device(loaded.device), loaded.source, head)
        # Less memory may be free at the next start: the limits stay.
        options = {**start.options, "kv_cache_tokens": limits.kv_cache_tokens}
        self._start = msgspec.structs.replace(start, options=options)
        self.config, self.has_prefix_cache = limits, loaded.has_prefix_cache
        self.num_layers = config.num_layers
        self._intake = Intake(self.facts, self.tokenizer, limits, self)
        self._take_occupancy(Occupancy())
        self._retry_after = 1
        self._guides = itertools.count()
        self.answers: dict[int, Future[None]] = {}
        """Replies that are waited for, by the numbers of guides."""
        self._closing = threading.Event()
        for work in (self._keep, self._send):
            threading.Thread(target=work, name="eecore", daemon=True).start()

    # For callers, on any thread.

    @property
    def engine(self) -> RemoteEngine:  # type: ignore[override]
        """The engine's state, as :class:`eecore.engine.view.EngineView` has it."""
        return self

    @property
    def has_unfinished(self) -> bool:
        return self.num_unfinished > 0

    @property
    def is_up(self) -> bool:  # type: ignore[override]
        """Whether a process takes requests."""
        return not self._process.is_lost

    def check(self) -> None:
        """Raise an error unless a process takes requests.

        Raises:
            EngineLostError: there is no process just now.
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
        """A request, checked and tokenized here; its guide is compiled in the other process.

        Raises:
            RequestError: for a prompt, setting or length that the engine can never serve.
            EngineLostError: there is no engine just now.
        """
        self.check()
        return self._intake.sequence(prompt, exit, sampling)

    def follow(self, guide: Guide) -> None:
        """The same as :meth:`compile`; the engine keeps track of the guide."""
        self.compile(guide)

    def compile(self, guide: Guide) -> None:
        """Have a guide compiled, and wait until it has been.

        Raises:
            GuideError: it cannot be compiled, or no text can follow it.
            EngineLostError: the process has ended, or does not answer.
        """
        self.check()
        number, answer, process = next(self._guides), Future[None](), self._process
        self.answers[number] = answer
        try:
            self.inbox.put(ToEngine(compile=(number, guide)))
            # after the put: a process that is lost from here on ends the wait
            if not process.is_lost:
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

    # The thread that sends.

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
            # after the put: a process that is lost from here on ends the request
            if process.is_lost:
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

    # The thread that receives.

    def _keep(self) -> None:
        """Receive from the process, and start it again when it ends, until the engine closes."""
        wait = FIRST_WAIT_S
        while True:
            process, since = self._process, time.monotonic()
            try:
                while (message := process.hear()) is not None:
                    self._take(message)
            except Exception:
                LOGGER.exception("a message of the engine's process cannot be read")
            how = process.end()
            if time.monotonic() - since > STEADY_S:
                wait = FIRST_WAIT_S
            self._retry_after = math.ceil(wait + self._load_s)
            self._lose(process, self._lost(how))
            if not self._start_again(how, wait):
                return
            wait = min(2 * wait, LAST_WAIT_S)

    def _take(self, message: FromEngine) -> None:
        """Pass a message on to callers."""
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
            except Exception as error:  # an error of the tokenizer, say: it ends this request only
                LOGGER.error("request %r ends by an error", request.request_id, exc_info=error)
                news.append((key, RuntimeError(f"engine: {described(error)}")))
                self.inbox.put(Cancel(key))
        self.deliver(news)

    def _take_occupancy(self, occupancy: Occupancy) -> None:
        vars(self).update(msgspec.structs.asdict(occupancy))

    def _lose(self, process: _Process, error: Exception) -> None:
        """End the requests of a process that has ended."""
        process.is_lost = True
        self._take_occupancy(Occupancy())
        self.deliver([(key, error) for key in list(self._requests)])
        for answer in list(self.answers.values()):
            with suppress(Exception):  # the reply may have come meanwhile
                answer.set_exception(error)

    def _start_again(self, how: str, wait: float) -> bool:
        """Start another process; False where the engine closes, or where too many starts failed."""
        for _ in range(MAX_FAILURES):
            if not self._closing.is_set():
                LOGGER.error("engine: %s; it is started again in %g s", how, wait)
            if self._closing.wait(wait):
                return False
            wait = min(2 * wait, LAST_WAIT_S)
            try:
                self._starting = _Process(self._start)
                # after the process is in place: a close from here on ends it
                if self._closing.is_set():
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
    """A step with its text; tokens that the other process has not decoded are decoded here."""
    if text is not None:
        return replace(step, piece=lambda: text)
    stream: TextStream | None = request.text
    if stream is None:
        return step
    ids, output = request.output_ids, step.output
    ids += step.token_ids if output is None else output.token_ids[len(ids) :]
    if output is None:
        return replace(step, piece=partial(stream.show_up_to, len(ids)))
    count = len(ids) - (bool(ids) and ids[-1] in request.stop_set)
    decoded = stream.decoded
    decoded = stream.whole(stream.after(decoded, ids[decoded.num_tokens : count]))
    stream.keep(decoded)
    output = replace(output, text=decoded.text)
    return replace(step, output=output, piece=partial(stream.show_up_to, count, final=True))
