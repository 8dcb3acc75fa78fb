"""The server on Ray Serve: replicas with an engine each, and gates that pass requests on to them.

``serve run eecore.serving.ray:app model=PATH exit=auto num_replicas=2``, or a file such as
``scripts/ray_serve.yaml``. There are two deployments: a *gate* reads a request and routes it to an
*engine*, a replica with the whole application of ``eecore serve`` and a KV cache of its own.
Routing by the prompt needs the body, which a router at Ray's own proxy does not see: hence the
gates.

Requests that begin alike go to the same replica (``replicas.py``). If a replica dies before an
answer has begun, its request is sent to another replica. An answer that has begun cannot move,
since another replica need not write the same text: its stream ends with an error event. When a
client leaves, its request ends.

What Ray cannot promise:

- A gate that dies takes along the requests that it has: Ray's proxy does not send them again, but
  answers 500 or breaks the connection off. New requests wait for the gate that takes its place.
- Each gate learns by itself which replica has which beginning, and counts its own requests only.
  With one gate, the default, it knows all of them.
- ``/metrics``, ``/health`` and the page answer for one replica, whichever Ray chooses. Ray's
  autoscaler gets each replica's number of requests and use of the KV cache; Ray's own metrics have
  the rest.
- Ray does not slow a replica down for a client that reads slowly: the answer is kept in memory
  until the client reads it.

``EECORE_API_KEY`` in the environment of ``serve run`` (for a file: its ``runtime_env``) has the
keys that the server accepts. Needs ``pip install '.[ray]'``.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import torch
from pydantic import ConfigDict, TypeAdapter, ValidationError
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import RequestRouter
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import eecore
from eecore.errors import EngineClosedError, RequestError
from eecore.serving.answering import refusal
from eecore.serving.app import create_app
from eecore.serving.bodies import ClientGoneError, read_body
from eecore.serving.refusals import ApiError
from eecore.serving.replicas import Load, Routes, beginning_of, replicas_wanted
from eecore.serving.settings import ServerSettings, service_of
from eecore.serving.shapes import DONE, event

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

MAX_TRIES = 5
"""Replicas that one request is sent to, at most."""
STUCK_SECONDS = 120.0
"""Seconds without progress after which an engine counts as unhealthy."""
MARGIN_SECONDS = 10.0
"""Seconds beyond the request's timeout in which a replica can report it."""
DRAIN_SECONDS = 30.0
LARGE = 1 << 16
"""Bytes from which on a body is parsed in a thread."""
PASSED_ON = (
    "type http_version method scheme path raw_path root_path query_string headers client server"
).split()
"""The fields of an ASGI scope that a gate passes on."""


@dataclass(frozen=True)
class Arguments(ServerSettings):
    """The arguments of ``serve run eecore.serving.ray:app``, as NAME=VALUE or under ``args`` in a
    file.

    Args:
        model: a directory or GGUF file, on every node; None: the one that ships with eecore.
        device: cpu or cuda. dtype, weights, kv_cache_tokens, kv_cache_dtype,
            prefix_cache, exits, draft_head: as :func:`eecore.load` takes them.
        threads: CPU threads of a replica; None: as many as it has CPUs.
        num_replicas: engines; with ``max_replicas`` the number at the start and the minimum.
        max_replicas: the number up to which Ray adds replicas under load; None: it adds none.
        num_cpus: CPUs that Ray sets aside for a replica.
        num_gpus: GPUs that Ray sets aside for a replica.
        target_requests: requests that a replica should have at once, for the autoscaler.
        gates: processes that read requests and route them.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    model: str | None = None
    device: str | None = None
    dtype: str | None = None
    weights: str | None = None
    kv_cache_tokens: int | None = None
    kv_cache_dtype: str | None = None
    prefix_cache: bool = True
    exits: str | None = None
    draft_head: str | None = None
    threads: int | None = None
    num_replicas: int = 1
    max_replicas: int | None = None
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    target_requests: float = 16.0
    gates: int = 1

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Arguments:
        """Arguments from a command line, where all values are text, or from a file.

        Raises:
            RequestError: a value is wrong; the message names the first.
        """
        try:
            return TypeAdapter(cls).validate_python(dict(given))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(str(part) for part in first["loc"])
            raise RequestError(f"{name}: {first['msg']}, got {first['input']!r}") from None


def app(args: dict[str, Any]) -> serve.Application:
    """The application that ``serve run`` runs.

    Args:
        args: see :class:`Arguments`.

    Raises:
        RequestError: an argument is wrong.
    """
    arguments = Arguments.of(args)
    keys = os.environ.get("EECORE_API_KEY", "").split()
    scale: dict[str, Any] = {"num_replicas": arguments.num_replicas}
    if arguments.max_replicas is not None:
        scale = {"autoscaling_config": _autoscaling(arguments)}
    engines = serve.deployment(
        Engine,
        name="engine",
        ray_actor_options={"num_cpus": arguments.num_cpus, "num_gpus": arguments.num_gpus},
        # The engine itself refuses what is too much, with a 429.
        max_ongoing_requests=1 << 16,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        **scale,
    )
    gates = serve.deployment(
        Gate,
        name="gate",
        num_replicas=arguments.gates,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=1 << 16,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
    )
    return gates.bind(engines.bind(arguments, keys), arguments.max_body, arguments.timeout)


def _autoscaling(arguments: Arguments) -> AutoscalingConfig:
    return AutoscalingConfig(
        min_replicas=arguments.num_replicas,
        max_replicas=arguments.max_replicas,
        target_ongoing_requests=arguments.target_requests,
        policy={"policy_function": "eecore.serving.ray:autoscale"},
    )


def autoscale(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """A policy of Ray's autoscaler: the number of replicas from what runs, what waits, and how full
    the KV caches are.
    """
    found = context.aggregated_metrics or {}
    requests, shares = found.get("requests", {}), found.get("kv_share", {})
    if not requests:  # no replica has reported yet
        return context.target_num_replicas, {}
    loads = [Load(count, shares.get(replica, 0.0)) for replica, count in requests.items()]
    target = context.config.get_target_ongoing_requests()
    return replicas_wanted(loads, context.total_queued_requests or 0.0, target), {}


class PrefixRouter(RequestRouter):
    """A router of Ray Serve: to the replica that has the most of a request's beginning in its
    cache.
    """

    def initialize_state(self, **settings: Any) -> None:
        """Create the routes; ``settings`` are the arguments of
        :class:`~eecore.serving.replicas.Routes`.
        """
        self._routes = Routes(**settings)
        self._ongoing: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[Any], pending_request: Any = None
    ) -> list[list[Any]]:
        """All replicas, best first."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # where all of them are full
        known = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: float(self._ongoing[name]) for name in known}
        ranked = self._routes.ranked(pending_request.kwargs["beginning"], loads)
        return [[known[name]] for name in ranked]

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        """Note that a replica has taken a request."""
        super().on_request_routed(pending_request, replica_id, result)
        self._routes.add(pending_request.kwargs["beginning"], replica_id.unique_id)
        self._ongoing[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        """Note that a request has ended."""
        super().on_request_completed(replica_id, internal_request_id)
        if self._ongoing[replica_id.unique_id] > 0:
            self._ongoing[replica_id.unique_id] -= 1

    def update_replicas(self, replicas: list[Any]) -> None:
        """Take note of the replicas that there are now."""
        super().update_replicas(replicas)
        names = {replica.replica_id.unique_id for replica in replicas}
        self._routes.keep(names)
        for name in [name for name in self._ongoing if name not in names]:
            del self._ongoing[name]


class Engine:
    """A replica: a model, its engine, and the application of ``eecore serve``.

    Args:
        arguments: the application's.
        api_keys: see :func:`~eecore.serving.app.create_app`.
    """

    def __init__(self, arguments: Arguments, api_keys: list[str]) -> None:
        threads = arguments.threads or int(arguments.num_cpus)
        torch.set_num_threads(max(threads, 1))
        model = eecore.load(
            arguments.model,
            device=arguments.device,
            dtype=arguments.dtype,
            weights=arguments.weights,
            kv_cache_tokens=arguments.kv_cache_tokens,
            kv_cache_dtype=arguments.kv_cache_dtype,
            prefix_cache=arguments.prefix_cache,
            exits=False if arguments.exits == "none" else arguments.exits,
            draft_head=arguments.draft_head,
        )
        self._service = service_of(model, arguments)
        self._app = create_app(self._service, api_keys, arguments.cors_origins)
        self._progress: dict[str, int] = {}
        self._since = time.monotonic()

    async def answer(
        self,
        scope: dict[str, Any],
        body: bytes,
        *,
        beginning: list[bytes],  # noqa: ARG002 - for the router
    ) -> AsyncIterator[list[Message]]:
        """The application's answer to a request, as messages of ASGI, together where several are
        there.
        """
        said: asyncio.Queue[Message | None] = asyncio.Queue()
        heard = [{"type": "http.request", "body": body, "more_body": False}]
        is_gone = asyncio.Event()

        async def receive() -> Message:
            if heard:
                return heard.pop()
            await is_gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._app(scope, receive, said.put))
        task.add_done_callback(lambda _: said.put_nowait(None))
        try:
            is_over = False
            while not is_over:
                messages = [await said.get()]
                while not said.empty():
                    messages.append(said.get_nowait())
                is_over = messages[-1] is None
                if found := [message for message in messages if message is not None]:
                    yield found
            await task
        finally:
            is_gone.set()
            task.cancel()

    @property
    def _engine(self) -> eecore.Engine:
        return self._service.served.engine.engine

    async def check_health(self) -> None:
        """Raise an error where Ray should replace this replica.

        Raises:
            EngineClosedError: the engine has requests, and for two minutes none made progress.
        """
        engine = self._engine
        progress = {name: each.num_computed for name, each in list(engine.requests.items())}
        if progress != self._progress or not engine.has_runnable:
            self._progress, self._since = progress, time.monotonic()
        elif time.monotonic() - self._since > STUCK_SECONDS:
            raise EngineClosedError(
                f"engine: expected progress within {STUCK_SECONDS:g} s, got none for "
                f"{len(progress)} requests"
            )

    def record_autoscaling_stats(self) -> dict[str, float]:
        """The replica's statistics for :func:`autoscale`."""
        engine = self._engine
        share = engine.num_used_pages / engine.config.num_pages
        return {"requests": float(len(engine.requests)), "kv_share": share}

    def __del__(self) -> None:
        if hasattr(self, "_service"):
            self._service.served.engine.close()


class Gate:
    """Reads requests and passes them on to replicas.

    Args:
        engines: the deployment of :class:`Engine`.
        max_body: bytes of the largest body.
        timeout: seconds for a request; None for no limit.
    """

    def __init__(self, engines: DeploymentHandle, max_body: int, timeout: float | None) -> None:
        self._engines = engines.options(stream=True)
        self._max_body = max_body
        self._timeout = None if timeout is None else timeout + MARGIN_SECONDS

    async def __call__(self, _request: HttpRequest) -> Response:
        """The answer to a request of HTTP."""
        return Passed(self._engines, self._max_body, self._timeout)


class Passed(Response):
    """The answer of a replica, passed on."""

    def __init__(self, engines: DeploymentHandle, max_body: int, timeout: float | None) -> None:
        super().__init__()
        self._engines, self._max_body, self._timeout = engines, max_body, timeout
        self._head: Message | None = None
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = b""
            if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
                body = await read_body(scope, receive, self._max_body)
            with anyio.fail_after(self._timeout):
                await self._ask(scope, body, send)
        except ClientGoneError:
            return
        except ApiError as error:
            await self._end(error, scope, receive, send)
        except TimeoutError:
            late = ApiError(504, "the replica gave no answer in time", code="deadline_exceeded")
            await self._end(late, scope, receive, send)
        except (RayError, RayServeException) as error:
            lost = ApiError(
                503,
                f"the replica that answered is gone: {type(error).__name__}",
                code="replica_lost",
                retry_after=1,
            )
            await self._end(lost, scope, receive, send)

    async def _ask(self, scope: Scope, body: bytes, send: Send) -> None:
        """Ask one replica after the other until one has begun to answer."""
        known = {name: scope[name] for name in PASSED_ON if name in scope}
        if len(body) > LARGE:
            beginning = await anyio.to_thread.run_sync(beginning_of, body)
        else:
            beginning = beginning_of(body)
        for left in reversed(range(MAX_TRIES)):
            answer = self._engines.answer.remote(known, body, beginning=beginning)
            try:
                async for messages in answer:
                    for message in messages:
                        await self._pass_on(message, send)
                return
            except RayTaskError:
                raise
            except RayError:
                if self._is_started or not left:
                    raise
                self._head = None
            finally:
                answer.cancel()

    async def _pass_on(self, message: Message, send: Send) -> None:
        """Send a message on. The head waits for the first part of the body, since another replica
        may still answer until then.
        """
        if message["type"] == "http.response.start":
            self._head = message
            return
        if self._head is not None and not self._is_started:
            self._is_started = True
            await send(self._head)
        await send(message)

    async def _end(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        """End the answer with an error."""
        if not self._is_started:
            await refusal(error)(scope, receive, send)
            return
        headers = dict((self._head or {}).get("headers", ()))
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise error  # the connection breaks off
        text = event(error.body) + DONE
        await send({"type": "http.response.body", "body": text.encode(), "more_body": False})
