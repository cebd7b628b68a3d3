"""What an engine reports at /metrics: the names, labels and buckets of vLLM 0.32, of those that tell load and caching.

Seconds are the wall's: a simulated engine that runs faster than the clock is a fast engine to those who measure it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

ENGINE = "0"
"""The data-parallel rank, as a label's value."""
TTFT_S = tuple(
    map(float, "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560".split())
)
REQUEST_S = tuple(map(float, "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680".split()))
TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


@dataclass(slots=True)
class Totals:
    """Since the start."""

    requests: int = 0
    stopped: int = 0
    """Finished because the answer was complete."""
    cut_off: int = 0
    """Finished because max_tokens was reached."""
    aborted: int = 0
    """Cancelled by the client."""
    prefix_queries: int = 0
    """Prompt tokens looked up in the GPU's cache."""
    prefix_hits: int = 0
    external_queries: int = 0
    """Prompt tokens looked up in the pool: those that the GPU did not have."""
    external_hits: int = 0
    prompt_tokens: int = 0
    """Of completed prefills."""
    computed_tokens: int = 0
    generation_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Gauges:
    running: int
    waiting: int
    kv_usage: float
    """0 to 1."""


@dataclass(slots=True)
class Histograms:
    """Of requests that got their first token."""

    model: str
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    ttft_s: Histogram = field(init=False)
    queue_s: Histogram = field(init=False)
    prefill_s: Histogram = field(init=False)
    """From admission to the first token, so that a read from the pool is in it."""
    computed_tokens: Histogram = field(init=False)

    def __post_init__(self) -> None:
        self.ttft_s = self._made("time_to_first_token_seconds", "time to first token in seconds", TTFT_S)
        self.queue_s = self._made("request_queue_time_seconds", "time spent in WAITING phase for request", REQUEST_S)
        self.prefill_s = self._made("request_prefill_time_seconds", "time spent in PREFILL phase", REQUEST_S)
        self.computed_tokens = self._made(
            "request_prefill_kv_computed_tokens", "new KV tokens computed during prefill (excluding cached)", TOKENS
        )

    def _made(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        labels = ("engine", "model_name")
        family = Histogram(f"vllm:{name}", f"Histogram of {what}.", labels, registry=self.registry, buckets=buckets)
        return family.labels(ENGINE, self.model)


class Report(Collector):
    """All of it, as it is when asked."""

    def __init__(
        self,
        histograms: Histograms,
        totals: Totals,
        gauges: Callable[[], Gauges],
        *,
        block_tokens: int,
        blocks: int,
    ) -> None:
        self._model = histograms.model
        self._totals = totals
        self._gauges = gauges
        self._block_tokens = block_tokens
        self._blocks = blocks
        self._registry = histograms.registry
        self._registry.register(self)

    def text(self) -> bytes:
        """In Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        now, sums = self._gauges(), self._totals
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", now.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", now.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", now.kv_usage)
        yield self._counter("prefix_cache_queries", "Prefix cache queries, in tokens.", sums.prefix_queries)
        yield self._counter("prefix_cache_hits", "Prefix cache hits, in tokens.", sums.prefix_hits)
        yield self._counter("external_prefix_cache_queries", "Pool cache queries, in tokens.", sums.external_queries)
        yield self._counter("external_prefix_cache_hits", "Pool cache hits, in tokens.", sums.external_hits)
        yield self._counter("prompt_tokens", "Number of prefill tokens processed.", sums.prompt_tokens)
        cached = sums.prefix_hits + sums.external_hits
        yield self._counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", cached)
        yield self._counters(
            "prompt_tokens_by_source",
            "Number of prompt tokens by source.",
            "source",
            {
                "local_compute": sums.computed_tokens,
                "local_cache_hit": sums.prefix_hits,
                "external_kv_transfer": sums.external_hits,
            },
        )
        yield self._counters(
            "prompt_tokens_cached_by_source",
            "Prefix-cache hit tokens by the cache tier that supplied them.",
            "source",
            {"device": sums.prefix_hits, "host": 0, "p2p": 0, "disk": 0, "external_unspecified": sums.external_hits},
        )
        yield self._counter("generation_tokens", "Number of generation tokens processed.", sums.generation_tokens)
        yield self._counter("num_preemptions", "Cumulative number of preemption from the engine.", 0)
        yield self._counters(
            "request_success",
            "Count of successfully processed requests.",
            "finished_reason",
            {"stop": sums.stopped, "length": sums.cut_off, "abort": sums.aborted, "error": 0, "repetition": 0},
        )
        yield self._cache_config()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=("engine", "model_name"))
        family.add_metric((ENGINE, self._model), value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=("engine", "model_name"))
        family.add_metric((ENGINE, self._model), value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=("engine", "model_name", label))
        for each, value in values.items():
            family.add_metric((ENGINE, self._model, each), value)
        return family

    def _cache_config(self) -> Metric:
        """Constant: the labels tell."""
        labels = {
            "block_size": str(self._block_tokens),
            "enable_prefix_caching": "True",
            "engine": ENGINE,
            "kv_cache_size_tokens": str(self._block_tokens * self._blocks),
            "num_gpu_blocks": str(self._blocks),
        }
        family = GaugeMetricFamily(
            "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labels=tuple(labels)
        )
        family.add_metric(tuple(labels.values()), 1.0)
        return family
