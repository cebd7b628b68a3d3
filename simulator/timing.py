"""How long a simulated engine takes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Timing:
    """Defaults: about one machine of eight accelerators with a 480B mixture-of-experts model, idle, as measured with
    30k-token prompts (3,700 to 5,100 prompt tokens/s, 24 to 32 ms a decoded token)."""

    prefill_tokens_per_s: float = 6000.0
    attention_s_per_token2: float = 2e-9
    """Seconds for each pair of a token and an earlier one that attention looks at."""
    overhead_s: float = 0.05
    """Once a request: API server, scheduling, sampling."""
    decode_s_per_token: float = 0.025
    """One step of all running decodes; batching is free."""
    max_batched_tokens: int = 8192
    """Prompt tokens that one step computes at most (chunked prefill)."""
    max_running: int = 64

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds to compute prompt tokens [start, end): linear layers, and causal attention over (end^2 - start^2) / 2
        pairs."""
        new = end - start
        return new / self.prefill_tokens_per_s + self.attention_s_per_token2 * new * (end + start) / 2
