"""The process of a server: its socket, its signals, its end.

The first signal closes the door: what runs is finished, within bounds, what comes is refused with a
503. The second one ends it at once.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvicorn

from eecore.errors import RequestError
from eecore.serving.access_log import AccessLog
from eecore.serving.answering import Service
from eecore.serving.app import create_app

__all__ = ["listen", "serve"]

BACKLOG = 512
# For what is left of connections when all requests have been answered.
CLOSING_SECONDS = 2
KEEP_ALIVE_SECONDS = 30


def listen(host: str, port: int) -> socket.socket:
    """A socket at an address.

    Raises:
        RequestError: it cannot be had.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        server = socket.socket(family, kind, protocol)
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(address)
        except BaseException:
            server.close()
            raise
    except (OSError, UnicodeError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise RequestError(f"{host}:{port}: expected an address to listen at: {what}") from None
    return server


def serve(
    service: Service,
    listener: socket.socket,
    api_keys: Sequence[str],
    *,
    cors_origins: Sequence[str] = (),
    drain_seconds: float,
    ready: Callable[[], None],
    draining: Callable[[int], object] | None = None,
    access_log: Callable[[str], object] | None = None,
) -> int:
    """Serve until a signal says otherwise.

    Args:
        service: what requests share.
        listener: from :func:`listen`.
        api_keys: one of which has to come with a request.
        cors_origins: see :func:`~eecore.serving.app.create_app`.
        drain_seconds: that requests have to end after the first signal.
        ready: called when there is somebody to answer.
        draining: called after the first signal with the number of answers that are not whole yet,
            and again whenever it has changed.
        access_log: takes a line for each request.

    Raises:
        EngineLostError: there is no engine any more, and cannot be another one.

    Returns:
        The signal that ended it before all requests were answered; 0: they were.
    """
    app = create_app(service, api_keys, cors_origins)
    if access_log is not None:
        app.add_middleware(AccessLog, write=access_log)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSING_SECONDS,
    )
    server = _Server(config, service, drain_seconds, ready, draining)
    try:
        server.run(sockets=[listener])  # on uvloop, with httptools, where they are installed
    finally:
        service.served.engine.close()
        if service.tracing is not None:
            service.tracing.close()
    if service.served.engine.failure is not None:
        raise service.served.engine.failure
    return server.cut_off


class _Server(uvicorn.Server):
    """Drains before it goes."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        drain_seconds: float,
        ready: Callable[[], None],
        draining: Callable[[int], object] | None,
    ) -> None:
        super().__init__(config)
        self._ready = ready
        self._draining = draining
        self._left = 0
        self._service = service
        self._drain_seconds = drain_seconds
        self._signal = 0
        self._until = 0.0
        self.cut_off = 0

    async def startup(self, sockets: Any = None) -> None:
        """Say so when it is done."""
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """A signal has come."""
        if self._service.admission.is_closing:
            self.cut_off = sig
            self.should_exit = self.force_exit = True
            return
        self._signal = sig
        self._until = time.monotonic() + self._drain_seconds
        self._service.admission.is_closing = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether it is time to go."""
        admission = self._service.admission
        if self._service.served.engine.failure is not None:
            self.should_exit = self.force_exit = True
        elif admission.is_closing and not self.should_exit:
            if self._draining is not None and admission.taken != self._left:
                self._left = admission.taken
                self._draining(self._left)
            is_late = time.monotonic() > self._until
            if is_late and admission.taken:
                self.cut_off = self._signal
            self.should_exit = is_late or not admission.taken
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        """Close what is left; requests that are cut off end with their streams."""
        if self.cut_off:
            self._service.served.engine.close()
        await super().shutdown(sockets)
