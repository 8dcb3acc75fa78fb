"""Many texts of one engine, some of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from eecore.config import SamplingParams
from eecore.engine.engine import Engine
from eecore.errors import RequestError
from eecore.output import Output

__all__ = ["Ask", "seed_of", "write_all"]

SEEDS = 1 << 31


@dataclass(frozen=True)
class Ask:
    """A text that is wanted."""

    index: int
    name: str
    """What errors call it."""
    prompt: list[int]
    sampling: SamplingParams


def seed_of(seed: int, index: int) -> int:
    """Of one of many texts, whatever others there are."""
    return (seed * 1_000_003 + index) % SEEDS


def write_all(
    engine: Engine,
    asked: Iterator[Ask],
    finished: Callable[[int, Output], None],
    *,
    rows: int,
    wants_more: Callable[[], bool] = lambda: True,
    should_stop: Callable[[], bool] | None = None,
) -> bool:
    """Have texts written, at full depth, until there are no more or no more are wanted.

    Args:
        engine: that writes nothing else.
        asked: what is wanted; taken as there is room.
        finished: given each text's index and output.
        rows: texts that are written at once.
        wants_more: asked before others are begun; those under way are finished.
        should_stop: asked after each step; when it says True what is under way is lost.

    Returns:
        Whether it came to its end; False when it was told to stop.

    Raises:
        RequestError: a text cannot be asked for, or its request failed; it names which.
    """
    running: dict[str, Ask] = {}
    while True:
        room = rows - len(running) if wants_more() else 0
        for ask in islice(asked, room):
            try:
                name = engine.add_request(ask.prompt, exit="full", sampling=ask.sampling)
            except RequestError as error:
                raise RequestError(f"{ask.name}: {error}") from None
            running[name] = ask
        if not running:
            return True
        for step in engine.step():
            if step.output is not None:
                ask = running.pop(step.request_id)
                if step.output.error is not None:
                    raise RequestError(f"{ask.name}: {step.output.error}")
                finished(ask.index, step.output)
        if should_stop is not None and should_stop():
            return False
