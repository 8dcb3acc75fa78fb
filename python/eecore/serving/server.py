"""The process of a server: its socket, its signals, its end.

At the first signal the server drains: running requests may finish, within a limit, and new ones are
refused with a 503. The second signal ends it at once.
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

BACKLOG = 512
# Seconds for the rest of connections once all requests have been answered.
CLOSING_SECONDS = 2
KEEP_ALIVE_SECONDS = 30


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at an address.

    Raises:
        RequestError: the address is not available.
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
    """Run the server until a signal ends it.

    Args:
        listener: from :func:`listen`.
        api_keys: the keys that requests may have; empty: no key is needed.
        cors_origins: see :func:`~eecore.serving.app.create_app`.
        drain_seconds: the time for running requests after the first signal.
        ready: called when the server takes requests.
        draining: called after the first signal with the number of unfinished answers, and again
            whenever it has changed.
        access_log: takes a line for each request.

    Returns:
        The signal that ended the server before all requests were answered; 0: all were.
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
        server.run(sockets=[listener])  # on uvloop and httptools, where they are installed
    finally:
        service.served.engine.close()
    return server.cut_off


class _Server(uvicorn.Server):
    """A uvicorn server that drains before it ends."""

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
        """Start, then call ``ready``."""
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """Drain at the first signal, end at the second."""
        if self._service.admission.is_closing:
            self.cut_off = sig
            self.should_exit = self.force_exit = True
            return
        self._signal = sig
        self._until = time.monotonic() + self._drain_seconds
        self._service.admission.is_closing = True

    async def on_tick(self, counter: int) -> bool:
        """Whether the server has to end; called ten times a second."""
        admission = self._service.admission
        if admission.is_closing and not self.should_exit:
            if self._draining is not None and admission.taken != self._left:
                self._left = admission.taken
                self._draining(self._left)
            is_late = time.monotonic() > self._until
            if is_late and admission.taken:
                self.cut_off = self._signal
            if is_late or not admission.taken:  # a second signal may have come meanwhile
                self.should_exit = True
        return await super().on_tick(counter)

    async def shutdown(self, sockets: Any = None) -> None:
        """Close what is left; requests that are cut off end with their streams."""
        if self.cut_off:
            self._service.served.engine.close()
        await super().shutdown(sockets)
