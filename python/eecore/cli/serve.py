"""``eecore serve``: an OpenAI-compatible server."""

from __future__ import annotations

import signal
from contextlib import ExitStack, closing, suppress
from enum import Enum
from typing import Annotated

import typer

from eecore.builtin import BUILTIN
from eecore.console.exit_options import PANEL, USUAL_EXIT, DraftHeadDirectory
from eecore.console.failures import UsageError
from eecore.console.loading import (
    Debug,
    Device,
    Dtype,
    KVCacheDtype,
    KVCacheTokens,
    OptionalModel,
    Threads,
    Weights,
    check_path,
    load,
    options_for,
    spinner,
)
from eecore.console.signals import INTERRUPTED, TERMINATED
from eecore.console.streams import say

HTTP = "HTTP"
LOAD = "Under load"
ENGINE = "Engine"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
MOST_BODY = 1 << 30


class Where(str, Enum):
    """Where an engine runs."""

    PROCESS = "process"
    THREAD = "thread"


def serve(
    model: OptionalModel = None,
    host: Annotated[str, typer.Option(help="Where to listen.", rich_help_panel=HTTP)] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="0: any that is free.", rich_help_panel=HTTP)
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="Requests have to come with it; may be repeated. Better in the environment, where "
            "nobody sees it.",
            envvar="EECORE_API_KEY",
            show_envvar=True,
            rich_help_panel=HTTP,
        ),
    ] = None,
    access_log: Annotated[
        bool,
        typer.Option(
            "--access-log",
            help="A line of JSON on stdout for each request, without what is said.",
            rich_help_panel=HTTP,
        ),
    ] = False,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="What requests call the model.",
            show_default="the directory's",
            rich_help_panel=HTTP,
        ),
    ] = None,
    exit: Annotated[
        str | None,
        typer.Option(
            help="The policy of requests that say nothing: full | fixed:E | confident[:THRESHOLD] "
            "| calibrated[:MEASURE] (the threshold beside the model) | speculative:E,D | "
            "lookup[:D] | head[:D] | auto[:D].",
            show_default=USUAL_EXIT,
            rich_help_panel=PANEL,
        ),
    ] = None,
    allow_exit: Annotated[
        list[str] | None,
        typer.Option(
            help="A mode, such as speculative, or a policy, such as speculative:3,6, that requests "
            "may choose; may be repeated.",
            show_default="all",
            rich_help_panel=PANEL,
        ),
    ] = None,
    alias: Annotated[
        list[str] | None,
        typer.Option(
            help="A policy that /v1/models lists as a model of its own, MODEL:speculative-3-6 say; "
            "may be repeated.",
            show_default="those that suit the model",
            rich_help_panel=PANEL,
        ),
    ] = None,
    exits: DraftHeadDirectory = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes calls of tools: auto (as its chat template does) | hermes | "
            "llama3 | mistral | none (they stay text).",
            rich_help_panel=HTTP,
        ),
    ] = "auto",
    max_waiting: Annotated[
        int,
        typer.Option(
            min=0,
            help="Sequences that may wait beside those that run; beyond them it is a 429.",
            rich_help_panel=LOAD,
        ),
    ] = 256,
    max_body: Annotated[
        int,
        typer.Option(min=1, max=MOST_BODY, help="Bytes of a request.", rich_help_panel=LOAD),
    ] = 4 << 20,
    timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds for a request; 0: no limit.", rich_help_panel=LOAD),
    ] = 600.0,
    drain: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds that requests have to end after Ctrl-C or SIGTERM.",
            rich_help_panel=LOAD,
        ),
    ] = 30.0,
    kv_cache_tokens: KVCacheTokens = None,
    kv_cache_dtype: KVCacheDtype = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Sequences that run at once.", show_default="64", rich_help_panel=ENGINE
        ),
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Prompts that begin alike share what was computed for the beginning (CPU).",
            rich_help_panel=ENGINE,
        ),
    ] = True,
    engine: Annotated[
        Where,
        typer.Option(
            help="process: the engine has a process of its own; no step waits for HTTP, and it is "
            "started again when it is killed. thread: one process for both.",
            rich_help_panel=ENGINE,
        ),
    ] = Where.PROCESS,
    device: Device = None,
    dtype: Dtype = None,
    weights: Weights = None,
    threads: Threads = None,
    debug: Debug = False,  # noqa: ARG001
) -> int:
    """Serve a model to OpenAI's clients; every request may say how deep to go."""
    from eecore.serving import require_extra

    if api_key is not None and not all(key.strip() == key != "" for key in api_key):
        raise UsageError("--api-key: expected keys without spaces around them, none empty")
    require_extra()
    path = model or BUILTIN
    directory = check_path(path)

    from eecore.serving.depth import Policies
    from eecore.serving.remote import RemoteModel, Start
    from eecore.serving.served import Servable
    from eecore.serving.server import listen
    from eecore.serving.server import serve as run
    from eecore.serving.settings import ServerSettings, service_of

    settings = ServerSettings(
        name=served_model_name,
        exit=exit,
        allow_exit=None if allow_exit is None else tuple(allow_exit),
        aliases=None if alias is None else tuple(alias),
        max_waiting=max_waiting,
        max_body=max_body,
        timeout=timeout or None,
        max_num_seqs=max_num_seqs,
        tool_parser=tool_parser,
    )
    policies = Policies(directory)
    settings.check(policies)
    listener = listen(host, port)
    options = {
        "device": device,
        "dtype": dtype,
        "weights": weights,
        "kv_cache_tokens": kv_cache_tokens,
        "kv_cache_dtype": kv_cache_dtype,
        "prefix_cache": prefix_cache,
        "exits": False if exits == "none" else exits,
    }
    policy = None if exit is None else policies.of(exit)
    with ExitStack() as stack:
        loaded: Servable
        if engine is Where.THREAD:
            loaded = load(path, threads=threads, policy=policy, **options)
        else:
            with spinner(f"loading {path}"):
                options = options_for(directory, policy, options)
                remote = RemoteModel(Start(directory, options, threads, max_num_seqs))
            loaded = stack.enter_context(closing(remote))
        service = service_of(loaded, settings)
        if host not in LOOPBACK and not api_key:
            say(f"warning: {host} can be reached by others: --api-key keeps them out")
        shown = f"[{host}]" if ":" in host else host
        words = f"{service.served.name} at http://{shown}:{listener.getsockname()[1]}/v1"
        cut_off = run(
            service,
            listener,
            api_key or (),
            drain_seconds=drain,
            ready=lambda: say(f"{words} (exit {service.served.depths.default}; Ctrl-C ends)"),
            access_log=_write if access_log else None,
        )
    if not cut_off:
        return 0
    return INTERRUPTED if cut_off == signal.SIGINT else TERMINATED


def _write(line: str) -> None:
    """A reader that went away stops no server."""
    with suppress(OSError):
        print(line, flush=True)
