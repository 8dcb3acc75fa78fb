"""Spans of requests."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

import eecore
from eecore.serving.tracing import ENDPOINTS, Tracing, tracing_of_environment
from servers import LONG, Asker, asker, assert_idle, listening
from workloads import until

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="pip install '.[otel]'")

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHATS = "/v1/chat/completions"
LOCK = {"messages": [{"role": "user", "content": "lock the front door"}]}


class Traced:
    """A server, and the spans of its requests."""

    def __init__(self, model: eecore.Model, **settings: Any) -> None:
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        provider, self._exporter = sdk.TracerProvider(), InMemorySpanExporter()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.server: Asker = asker(model, **settings)
        self.server.service.tracing = Tracing(provider)

    def span(self) -> Any:
        """The only span."""
        (span,) = self._exporter.get_finished_spans()
        return span


@pytest.fixture
def traced(intent: eecore.Model) -> Traced:
    return Traced(intent)


@pytest.mark.parametrize("streams", [False, True])
def test_a_request_is_a_span(traced: Traced, streams: bool) -> None:
    body = {**LOCK, "exit": "fixed:6", "stream": streams, "model": "intent"}
    assert traced.server.post(CHATS, body).status_code == 200
    span = traced.span()
    found = dict(span.attributes)
    assert span.name == "chat intent"
    assert 0 < found.pop("eecore.time_to_first_token_s") < (span.end_time - span.start_time) / 1e9
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "intent",
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.response.finish_reasons": ("stop",),
        "eecore.exit": "fixed:6",
        "eecore.stream": streams,
        "eecore.mean_exit_layer": 6.0,
        "eecore.drafted_tokens": 0,
        "eecore.accepted_tokens": 0,
    }
    assert span.status.is_unset
    assert "lock" not in span.to_json()


def test_the_trace_of_the_client_goes_on(traced: Traced) -> None:
    traced.server.post(CHATS, LOCK, headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
    span = traced.span()
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == PARENT


def test_what_was_too_late_is_an_error(endless: eecore.Model) -> None:
    traced = Traced(endless, timeout=0.1)
    body = {"prompt": [3], "max_tokens": LONG - 1, "ignore_eos": True}
    assert traced.server.post("/v1/completions", body).status_code == 504
    span = traced.span()
    assert not span.status.is_ok
    assert span.status.description == "timeout"
    assert span.attributes["gen_ai.response.finish_reasons"] == ("timeout",)


def test_a_client_that_left_is_none(endless: eecore.Model) -> None:
    traced = Traced(endless)
    body = {"prompt": [3], "max_tokens": LONG - 1, "ignore_eos": True}
    with listening(traced.server.service) as address:
        client = http.client.HTTPConnection(address.removeprefix("http://"))
        headers = {"content-type": "application/json"}
        client.request("POST", "/v1/completions", json.dumps(body), headers)
        engine = traced.server.service.served.engine.engine
        assert until(lambda: engine.num_running == 1)
        client.close()
        assert_idle(traced.server.service)
    span = traced.span()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("cancelled",)
    assert span.status.is_unset


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A collector that listens, and the spans that it received."""
    sent: list[tuple[str, bytes]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            sent.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", sent
        server.shutdown()
        thread.join()


def test_spans_go_where_the_environment_says(
    intent: eecore.Model,
    collector: tuple[str, list[tuple[str, bytes]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    address, sent = collector
    monkeypatch.setenv(ENDPOINTS[0], address)
    server = asker(intent)
    server.post(CHATS, LOCK)
    tracing = server.service.tracing
    assert tracing is not None
    tracing.close()
    ((path, body),) = sent
    assert path == "/v1/traces"
    assert b"chat intent" in body


def test_without_an_endpoint_nothing_is_traced(
    monkeypatch: pytest.MonkeyPatch, server: Asker
) -> None:
    for name in ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    assert tracing_of_environment() is None
    assert server.service.tracing is None
