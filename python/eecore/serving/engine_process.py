"""The process of an engine, from its first moment: what it does before anything heavy is loaded.

It ends with the server, however that ends: the channel between them closes then.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable

from eecore.channel import Channel

__all__ = ["Listener", "main"]


class Listener:
    """Listens to the server; when that goes, the process does."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.does: Callable[[bytes], None] = self.heard.put
        """What is done with a message."""

    def listen(self) -> None:
        """Listen as long as there is a server."""
        while (data := self.channel.receive_bytes()) is not None:
            self.does(data)
        os._exit(0)  # in the middle of a step, too


def main(end: int) -> None:
    """Run until the server goes.

    Args:
        end: of the channel, a file descriptor.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches both, and the server drains
        signal.signal(number, signal.SIG_IGN)
    listener = Listener(Channel(socket.socket(fileno=end)))
    threading.Thread(target=listener.listen, daemon=True).start()
    from eecore.serving.stepping import run_engine

    run_engine(listener)
