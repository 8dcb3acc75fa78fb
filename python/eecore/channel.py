"""A socket between two processes of one program, for messages of plain values or of bytes.

Plain values are numbers, strings and containers of them, written with marshal; nothing in them can
run. The module imports nothing large, so that a process can listen before it has loaded anything.
"""

from __future__ import annotations

import marshal
import socket
import threading
from contextlib import suppress
from typing import Any

Message = tuple[Any, ...]
"""The message's kind, followed by values."""

SIZE_BYTES = 8


class Channel:
    """One end of the socket. Any thread may send; one thread receives."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._file = end.makefile("rb")
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Send a message; it waits while the other end is full.

        Raises:
            OSError: the other end has gone.
            ValueError: the message has a value that is not plain.
        """
        self.send_bytes(marshal.dumps(message))

    def receive(self) -> Message | None:
        """The next message; None when the other end has gone."""
        data = self.receive_bytes()
        return None if data is None else marshal.loads(data)

    def send_bytes(self, data: bytes) -> None:
        """Send an encoded message; it waits while the other end is full.

        Raises:
            OSError: the other end has gone.
        """
        with self._sending:
            self._socket.sendall(len(data).to_bytes(SIZE_BYTES, "little") + data)

    def receive_bytes(self) -> bytes | None:
        """The next message as it was sent; None when the other end has gone."""
        try:
            size = self._file.read(SIZE_BYTES)
            data = self._file.read(int.from_bytes(size, "little"))
        except (OSError, ValueError):  # closed at this end
            return None
        if len(size) < SIZE_BYTES or len(data) < int.from_bytes(size, "little"):
            return None
        return data

    def close(self) -> None:
        """Close both directions; a thread that waits for a message gets None."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
