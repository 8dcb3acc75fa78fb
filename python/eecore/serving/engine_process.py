"""The process of an engine, from its first moment: what it does before anything heavy is loaded.

It ends with the server, however that ends: the channel between them closes then.
"""

from __future__ import annotations

import signal
import socket
import threading

from eecore.channel import Channel
from eecore.serving.ear import Ear

__all__ = ["main"]


def main(end: int) -> None:
    """Run until the server goes.

    Args:
        end: of the channel, a file descriptor.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # Ctrl-C reaches both, and the server drains
        signal.signal(number, signal.SIG_IGN)
    ear = Ear(Channel(socket.socket(fileno=end)))
    threading.Thread(target=ear.listen, daemon=True).start()
    from eecore.serving.stepping import run_engine

    run_engine(ear)
