"""Counters for Prometheus: under eecore's names, and under vLLM's where routers read those."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from eecore.engine.engine import Engine
from eecore.exit_text import exit_text
from eecore.exits import Exit
from eecore.output import Output

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
# Policies beyond the server's own that get a label each, since requests may name any number.
MAX_POLICIES = 32
OTHER_POLICY = "other"
# vLLM's words for how a request ended.
VLLM_REASONS = {"cancelled": "abort", "timeout": "abort"}


class Metrics:
    """The counters of one server.

    Args:
        engine: its state is read with each scrape.
        model_name: the label of vLLM's metrics.
        policies: those that always have a label of their own.
    """

    def __init__(self, engine: Engine, model_name: str, policies: Iterable[Exit] = ()) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._has_prefix_cache = engine.has_prefix_cache
        self._num_layers = engine.num_layers
        self._policies = {exit_text(policy) for policy in policies}
        self._max_policies = len(self._policies) + MAX_POLICIES
        self.requests = self._counter("requests", "Requests by how they ended.", "outcome")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Tokens of prompts that the prefix cache was asked for."
        )
        self.prefix_hits = self._counter(
            "prefix_cache_hits", "Tokens of prompts that came from the prefix cache."
        )
        self.generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self.exits = self._counter(
            "tokens_by_exit_layer",
            "Tokens by policy and exit layer: of an accepted draft the layer that drafted it, 0 "
            "where it was looked up.",
            "policy",
            "exit_layer",
        )
        self.layers_run = self._counter(
            "layers_run",
            "Layers run after the prompt, for each position, by exit layer; rounds of drafts count "
            "under the last layer.",
            "exit_layer",
        )
        self.layers_skipped = self._counter(
            "layers_skipped",
            "Layers that tokens skipped, by exit layer.",
            "exit_layer",
        )
        self.drafted = self._counter("drafted_tokens", "Tokens drafted, by policy.", "policy")
        self.accepted = self._counter("accepted_tokens", "Accepted drafts, by policy.", "policy")
        self.preemptions = self._counter(
            "preemptions", "Sequences that gave their pages to others."
        )
        self.first_token = self._seconds(
            "eecore_time_to_first_token_seconds",
            "Seconds from the request to its first token.",
            "vllm:time_to_first_token_seconds",
        )
        self.per_token = self._seconds(
            "eecore_inter_token_seconds",
            "Mean seconds between the tokens of a request, counted once a request.",
            "vllm:request_time_per_output_token_seconds",
        )
        self.each_token = self._seconds(
            "vllm:inter_token_latency_seconds",
            "Mean seconds between the tokens of a request, counted once a token.",
            "vllm:time_per_output_token_seconds",
        )
        self.duration = self._seconds(
            "eecore_request_seconds",
            "Seconds from the request to its end.",
            "vllm:e2e_request_latency_seconds",
        )
        self._vllm_ends = self._vllm("request_success", "finished_reason")
        self._pairs = [
            (own, self._vllm(name).labels(model_name))
            for own, name in (
                (self.prompt_tokens, "prompt_tokens"),
                (self.generation_tokens, "generation_tokens"),
                (self.preemptions, "num_preemptions"),
                (self.prefix_queries, "prefix_cache_queries"),
                (self.prefix_hits, "prefix_cache_hits"),
            )
        ]
        """Pairs of a counter, under eecore's name and vLLM's."""
        self._drafts: dict[str, tuple[Counter, Counter]] = {
            field: (own, self._vllm(f"spec_decode_num_{name}_tokens").labels(model_name))
            for field, own, name in (
                ("drafted", self.drafted, "draft"),
                ("accepted", self.accepted, "accepted"),
            )
        }
        """Counters of drafts and accepted drafts in vLLM's words, for each field of the statistics.
        """
        self.registry.register(_State(engine, model_name))

    def _counter(self, name: str, what: str, *labels: str) -> Counter:
        return Counter(f"eecore_{name}", what, labels, registry=self.registry)

    def _vllm(self, name: str, *labels: str) -> Counter:
        return Counter(
            f"vllm:{name}", "For routers.", ("model_name", *labels), registry=self.registry
        )

    def _seconds(self, name: str, what: str, alias: str) -> _Seconds:
        seconds = _Seconds(name, what, alias, self._model_name)
        self.registry.register(seconds)
        return seconds

    def refused(self) -> None:
        """Count a request that did not reach the engine."""
        self.requests.labels("refused").inc()

    def ended(self, outcome: str, output: Output | None, policy: Exit) -> None:
        """Count a sequence that ended.

        Args:
            outcome: stop, length, error, cancelled or timeout.
            output: the sequence's output, as far as it got; None: none.
        """
        self.requests.labels(outcome).inc()
        reason = VLLM_REASONS.get(outcome, outcome)
        self._vllm_ends.labels(self._model_name, reason).inc()
        if output is None:
            return
        stats = output.stats
        looks = self._has_prefix_cache and output.prompt_logprobs is None
        asked = stats.prompt_tokens if looks else 0
        counts = (stats.prompt_tokens, stats.generated_tokens, stats.preemptions)
        for pair, count in zip(self._pairs, (*counts, asked, stats.cached_tokens), strict=True):
            for counter in pair:
                counter.inc(count)
        self._count_depths(output, self._label(policy))
        if stats.generated_tokens:
            self.first_token.observe(stats.time_to_first_token_s)
        if stats.generated_tokens > 1:
            others = stats.generated_tokens - 1
            mean = (stats.total_s - stats.time_to_first_token_s) / others
            self.per_token.observe(mean)
            self.each_token.observe(mean, others)
        self.duration.observe(stats.total_s)

    def _count_depths(self, output: Output, policy: str) -> None:
        """Count drafts and exit layers."""
        stats, last = output.stats, self._num_layers
        for field, (own, alias) in self._drafts.items() if stats.drafted else ():
            own.labels(policy).inc(getattr(stats, field))
            alias.inc(getattr(stats, field))
        for layer, count in Counts(output.exit_layers).items():
            self.exits.labels(policy, str(layer)).inc(count)
            if not stats.drafted:  # tokens that verified drafts ran all layers
                self.layers_skipped.labels(str(layer)).inc(count * (last - layer))
        # The first token comes with the prompt, at full depth.
        early = [e for e in output.exit_layers[1:] if e < last and not stats.drafted]
        for layer, count in Counts(early).items():
            self.layers_run.labels(str(layer)).inc(layer * count)
        self.layers_run.labels(str(last)).inc(max(stats.layers_run - sum(early), 0))

    def _label(self, policy: Exit) -> str:
        """A policy's label; policies after the first :data:`MAX_POLICIES` share one."""
        text = exit_text(policy)
        if text not in self._policies and len(self._policies) >= self._max_policies:
            return OTHER_POLICY
        self._policies.add(text)
        return text

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class _Seconds(Collector):
    """A histogram under two names; vLLM's also has the model's name as a label."""

    def __init__(self, name: str, what: str, alias: str, model_name: str) -> None:
        self._names = (name, alias)
        self._what = what
        self._model_name = model_name
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, count: int = 1) -> None:
        """Add a value ``count`` times."""
        self._counts[bisect_left(SECONDS, seconds)] += count
        self._sum += seconds * count

    def collect(self) -> Iterator[Metric]:
        limits = [*map(str, SECONDS), "+Inf"]
        buckets = list(zip(limits, map(float, accumulate(self._counts)), strict=True))
        for name in self._names:
            labels = {"model_name": self._model_name} if name.startswith("vllm:") else {}
            family = HistogramMetricFamily(name, self._what, labels=list(labels))
            family.add_metric(list(labels.values()), buckets, self._sum)
            yield family


class _State(Collector):
    """The engine's state at the time of a scrape."""

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
        yield CounterMetricFamily(
            "eecore_failed_iterations",
            "Iterations, or parts of one, that raised and were done again.",
            value=engine.num_failed_iterations,
        )
        for name, share in (
            ("num_requests_running", float(engine.num_running)),
            ("num_requests_waiting", float(engine.num_waiting)),
            ("kv_cache_usage_perc", used / pages),
            ("gpu_cache_usage_perc", used / pages),
        ):
            family = GaugeMetricFamily(f"vllm:{name}", "For routers.", labels=["model_name"])
            family.add_metric([self._model_name], share)
            yield family
        sizes = {"block_size": str(engine.config.page_size), "num_gpu_blocks": str(pages)}
        yield InfoMetricFamily("vllm:cache_config", "For routers.", value=sizes)
