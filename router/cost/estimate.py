"""From tokens and bytes to seconds. Pure functions; the parameters and their units are in `CostParameters`."""

from kvroute.cost.model import CostParameters, Plan


def prefill_seconds(p: CostParameters, computed_from: int, prompt_tokens: int) -> float:
    """Seconds to compute the tokens [computed_from, prompt_tokens) of a prompt.

    overhead + new / rate + a * (n^2 - p^2) / 2: the linear layers cost the same for every token; causal attention at
    position t looks at t earlier tokens, so the tokens from p to n look at (n^2 - p^2) / 2 pairs.
    """
    new = prompt_tokens - computed_from
    pairs = (prompt_tokens + computed_from) * new / 2
    return p.overhead_s + new / p.prefill_tokens_per_s + p.attention_s_per_token2 * pairs


def read_seconds(p: CostParameters, size: float, bytes_in_flight: float) -> float:
    """Seconds to read `size` bytes from the pool while `bytes_in_flight` are being read by others.

    latency + (own + others') / bandwidth: the pool is shared like a processor, and a wave of equal reads finishes
    together. Measured on a flash pool over NVMe-oF with 8, 16 and 32 readers of 7.7 GB each: 0.3 s + bytes / 9.6 GB/s.
    """
    return p.pool_latency_s + (size + bytes_in_flight) / p.pool_bytes_per_s


def best_plan(
    p: CostParameters, prompt_tokens: int, gpu_tokens: int, pool_tokens: int, pool_bytes_in_flight: float
) -> Plan:
    """The quicker of two ways to the first token: compute all that the GPU does not hold, or read what the pool holds
    of it and compute the rest.

    `gpu_tokens` and `pool_tokens` are leading tokens that the GPU and the pool hold. The prompt's last token is always
    computed, and only whole chunks can be read.
    """
    most = max(0, prompt_tokens - 1)
    gpu_tokens = min(gpu_tokens, most)
    compute = Plan(gpu_tokens, 0, 0.0, prefill_seconds(p, gpu_tokens, prompt_tokens))
    pool_tokens = min(pool_tokens, most) // p.pool_chunk_tokens * p.pool_chunk_tokens
    if pool_tokens <= gpu_tokens or p.pool_bytes_per_s <= 0:
        return compute
    read_tokens = pool_tokens - gpu_tokens
    read = Plan(
        gpu_tokens,
        read_tokens,
        read_seconds(p, read_tokens * p.kv_bytes_per_token, pool_bytes_in_flight),
        prefill_seconds(p, pool_tokens, prompt_tokens),
    )
    return read if read.seconds < compute.seconds else compute
