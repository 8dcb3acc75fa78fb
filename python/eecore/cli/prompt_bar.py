"""A progress bar for reading prompts, shown while a person waits for the first token."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from eecore import Engine, StepOutput

PATIENCE_SECONDS = 1.0
"""Seconds in which nothing is shown."""


def with_prompt_bar(engine: Engine) -> Iterator[StepOutput]:
    """All steps of an engine. Where the first one takes long, a bar on stderr shows until then how
    many tokens of the prompts have been read; there is none where stderr is no terminal.
    """
    console = Console(stderr=True)
    if not console.is_interactive:
        yield from engine.run()
        return
    bar, lock = _PromptBar(console, engine), threading.Lock()

    def show() -> None:
        with lock:
            if not timer.finished.is_set():
                bar.start()

    def end() -> None:
        timer.cancel()
        with lock:
            bar.stop()

    timer = threading.Timer(PATIENCE_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        for step in engine.run():
            end()
            yield step
    finally:
        end()


class _PromptBar(Progress):
    """A bar that asks the engine whenever it is drawn."""

    def __init__(self, console: Console, engine: Engine) -> None:
        self._engine = engine
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeElapsedColumn(),
            console=console,
            redirect_stdout=False,
            redirect_stderr=False,
            transient=True,
        )
        self.add_task("reading the prompt")

    def get_renderables(self) -> Iterable[RenderableType]:
        requests = list(self._engine.scheduler.requests.values())
        read = sum(min(each.num_computed, len(each.given_ids)) for each in requests)
        total = sum(len(each.given_ids) for each in requests)
        for task in self.task_ids:
            self.update(task, completed=read, total=total)
        yield from super().get_renderables()
