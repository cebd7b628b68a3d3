"""Prometheus metrics. Label values come from the configuration and the instances, never from clients: their number is
bounded.

Requests only add to numbers in dicts: the event loop is the one writer, so there is nothing to lock. The library's own
counters would cost a request more than its decision does. A scrape turns the numbers into the library's families.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)
OVERHEAD_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)

Labels = tuple[str, ...]


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


class _Counter:
    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        self._family = (name, documentation, labels)
        self._values: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1.0) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def family(self) -> Metric:
        name, documentation, labels = self._family
        family = CounterMetricFamily(name, documentation, labels=labels)
        for values, amount in self._values.items():
            family.add_metric(values, amount)
        return family


class _Histogram:
    def __init__(self, name: str, documentation: str, labels: Sequence[str], bounds: Sequence[float]) -> None:
        self._family = (name, documentation, labels)
        self._bounds = bounds
        self._names = [*map(str, bounds), "+Inf"]
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}

    def observe(self, labels: Labels, value: float) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * len(self._names)
            self._sums[labels] = 0.0
        # A bucket holds what is at most its bound.
        counts[bisect_left(self._bounds, value)] += 1
        self._sums[labels] += value

    def family(self) -> Metric:
        name, documentation, labels = self._family
        family = HistogramMetricFamily(name, documentation, labels=labels)
        for values, counts in self._counts.items():
            buckets = list(zip(self._names, map(float, accumulate(counts)), strict=True))
            family.add_metric(values, buckets, self._sums[values])
        return family


class Metrics:
    """All metrics of one gateway, on a registry of its own."""

    def __init__(self) -> None:
        self._requests = _Counter(
            "kvroute_requests", "Requests finished, by what the client was told.", ("model", "status", "outcome")
        )
        self._failed_attempts = _Counter(
            "kvroute_failed_attempts",
            "Attempts that failed before the first byte of an answer.",
            ("instance", "error"),
        )
        self._decisions = _Counter(
            "kvroute_decisions", "Decisions, by policy and reason.", ("model", "policy", "reason")
        )
        self._prompt_tokens = _Counter("kvroute_prompt_tokens", "Prompt tokens of answered requests.", ("model",))
        self._cached_tokens = _Counter(
            "kvroute_cached_tokens",
            "Prompt tokens whose KV the engine had: as predicted, and as engines told.",
            ("model", "kind"),
        )
        self._ttft = _Histogram(
            "kvroute_ttft_seconds",
            "Seconds from a request's arrival to its first token; not streamed: to the first byte.",
            ("model", "instance"),
            SECONDS,
        )
        self._prediction_error = _Histogram(
            "kvroute_ttft_prediction_error_seconds",
            "Absolute difference between predicted and observed TTFT of streamed requests.",
            ("model",),
            SECONDS,
        )
        self._decide = _Histogram(
            "kvroute_decide_seconds",
            "Gateway seconds from a request's arrival to the decision: parsing, hashing, look-up, choice.",
            ("model",),
            OVERHEAD_SECONDS,
        )
        self._registry = CollectorRegistry()
        self._state = _StateCollector()
        self._registry.register(self._state)
        self._registry.register(
            _Families(
                [
                    self._requests,
                    self._failed_attempts,
                    self._decisions,
                    self._prompt_tokens,
                    self._cached_tokens,
                    self._ttft,
                    self._prediction_error,
                    self._decide,
                ]
            )
        )

    def finished(self, model: str, status: int, outcome: str) -> None:
        self._requests.add((model, str(status), outcome))

    def attempt_failed(self, instance: str, error: str) -> None:
        self._failed_attempts.add((instance, error))

    def decided(self, model: str, policy: str, reason: str, seconds: float) -> None:
        self._decisions.add((model, policy, reason))
        self._decide.observe((model,), seconds)

    def first_token(self, model: str, instance: str, seconds: float, predicted: float | None) -> None:
        """`predicted` is None where the observation is no first token (an answer that is not streamed)."""
        self._ttft.observe((model, instance), seconds)
        if predicted is not None:
            self._prediction_error.observe((model,), abs(predicted - seconds))

    def tokens(self, model: str, prompt: int, predicted_cached: int, cached: int | None) -> None:
        self._prompt_tokens.add((model,), prompt)
        self._cached_tokens.add((model, "predicted"), predicted_cached)
        if cached is not None:
            self._cached_tokens.add((model, "reported"), cached)

    def render(
        self, instances: Sequence[InstanceState], index_entries: Mapping[str, int], index_healthy: bool
    ) -> bytes:
        """The text exposition format, version 0.0.4. State that exists anyway comes in here, so that it costs requests
        nothing: `index_entries` are blocks by location."""
        self._state.instances = instances
        self._state.index_entries = index_entries
        self._state.index_healthy = index_healthy
        return generate_latest(self._registry)


class _Families(Collector):
    def __init__(self, metrics: Sequence[_Counter | _Histogram]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return [metric.family() for metric in self._metrics]


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
            GaugeMetricFamily("kvroute_instance_wait_seconds", "Expected wait of a new request.", labels=labels),
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
