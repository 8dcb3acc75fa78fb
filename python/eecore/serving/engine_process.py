"""The process of an engine, from its first moment: what it does before anything heavy is loaded.

It ends with the server, however that ends: the channel between them closes then.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading

from eecore.serving.channel import Channel, Message

__all__ = ["main"]


def main(end: int) -> None:
    """Run until the server goes.

    Args:
        end: of the channel, a file descriptor.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches both, and the server drains
        signal.signal(number, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=end))
    heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(channel, heard), daemon=True).start()
    from eecore.serving.stepping import run_engine

    run_engine(channel, heard)


def _listen(channel: Channel, heard: queue.SimpleQueue[Message]) -> None:
    while (message := channel.receive()) is not None:
        heard.put(message)
    os._exit(0)  # in the middle of a step, too
