"""How long the work of an engine takes: the formulas, and the numbers of one machine.

All times are simulated seconds; who runs faster than the clock divides by the time scale.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Of computing. The defaults are near a machine of eight accelerators with a 480B mixture-of-experts model, idle,
    as measured with prompts of 30k tokens: 3,700 to 5,100 prompt tokens/s, 24 to 32 ms a decoded token."""

    prefill_tokens_per_s: float = 6000.0
    attention_s_per_token2: float = 2e-9
    """Seconds for each pair of a token and an earlier one that attention looks at."""
    overhead_s: float = 0.05
    """Once a request, with the last of its prefill: scheduling, sampling, the API server."""
    decode_s_per_token: float = 0.025
    """One step of all running decodes: a batch costs no more than one of them."""
    max_batched_tokens: int = 8192
    """Prompt tokens that one step computes at most (chunked prefill)."""
    max_running: int = 64
    """Requests that hold blocks at the same time."""

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds to compute prompt tokens [start, end) when those before them are cached.

        (end - start) / rate for the linear layers, and causal attention over (end^2 - start^2) / 2 pairs.
        """
        new = end - start
        return new / self.prefill_tokens_per_s + self.attention_s_per_token2 * new * (start + end) / 2


@dataclass(frozen=True, slots=True)
class PoolTiming:
    """Of reading KV from a shared pool: latency + bytes / (bandwidth / readers), where `readers` is whoever reads at
    the time. The defaults fit an array of four flash drives behind one 100 GbE port, for the same model."""

    bytes_per_s: float = 9.6e9
    """Of the pool, for all its readers together."""
    latency_s: float = 0.3
    """Before the first byte: looking up and opening files. Takes no bandwidth."""
    kv_bytes_per_token: int = 253_952
    """62 layers x 2 (K and V) x 8 KV heads x 128 x 2 bytes: the model that model/config.json describes."""
