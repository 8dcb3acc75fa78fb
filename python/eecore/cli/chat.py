"""``eecore chat``: a conversation, on a terminal or line by line."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from rich.console import Console

from eecore.cli.depth import has_colours, legend_of
from eecore.cli.exit_options import ExitOptions
from eecore.cli.failures import UsageError
from eecore.cli.generate import SamplingOptions
from eecore.cli.loading import MODEL_HELP, check_path
from eecore.cli.options import EngineOptions, option, takes_options
from eecore.cli.process import say
from eecore.cli.results import StreamedText, saved
from eecore.errors import EecoreError, ExitError, RequestError
from eecore.exit_text import parse_exit, usual_exit
from eecore.exits import Auto, Full
from eecore.files.hub import is_at_hand
from eecore.files.whole import write_text

if TYPE_CHECKING:
    from eecore.config import SamplingParams
    from eecore.exits import Exit
    from eecore.generation import Model
    from eecore.output import Output

CHAT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The small chat model that is used when no model is named."""


@dataclass(frozen=True)
class ChatOptions:
    """What is shown in addition to the answers."""

    PANEL: ClassVar[str] = "Output"

    depth: bool = option(False, "Colour each token by how it was made (/depth).")
    stats: bool = option(False, "A line of statistics after each answer (/stats).")


@takes_options
def chat(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="[MODEL]", help=MODEL_HELP, show_default=f"{CHAT_MODEL} where the cache has it"
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="The system message.")] = None,
    *,
    depths: ExitOptions,
    sampling: SamplingOptions,
    printed: ChatOptions,
    engine: EngineOptions,
) -> int:
    """Talk with a model.

    Enter sends, Alt-Enter begins another line, the arrow keys recall earlier messages, Ctrl-C ends
    an answer, Ctrl-D or /quit ends the conversation; /help lists the commands. Without a terminal
    each line of stdin is a message.
    """
    if model is None:
        if not is_at_hand(CHAT_MODEL):
            raise UsageError(
                f"MODEL: expected a chat model, got none; a small one: eecore chat {CHAT_MODEL}"
            )
        model = CHAT_MODEL
    directory = check_path(model)
    sampling.check()
    if not engine.debug:  # an error in an answer is reported in one line
        logging.getLogger("eecore").addHandler(logging.NullHandler())
    said = None if depths.exit is None else depths.policy(directory)
    loaded = engine.load(directory, said)
    if loaded.tokenizer is None or loaded.tokenizer.chat_template is None:
        raise UsageError(
            f"{model}: expected a model with a chat template, got one without: eecore generate "
            "continues texts"
        )
    policy = said or parse_exit(usual_exit(loaded.network.device))
    talk = _Talk(loaded, directory, policy, sampling, system, printed.depth, printed.stats)
    if not sys.stdin.isatty():
        for line in _lines():
            talk.take(line)
        return 0
    say(f"{model}: {policy.contract}. /help lists the commands, Ctrl-D ends.")
    for line in _typed():
        try:
            talk.take(line)
        except (EecoreError, UsageError, OSError) as error:
            say(f"error: {error}")
    return 0


@dataclass
class _Talk:
    """One conversation and how it is shown."""

    model: Model
    directory: Path
    policy: Exit
    sampling: SamplingOptions
    system: str | None
    depth: bool
    stats: bool
    turns: list[dict[str, str]] = field(default_factory=list)
    last: str = ""
    """The last answer's line of statistics."""

    def __post_init__(self) -> None:
        self.console = Console()
        self.commands: dict[str, Callable[[str], None]] = {
            "system": self._system,
            "exit-mode": self._exit_mode,
            "depth": self._depth,
            "stats": self._stats,
            "save": self._save,
            "clear": self._clear,
            "help": self._help,
        }

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as the chat template takes it."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.turns

    def take(self, line: str) -> None:
        """Run a command, or answer a message.

        Raises:
            UsageError: the command is unknown, or its argument is not accepted.
            EecoreError: the message cannot be answered; the conversation stays without it.
        """
        if not line.startswith("/"):
            self._answer(line)
            return
        name, _, rest = line[1:].partition(" ")
        if name not in self.commands:
            known = ", ".join(f"/{each}" for each in self.commands)
            raise UsageError(f"/{name}: expected one of {known}, /quit")
        self.commands[name](rest.strip())

    def _answer(self, message: str) -> None:
        """Stream the answer to a message; Ctrl-C ends it and keeps the text so far."""
        self.turns.append({"role": "user", "content": message})
        output: Output | None = None
        try:
            ids, params = self._prepared()
            shown = StreamedText([message], self.model, self.policy if self.depth else None, ids)
            if self.stats and not isinstance(self.policy, (Auto, Full)):
                self.model.measure_full_depth()
            started = time.perf_counter()
            steps = self._steps(ids, params)
            try:
                for step in steps:
                    shown.step(0, step)
                    output = step.output
            except KeyboardInterrupt:
                shown.end()
                if not sys.stdin.isatty():
                    raise
            finally:
                steps.close()
        except BaseException:
            self.turns.pop()
            raise
        thought = {"reasoning_content": shown.thought} if shown.thought else {}
        self.turns.append({"role": "assistant", "content": shown.text, **thought})
        if output is None:
            say("interrupted")
            return
        if output.error is not None:
            say(f"error: {output.error}")
        if output.finish_reason == "length" and self.sampling.max_tokens is None:
            say("note: the answer was cut at the end of the context; /clear begins anew")
        self.last = "; ".join(saved([output], time.perf_counter() - started))
        if self.stats:
            say(self.last)

    def _prepared(self) -> tuple[list[int], SamplingParams]:
        """The tokens of the conversation, and the sampling settings of the answer."""
        assert self.model.tokenizer is not None
        ids = self.model.tokenizer.encode_chat(self.messages)
        room = self.model.engine_config.room(self.model.config, len(ids))
        if room < 1:
            raise RequestError(
                f"conversation of {len(ids)} tokens: expected at most {room + len(ids) - 1}, what "
                "the context holds; /clear begins anew"
            )
        return ids, self.sampling.params(self.model, self.policy, ids)

    def _steps(self, ids: list[int], params: SamplingParams) -> Any:
        import eecore

        return eecore.stream(self.model, ids, exit=self.policy, sampling=params)

    def _system(self, text: str) -> None:
        if text:
            self.system = text
        say(f"system message: {self.system or 'none'}")

    def _exit_mode(self, text: str) -> None:
        if text:
            try:
                policy = parse_exit(text, self.directory)
            except ExitError as error:
                raise UsageError(f"/exit-mode: {str(error).removeprefix('exit: ')}") from None
            params = self.sampling.params(self.model, policy, None)
            prepare = self.model.shared_engine().engine.prepare
            prepare([0], exit=policy, sampling=replace(params, max_tokens=1))
            self.policy = policy
        say(f"exit mode: {self.policy.contract}")

    def _depth(self, _text: str) -> None:
        self.depth = not self.depth
        if not self.depth:
            say("depth: not shown")
        elif not has_colours(self.console):
            say("depth: in words after each answer")
        else:
            self.console.print(legend_of(self.policy, self.model.config.num_layers))

    def _stats(self, _text: str) -> None:
        self.stats = not self.stats
        say(f"stats: {'after each answer' if self.stats else 'not shown'}")
        if self.stats and self.last:
            say(f"last answer: {self.last}")

    def _save(self, text: str) -> None:
        if not text:
            raise UsageError("/save: expected the name of a file, got none")
        write_text(text, json.dumps({"messages": self.messages}, ensure_ascii=False) + "\n")
        say(f"wrote {text}")

    def _clear(self, _text: str) -> None:
        self.turns.clear()
        say("the conversation begins anew")

    def _help(self, _text: str) -> None:
        for line in (
            "/system [TEXT]     show the system message, or set it",
            "/exit-mode [MODE]  show how deep a token goes, or set it: auto, full, confident:0.9",
            "/depth             colour tokens by how they were made, or no longer",
            "/stats             a line of statistics after each answer, or no longer",
            "/save FILE         write the conversation as JSON",
            "/clear             begin anew",
            "/quit              end, as Ctrl-D does",
            "Alt-Enter begins another line, arrow keys recall messages, Ctrl-C ends an answer",
        ):
            say(line)


def _lines() -> Iterator[str]:
    """The messages on stdin where it is not a terminal, one per line."""
    for line in sys.stdin.buffer:
        try:
            text = line.decode().strip()
        except UnicodeDecodeError:
            raise RequestError(f"stdin: expected UTF-8 text, got {line[:80]!r}") from None
        if text == "/quit":
            return
        if text:
            yield text


def _typed() -> Iterator[str]:
    """The messages typed on a terminal; Ctrl-C drops one, Ctrl-D ends."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: Any) -> None:
        event.current_buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _another_line(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    session: PromptSession[str] = PromptSession(
        multiline=True, key_bindings=keys, prompt_continuation="... "
    )
    while True:
        try:
            text = session.prompt(">>> ").strip()
        except KeyboardInterrupt:
            say("Ctrl-D ends")
            continue
        except EOFError:
            return
        if text == "/quit":
            return
        if text:
            yield text
