"""The cost model: expected seconds to the first token, from configured parameters.

    TTFT(i) = network(i) + wait(i) + min over plans [ read(i, plan) + prefill(i, plan) ]

Pure functions of their arguments.
"""

import msgspec


class CostParameters(msgspec.Struct, frozen=True):
    """What is believed of an instance that serves a model and of the path to its pool: seconds, tokens, bytes."""

    network_s: float = 0.001
    """Round trip to the instance and back."""
    overhead_s: float = 0.02
    """Fixed cost of a request in the engine: API server, scheduling, first decode step."""
    prefill_tokens_per_s: float = 8000.0
    """Linear prefill rate, without attention's quadratic part."""
    attention_s_per_token2: float = 0.0
    """Seconds per (token x token of context) pair that attention looks at: a prefill of tokens [p, n) adds
    attention_s_per_token2 * (n^2 - p^2) / 2."""
    kv_bytes_per_token: float = 131072.0
    """KV bytes of one token, over all layers and ranks."""
    pool_bytes_per_s: float = 0.0
    """Bandwidth of the pool, shared by all reads in progress over the fleet; 0.0: no pool is attached."""
    pool_latency_s: float = 0.3
    """Fixed cost of a pool read (lookup, first byte, copy to the GPU)."""
    pool_chunk_tokens: int = 256
    """Only whole chunks of this many tokens can be read from the pool."""


class Plan(msgspec.Struct, frozen=True, gc=False):
    """How an instance would come by the KV of a prompt."""

    gpu_tokens: int
    read_tokens: int
    """Tokens read from the pool, beyond `gpu_tokens`."""
    read_s: float
    prefill_s: float

    @property
    def seconds(self) -> float:
        return self.read_s + self.prefill_s
