"""What the process of an engine hears of its server, from its first moment."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable

from eecore.channel import Channel, Message

__all__ = ["Ear"]


class Ear:
    """Listens to the server; when that goes, the process does."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.heard: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.does: Callable[[Message], None] = self.heard.put
        """What is done with a message."""

    def listen(self) -> None:
        """As long as there is anything to hear."""
        while (message := self.channel.receive()) is not None:
            self.does(message)
        os._exit(0)  # in the middle of a step, too
