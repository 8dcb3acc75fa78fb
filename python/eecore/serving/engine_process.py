"""The entry of an engine's process: the listener starts before anything heavy is loaded.

The process ends with the server, however that ends, since the channel between them closes then.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
from collections.abc import Callable

from eecore.channel import Channel


class Listener:
    """Passes on the server's messages, and ends the process when the server has gone."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.does: Callable[[bytes], None] = self.heard.put
        """Takes each message; at first it is queued."""

    def listen(self) -> None:
        """Listen until the server goes."""
        while (data := self.channel.receive_bytes()) is not None:
            self.does(data)
        os._exit(0)  # even in the middle of a step


def main(end: int) -> None:
    """Run until the server goes.

    Args:
        end: this process's end of the channel, a file descriptor.
    """
    # Ctrl-C reaches both processes, and the server drains
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    listener = Listener(Channel(socket.socket(fileno=end)))
    threading.Thread(target=listener.listen, daemon=True).start()
    from eecore.serving.stepping import run_engine

    run_engine(listener)
