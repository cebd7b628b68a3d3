"""Prometheus metrics. Label values come from the configuration, never from clients, so their number is bounded."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class InstanceState(NamedTuple):
    """What a scrape says of an instance that serves a model."""

    model: str
    instance: str
    up: bool
    in_flight: int
    running: int
    waiting: int
    kv_usage: float
    wait_s: float


class Metrics:
    """All metrics of one gateway, on a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._state = _StateCollector()
        self._registry.register(self._state)
        self._children: dict[tuple[object, ...], Any] = {}
        self._requests = Counter(
            "kvroute_requests",
            "Requests finished, by what the client was told.",
            ["model", "status", "outcome"],
            registry=self._registry,
        )
        self._failed_attempts = Counter(
            "kvroute_failed_attempts",
            "Attempts that failed before the first byte of an answer.",
            ["instance", "error"],
            registry=self._registry,
        )
        self._ttft = Histogram(
            "kvroute_ttft_seconds",
            "Seconds from a request's arrival to its first token; not streamed: to the first byte.",
            ["model", "instance"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._prediction_error = Histogram(
            "kvroute_ttft_prediction_error_seconds",
            "Absolute difference between predicted and observed TTFT of streamed requests.",
            ["model"],
            buckets=SECONDS,
            registry=self._registry,
        )
        self._decide = Histogram(
            "kvroute_decide_seconds",
            "Gateway seconds from a request's arrival to the decision: parsing, hashing, look-up, choice.",
            ["model"],
            buckets=OVERHEAD_SECONDS,
            registry=self._registry,
        )
        self._prompt_tokens = Counter(
            "kvroute_prompt_tokens", "Prompt tokens of answered requests.", ["model"], registry=self._registry
        )
        self._cached_tokens = Counter(
            "kvroute_cached_tokens",
            "Prompt tokens whose KV the engine had: as predicted, and as engines told.",
            ["model", "kind"],
            registry=self._registry,
        )
        self._decisions = Counter(
            "kvroute_decisions",
            "Decisions, by policy and reason.",
            ["model", "policy", "reason"],
            registry=self._registry,
        )

    def finished(self, model: str, status: int, outcome: str) -> None:
        _child(self._requests, self._children, model, status, outcome).inc()

    def attempt_failed(self, instance: str, error: str) -> None:
        _child(self._failed_attempts, self._children, instance, error).inc()

    def decided(self, model: str, policy: str, reason: str, seconds: float) -> None:
        _child(self._decisions, self._children, model, policy, reason).inc()
        _child(self._decide, self._children, model).observe(seconds)

    def first_token(self, model: str, instance: str, seconds: float, predicted: float | None) -> None:
        """`predicted` is None where the observation is no first token (an answer that is not streamed)."""
        _child(self._ttft, self._children, model, instance).observe(seconds)
        if predicted is not None:
            _child(self._prediction_error, self._children, model).observe(abs(predicted - seconds))

    def tokens(self, model: str, prompt: int, predicted_cached: int, cached: int | None) -> None:
        _child(self._prompt_tokens, self._children, model).inc(prompt)
        _child(self._cached_tokens, self._children, model, "predicted").inc(predicted_cached)
        if cached is not None:
            _child(self._cached_tokens, self._children, model, "reported").inc(cached)

    def render(
        self, instances: Sequence[InstanceState], index_entries: Mapping[str, int], index_healthy: bool
    ) -> bytes:
        """The text exposition format, version 0.0.4. State that exists anyway comes in here, so that it costs requests
        nothing: `index_entries` are blocks by location."""
        self._state.instances = instances
        self._state.index_entries = index_entries
        self._state.index_healthy = index_healthy
        return generate_latest(self._registry)


def _child(metric: Any, children: dict[tuple[object, ...], Any], *labels: object) -> Any:
    """The metric's series with these label values. The library's own look-up takes a lock and makes strings each time;
    the number of series is bounded, so they are kept."""
    key = (metric, *labels)
    child = children.get(key)
    if child is None:
        child = children[key] = metric.labels(*map(str, labels))
    return child


class _StateCollector(Collector):
    """Gauges of what is true at the scrape."""

    def __init__(self) -> None:
        self.instances: Sequence[InstanceState] = ()
        self.index_entries: Mapping[str, int] = {}
        self.index_healthy = True

    def collect(self) -> Iterable[Metric]:
        labels = ["model", "instance"]
        gauges = [
            GaugeMetricFamily("kvroute_instance_up", "1 where the instance passes its health checks.", labels=labels),
            GaugeMetricFamily("kvroute_instance_in_flight", "Requests of this gateway at the instance.", labels=labels),
            GaugeMetricFamily("kvroute_instance_running", "Running requests, as the engine reports.", labels=labels),
            GaugeMetricFamily("kvroute_instance_waiting", "Queued requests, as the engine reports.", labels=labels),
            GaugeMetricFamily("kvroute_instance_kv_usage", "Share of GPU KV blocks in use, 0 to 1.", labels=labels),
            GaugeMetricFamily(
                "kvroute_instance_wait_seconds", "Expected wait of a new request's prefill.", labels=labels
            ),
        ]
        for model, instance, *values in self.instances:
            for gauge, value in zip(gauges, values, strict=True):
                gauge.add_metric([model, instance], float(value))
        yield from gauges
        entries = GaugeMetricFamily("kvroute_index_entries", "Blocks known, by location.", labels=["location"])
        for location, count in self.index_entries.items():
            entries.add_metric([location], count)
        yield entries
        healthy = GaugeMetricFamily("kvroute_index_healthy", "0 while Redis is away and its shadow serves.")
        healthy.add_metric([], float(self.index_healthy))
        yield healthy
