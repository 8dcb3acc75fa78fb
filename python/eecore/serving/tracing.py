"""An OpenTelemetry span for each request that reached the engine, sent over HTTP to a collector.

Spans are made where ``OTEL_EXPORTER_OTLP_ENDPOINT`` is set and ``pip install '.[otel]'`` was
done; other settings are OpenTelemetry's own. The parent is the client's ``traceparent``. No span
has text of prompts or answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from starlette.types import Scope

from eecore.exit_text import exit_text
from eecore.output import Output
from eecore.serving.asking import Asked

LOGGER = logging.getLogger("eecore")
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FAILURES = ("error", "timeout")


def tracing_of_environment() -> Tracing | None:
    """The tracing that the environment asks for; None: none, or its packages are not installed."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return None
    try:
        sdk = import_module("opentelemetry.sdk.trace")
        export = import_module("opentelemetry.sdk.trace.export")
        resources = import_module("opentelemetry.sdk.resources")
        otlp = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    except ImportError as error:
        LOGGER.warning("no traces: %s: pip install '.[otel]' in a clone of eecore", error)
        return None
    name = os.environ.get("OTEL_SERVICE_NAME", "eecore")
    provider = sdk.TracerProvider(resource=resources.Resource.create({"service.name": name}))
    provider.add_span_processor(export.BatchSpanProcessor(otlp.OTLPSpanExporter()))
    return Tracing(provider)


class Tracing:
    """Makes the spans of a server.

    Args:
        provider: OpenTelemetry's TracerProvider.
    """

    def __init__(self, provider: Any) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("eecore")
        self._kind = import_module("opentelemetry.trace").SpanKind.SERVER
        self._parent_in = import_module("opentelemetry.propagate").extract

    def begin(self, scope: Scope, asked: Asked, began: int) -> RequestSpan:
        """The span of a request.

        Args:
            began: when it arrived, in nanoseconds since 1970.
        """
        operation = "text_completion" if scope["path"] == "/v1/completions" else "chat"
        headers = {str(name, "latin-1"): str(value, "latin-1") for name, value in scope["headers"]}
        span = self._tracer.start_span(
            f"{operation} {asked.model}",
            context=self._parent_in(headers),
            kind=self._kind,
            start_time=began,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": asked.model,
                "gen_ai.usage.input_tokens": asked.prompt_tokens,
                "eecore.exit": exit_text(asked.choices[0].prepared.exit),
                "eecore.stream": bool(asked.body.stream),
            },
        )
        return RequestSpan(span)

    def close(self) -> None:
        """Send what has not been sent yet; without this call that happens when Python ends."""
        self._provider.shutdown()


class RequestSpan:
    """The span of one request, however that ends."""

    def __init__(self, span: Any) -> None:
        self._span = span

    def end(self, outputs: Sequence[Output], outcome: str | None) -> None:
        """End the span.

        Args:
            outputs: the outputs of the sequences that ended.
            outcome: how the other sequences ended: cancelled, error or timeout; None: there are
                none.
        """
        span, stats = self._span, [output.stats for output in outputs]
        reasons = [output.finish_reason for output in outputs]
        reasons += [outcome] if outcome is not None else []
        tokens = sum(each.generated_tokens for each in stats)
        span.set_attribute("gen_ai.response.finish_reasons", reasons)
        span.set_attribute("gen_ai.usage.output_tokens", tokens)
        if tokens:
            depth = sum(each.mean_exit_layer * each.generated_tokens for each in stats)
            span.set_attribute("eecore.mean_exit_layer", depth / tokens)
            first = min(each.time_to_first_token_s for each in stats if each.generated_tokens)
            span.set_attribute("eecore.time_to_first_token_s", first)
        span.set_attribute("eecore.drafted_tokens", sum(each.drafted for each in stats))
        span.set_attribute("eecore.accepted_tokens", sum(each.accepted for each in stats))
        failure = next((reason for reason in reasons if reason in FAILURES), None)
        if failure is not None:
            trace = import_module("opentelemetry.trace")
            span.set_status(trace.Status(trace.StatusCode.ERROR, failure))
        span.end()
