"""What is counted, for Prometheus: eecore's names, and vLLM's where routers read them."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from eecore.engine.engine import Engine
from eecore.output import Output

__all__ = ["CONTENT_TYPE", "Metrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """The counters of one server.

    Args:
        engine: whose state is read when somebody asks.
        model_name: the label of vLLM's metrics.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._has_prefix_cache = engine.has_prefix_cache
        self._num_layers = engine.network.config.num_layers
        self.requests = self._counter("requests", "Requests by how they ended.", "outcome")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Tokens of prompts that the prefix cache was asked for."
        )
        self.prefix_hits = self._counter(
            "prefix_cache_hits", "Tokens of prompts that came from the prefix cache."
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.exits = self._counter("tokens_by_exit_layer", "Tokens by exit layer.", "exit_layer")
        self.layers_run = self._counter("layers_run", "Layers run, a position each.")
        self.layers_skipped = self._counter(
            "layers_skipped",
            "Layers below the last one that tokens left out, by exit layer.",
            "exit_layer",
        )
        self.drafted = self._counter("drafted_tokens", "Tokens drafted.")
        self.accepted = self._counter("accepted_tokens", "Drafts that stood.")
        self.first_token = self._seconds("time_to_first_token", "From the request to its first.")
        self.per_token = self._seconds(
            "inter_token", "Between the tokens of a request, its mean; one a request."
        )
        self.duration = self._seconds("request", "From the request to its end.")
        self._vllm_prompt = self._vllm("prompt_tokens")
        self._vllm_tokens = self._vllm("generation_tokens")
        self._vllm_queries = self._vllm("prefix_cache_queries")
        self._vllm_hits = self._vllm("prefix_cache_hits")
        self.registry.register(_State(engine, model_name))

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"eecore_{name}", what, labels, registry=self.registry)

    def _vllm(self, name: str) -> Counter:
        what = f"As eecore_{name}."
        return Counter(f"vllm:{name}", what, ("model_name",), registry=self.registry)

    def _seconds(self, name: str, what: str) -> Histogram:
        name = f"eecore_{name}_seconds"
        return Histogram(name, what, buckets=SECONDS, registry=self.registry)

    def refused(self) -> None:
        """A request that did not get to the engine."""
        self.requests.labels("refused").inc()

    def ended(self, outcome: str, output: Output | None) -> None:
        """A sequence that ended.

        Args:
            outcome: stop, length, error, cancelled or timeout.
            output: what there is of it.
        """
        self.requests.labels(outcome).inc()
        if output is None:
            return
        stats = output.stats
        self.prompt_tokens.inc(stats.prompt_tokens)
        self.generation_tokens.inc(stats.generated_tokens)
        self._vllm_prompt.labels(self._model_name).inc(stats.prompt_tokens)
        self._vllm_tokens.labels(self._model_name).inc(stats.generated_tokens)
        if self._has_prefix_cache:
            self.prefix_queries.inc(stats.prompt_tokens)
            self.prefix_hits.inc(stats.cached_tokens)
            self._vllm_queries.labels(self._model_name).inc(stats.prompt_tokens)
            self._vllm_hits.labels(self._model_name).inc(stats.cached_tokens)
        self.layers_run.inc(stats.layers_run)
        self.drafted.inc(stats.drafted)
        self.accepted.inc(stats.accepted)
        for layer, count in Counts(output.exit_layers).items():
            self.exits.labels(str(layer)).inc(count)
            if not stats.drafted:  # what verifies drafts runs all layers
                self.layers_skipped.labels(str(layer)).inc(count * (self._num_layers - layer))
        if stats.generated_tokens:
            self.first_token.observe(stats.time_to_first_token_s)
        if stats.generated_tokens > 1:
            after = stats.total_s - stats.time_to_first_token_s
            self.per_token.observe(after / (stats.generated_tokens - 1))
        self.duration.observe(stats.total_s)

    def text(self) -> bytes:
        """In Prometheus's own format."""
        return generate_latest(self.registry)


class _State(Collector):
    """What the engine does just now."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        engine = self._engine
        used, pages = engine.num_used_pages, engine.config.num_pages
        for name, what, value in (
            ("requests_running", "Sequences that run.", engine.num_running),
            ("requests_waiting", "Sequences that wait.", engine.num_waiting),
            ("requests_held", "Sequences whose clients read too slowly.", engine.num_held),
            ("kv_pages", "Pages of the KV cache.", pages),
            ("kv_pages_used", "Pages of the KV cache in use.", used),
            ("kv_pages_cached", "Pages that a prompt may begin with.", engine.num_cached_pages),
        ):
            yield GaugeMetricFamily(f"eecore_{name}", what, value=value)
        for name, share in (
            ("num_requests_running", float(engine.num_running)),
            ("num_requests_waiting", float(engine.num_waiting)),
            ("kv_cache_usage_perc", used / pages),
            ("gpu_cache_usage_perc", used / pages),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", "For routers.", labels=["model_name"])
            family.add_metric([self._model_name], share)
            yield family
