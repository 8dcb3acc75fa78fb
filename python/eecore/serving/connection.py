"""A process with an engine, from the server's side: its requests, and what it says of them."""

from __future__ import annotations

import queue
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

from eecore.channel import Channel, Message
from eecore.engine.async_engine import Prepared
from eecore.engine.client import Client
from eecore.engine.faults import LOGGER, described
from eecore.engine.text import TextStream
from eecore.errors import EngineLostError
from eecore.output import StepOutput
from eecore.serving.wire import (
    STEP_FIELDS,
    Loaded,
    Occupancy,
    Start,
    Wire,
    error_of,
    plain_classifier,
)

__all__ = ["Connection"]

# Looks where this process does, not where it happens to be.
PROGRAM = (
    "import sys; end = int(sys.argv[1]); sys.path[:] = sys.argv[2:]; "
    "from eecore.serving.engine_process import main; main(end)"
)
# For a process that has been told to end, before it is killed.
ENDING_SECONDS = 1.0


class Connection:
    """A process that has been started, and the requests that it has.

    Any thread may ask for something; one listens.

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
        self._wire = Wire()
        self._said: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        threading.Thread(target=self._send, name="eecore", daemon=True).start()
        self.clients: dict[str, Client] = {}
        """Those whose requests the process has, or is about to have, by name."""
        self.answers: dict[int, Future[Any]] = {}
        """What is waited for, by number."""
        self.occupancy = Occupancy()
        self.is_lost = False
        self._does: dict[str, Callable[..., None]] = {
            "steps": self._take_steps,
            "compiled": self._take_compiled,
            "warning": warnings.warn,
        }
        self.say("start", self._wire.plain(start))

    # For whoever has requests, in any thread

    def say(self, what: str, *values: Any) -> None:
        """Have the process do something. It waits for nothing, in a finaliser neither."""
        self._said.put((what, *values))

    def add(self, name: str, client: Client, request: Prepared) -> None:
        """Have it serve a request."""
        classifier = getattr(request.exit, "classifier", None)
        if classifier is not None and classifier.sha256 not in self._wire.classifiers:
            self.say("classifier", classifier.sha256, plain_classifier(classifier))
            self._wire.classifiers[classifier.sha256] = classifier  # behind: others rely on it
        plain = self._wire.plain
        texts = dict(request.text.special_texts) if request.text is not None else {}
        exit, sampling = plain(request.exit), plain(request.sampling)
        self.say("add", name, request.given_ids, exit, sampling, texts, client.whole)

    def compile(self, number: int, guide: Any, seconds: float) -> None:
        """Have it compile a guide, and wait until it has.

        Raises:
            GuideError: it cannot be compiled, or nothing can follow it.
            EngineLostError: the process has ended, or does not answer.
        """
        answer = self.answers[number] = Future()
        try:
            self.say("guide", number, self._wire.plain(guide))
            if not self.is_lost:  # behind the above: who is lost now ends what is waited for
                wait([answer], seconds)
            if not answer.done():
                raise EngineLostError("engine: expected it to compile a guide, got no answer")
            answer.result()
        finally:
            self.answers.pop(number, None)

    # For the one that listens

    def loaded(self) -> Loaded:
        """Wait until model and engine are there.

        Raises:
            EngineLostError: the process has ended.
            Exception: what kept it from loading the model.
        """
        while (message := self._channel.receive()) is not None:
            what, *values = message
            if what == "failed":
                raise error_of(*values)
            if what == "loaded":
                loaded: Loaded = self._wire.value(values[0])
                return loaded
            self._does[what](*values)
        raise EngineLostError(f"engine: expected it to load the model, but {self.end()}")

    def listen(self) -> None:
        """Pass on what comes of requests, until the process has ended."""
        while (message := self._channel.receive()) is not None:
            what, *values = message
            self._does[what](*values)

    def lose(self, error: Exception) -> None:
        """The process is gone, and so are its requests."""
        self.is_lost = True
        self.occupancy = Occupancy()
        for name in list(self.clients):
            self.leave(name, error)
        for answer in list(self.answers.values()):
            with suppress(Exception):  # it has been given meanwhile
                answer.set_exception(error)

    def end(self) -> str:
        """End the process, if it has not; how it ended, in words."""
        self._channel.close()
        self._said.put(None)
        try:
            code = self.process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        if code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended, with exit code {code}"

    def _send(self) -> None:
        with suppress(OSError):
            while (message := self._said.get()) is not None:
                self._channel.send(message)

    def _take_steps(self, rows: list[Any], left: list[Any], occupancy: Any) -> None:
        if occupancy is not None:
            self.occupancy = self._wire.value(occupancy)
        rung: dict[Client, None] = {}
        for values, text in rows:
            client = self.clients.get(values[0])
            if client is None or client.closed:
                continue
            rung[client] = None
            try:
                self._deliver(client, values, text)
            except Exception as error:  # of its tokenizer, say: it harms nobody else
                LOGGER.error("request %r ends by an error", values[0], exc_info=error)
                client.mail.put(RuntimeError(f"engine: {described(error)}"))
                self.cancel(client)
        for name, why in left:
            self.leave(name, None if why is None else error_of(*why))
        for client in rung:
            self._ring(client)

    def _take_compiled(self, number: int, error: Any) -> None:
        answer = self.answers.get(number)
        if answer is None:
            return
        if error is None:
            answer.set_result(None)
        else:
            answer.set_exception(error_of(*error))

    def _deliver(self, client: Client, values: tuple[Any, ...], text: str | None) -> None:
        given = dict(zip(STEP_FIELDS, map(self._wire.value, values), strict=True))
        step = StepOutput(**given, piece=None if text is None else lambda: text)
        (request,) = client.requests
        if text is None and request.text is not None:
            step = _with_text(request, step)
        client.mail.put(step)
        if step.finished:
            client.unfinished = {}
            self.clients.pop(step.request_id, None)
        elif not client.whole and not client.held and client.is_full:
            client.held = True
            self.say("hold", step.request_id)
            if client.is_low:  # it was read meanwhile, and the reader may not have seen the hold
                self.resume(client)

    def resume(self, client: Client) -> None:
        """A client that was on hold has read enough."""
        client.held = False
        for name in list(client.unfinished):
            self.say("resume", name)

    def leave(self, name: str, error: Exception | None) -> None:
        """A request is over, without an output."""
        client = self.clients.get(name)
        if client is None or not (error or client.closed):
            return
        self.clients.pop(name, None)
        if client.unfinished and error is not None:
            client.mail.put(error)
        client.unfinished = {}
        self._ring(client)

    def _ring(self, client: Client) -> None:
        gone = client.is_gone is not None and client.is_gone()
        if client.rings is not None and not gone:
            try:
                client.rings()
            except RuntimeError:
                gone = True
        if gone:
            self.cancel(client)
        if not client.unfinished:  # a caller that does not answer is let go
            client.rings = client.is_gone = None

    def cancel(self, client: Client) -> None:
        """Have the process end what a client has unfinished; once more changes nothing."""
        client.closed = True
        for name in list(client.unfinished):
            if self.clients.get(name) is client:
                self.say("cancel", name)
        client.unfinished = {}


def _with_text(request: Prepared, step: StepOutput) -> StepOutput:
    """A step with the text of its tokens, which is decoded here."""
    text: TextStream = request.text
    ids, output = request.output_ids, step.output
    ids += step.token_ids if output is None else output.token_ids[len(ids) :]
    if output is None:
        return replace(step, piece=text.piece(len(ids), final=False))
    count = len(ids) - (bool(ids) and ids[-1] in request.stop_set)
    decoded = text.decoded
    decoded = text.whole(text.after(decoded, ids[decoded.num_tokens : count]))
    text.keep(decoded)
    output = replace(output, text=decoded.text)
    return replace(step, output=output, piece=text.piece(count, final=True))
