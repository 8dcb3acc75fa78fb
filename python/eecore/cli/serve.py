"""``eecore serve``: an OpenAI-compatible server."""

from __future__ import annotations

import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.console import Console
from rich.status import Status

from eecore.cli.exit_options import PANEL, USUAL_EXIT
from eecore.cli.failures import UsageError
from eecore.cli.loading import OptionalModel, check_path, spinner
from eecore.cli.options import EngineOptions, option, takes_options
from eecore.cli.process import INTERRUPTED, TERMINATED, say
from eecore.exit_text import FORMS, Policies
from eecore.files.builtin import BUILTIN
from eecore.files.hub import name_of

LOOPBACK = ("127.0.0.1", "::1", "localhost")
MAX_BODY = 1 << 30


@dataclass(frozen=True)
class HttpOptions:
    """Which requests are answered, and how."""

    PANEL: ClassVar[str] = "HTTP"

    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port to listen on; 0: any free one.", min=0, max=65535)
    api_key: list[str] | None = option(
        None,
        "A key that requests must have; may be repeated. Better in the environment, where other "
        "users do not see it.",
        envvar="EECORE_API_KEY",
        show_envvar=True,
    )
    cors_origin: list[str] | None = option(
        None,
        "A site whose pages may ask from a browser, such as https://example.org; * for all; may "
        "be repeated.",
        show_default="none",
    )
    access_log: bool = option(
        False, "A line of JSON on stdout for each request, without prompts and texts."
    )
    served_model_name: str | None = option(
        None, "What requests call the model.", show_default="the directory's"
    )
    generation_config: str = option(
        "auto",
        "Sampling settings that requests leave out: auto (the model's own; for a chat model "
        "without any, those of eecore chat) | none (greedy).",
    )
    tool_parser: str = option(
        "auto",
        "How the model writes tool calls: auto (as its chat template does, else hermes) | "
        "granite | hermes | lfm2 | llama3 | mistral | mistral3 | qwen3_coder | "
        "none (they stay text).",
    )


@dataclass(frozen=True)
class DepthOptions:
    """The policies that requests may choose."""

    PANEL: ClassVar[str] = PANEL

    exit: str | None = option(
        None,
        f"The policy of requests that name none: {' | '.join(FORMS)}.",
        show_default=USUAL_EXIT,
    )
    allow_exit: list[str] | None = option(
        None,
        "A mode, such as speculative, or a policy, such as speculative:3,6, that requests may "
        "choose; may be repeated.",
        show_default="all",
    )
    alias: list[str] | None = option(
        None,
        "A policy that /v1/models lists as a model of its own, such as MODEL:speculative-3-6; may "
        "be repeated.",
        show_default="those that suit the model",
    )


@dataclass(frozen=True)
class BoundOptions:
    """The bounds of requests."""

    PANEL: ClassVar[str] = "Under load"

    max_waiting: int = option(
        256, "Sequences that may wait while others run; requests beyond get a 429.", min=0
    )
    max_body: int = option(4 << 20, "Maximum bytes of a request.", min=1, max=MAX_BODY)
    timeout: float = option(600.0, "Seconds for a request; 0: no limit.", min=0)
    drain: float = option(30.0, "Seconds for requests to end after Ctrl-C or SIGTERM.", min=0)


@dataclass(frozen=True, kw_only=True)
class ServerEngineOptions(EngineOptions):
    """How the model is run."""

    PANEL: ClassVar[str] = "Engine"

    max_num_seqs: int | None = option(None, "Sequences that run at once.", min=1, show_default="64")
    prefix_cache: bool = option(
        True,
        "Prompts that begin alike share what was computed for the beginning (CPU).",
        "--prefix-cache/--no-prefix-cache",
    )
    warm_up: bool = option(
        True,
        "Run a few short requests first, for 10 s at most, so that the first answer need not wait "
        "for programs that are recorded once.",
        "--warm-up/--no-warm-up",
    )

    @property
    def settings(self) -> dict[str, Any]:
        return {**super().settings, "prefix_cache": self.prefix_cache}


@takes_options
def serve(
    model: OptionalModel = None,
    *,
    http: HttpOptions,
    depths: DepthOptions,
    bounds: BoundOptions,
    engine: ServerEngineOptions,
) -> int:
    """Serve a model to OpenAI's clients; every request may choose its exit policy."""
    started = time.monotonic()
    from eecore.serving import require_extra

    if http.api_key is not None and not all(key.strip() == key != "" for key in http.api_key):
        raise UsageError("--api-key: expected keys without spaces around them, none empty")
    require_extra()
    path = model or BUILTIN
    directory = check_path(path)

    from eecore.serving.server import listen
    from eecore.serving.server import serve as run
    from eecore.serving.settings import ServerSettings, service_of
    from eecore.serving.warm_up import warm_up

    settings = ServerSettings(
        name=http.served_model_name,
        exit=depths.exit,
        allow_exit=None if depths.allow_exit is None else tuple(depths.allow_exit),
        aliases=None if depths.alias is None else tuple(depths.alias),
        max_waiting=bounds.max_waiting,
        max_body=bounds.max_body,
        timeout=bounds.timeout or None,
        max_num_seqs=engine.max_num_seqs,
        tool_parser=http.tool_parser,
        generation_config=http.generation_config,
        cors_origins=tuple(http.cors_origin or ()),
    )
    policies = Policies(directory)
    settings.check(policies)
    listener = listen(http.host, http.port)
    policy = None if depths.exit is None else policies.of(depths.exit)
    if not sys.stderr.isatty():  # a terminal has a spinner
        say(f"loading {name_of(directory)}")
    service = service_of(engine.load(directory, policy), settings)
    if engine.warm_up:
        if not sys.stderr.isatty():
            say("warming up (--no-warm-up skips it)")
        with spinner("warming up"):
            warm_up(service.served)
    if http.host not in LOOPBACK and not http.api_key:
        say(f"warning: {http.host} is open to other machines: --api-key restricts access")
    shown = f"[{http.host}]" if ":" in http.host else http.host
    words = f"{service.served.name} at http://{shown}:{listener.getsockname()[1]}/v1"
    with _Drain(bounds.drain) as drain:
        cut_off = run(
            service,
            listener,
            http.api_key or (),
            cors_origins=settings.cors_origins,
            drain_seconds=bounds.drain,
            ready=lambda: say(
                f"{words} (exit {service.served.depths.default}; ready after "
                f"{time.monotonic() - started:.1f} s; Ctrl-C ends)"
            ),
            draining=drain.show,
            access_log=_write if http.access_log else None,
        )
    if not cut_off:
        return 0
    return INTERRUPTED if cut_off == signal.SIGINT else TERMINATED


class _Drain:
    """Reports while requests finish: a line, and on a terminal the number of answers left."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._status: Status | None = None

    def __enter__(self) -> _Drain:
        return self

    def __exit__(self, *_: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, left: int) -> None:
        """Show how many answers are left."""
        words = f"{left} answers are unfinished" if left != 1 else "1 answer is unfinished"
        if self._status is None:
            say(f"ending: {words}, for {self._seconds:g} s at most (Ctrl-C again cuts them off)")
            self._status = Console(stderr=True).status(words)
            self._status.start()
        self._status.update(words)


def _write(line: str) -> None:
    """Print a line; a reader that is gone does not stop the server."""
    with suppress(OSError):
        print(line, flush=True)
