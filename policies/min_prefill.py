"""The lowest expected time to first token."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvroute.policies.base import Candidate, Choice, Request


@dataclass(frozen=True)
class MinPrefill:
    """Send the request where network + wait + read + prefill is lowest, in seconds.

    Estimates within `tolerance_s` plus `tolerance_share` of the lowest are equal as far as anyone knows: among them the
    instance that holds most of the prompt in GPU memory is taken, then the one with fewest requests in flight, then one
    at random. When the instance that holds the prefix is busy, another one that reads the pool, or even computes the
    prompt anew, wins by the same numbers.
    """

    tolerance_s: float = 0.005
    tolerance_share: float = 0.02

    def __post_init__(self) -> None:
        if self.tolerance_s < 0 or self.tolerance_share < 0:
            raise ValueError("tolerance_s and tolerance_share must not be negative")

    def choose(self, request: Request, candidates: Sequence[Candidate], random: Random) -> Choice:
        # The sum of `ttft_s`, written out: this is done for every instance at every request.
        seconds = [each.network_s + each.wait_s + each.read_s + each.prefill_s for each in candidates]
        limit = min(seconds) * (1 + self.tolerance_share) + self.tolerance_s
        best: list[int] = []
        best_key: tuple[int, int] | None = None
        for position, candidate in enumerate(candidates):
            if seconds[position] <= limit:
                key = (-candidate.gpu_tokens, candidate.in_flight)
                if best_key is None or key < best_key:
                    best, best_key = [position], key
                elif key == best_key:
                    best.append(position)
        index = best[0] if len(best) == 1 else random.choice(best)
        return Choice(index, self._reason(candidates, candidates[index]))

    @staticmethod
    def _reason(candidates: Sequence[Candidate], chosen: Candidate) -> str:
        held = chosen.gpu_tokens
        if any(each.gpu_tokens > held for each in candidates):
            return "pool read: holder busy" if chosen.read_tokens else "recompute: holder busy"
        if chosen.read_tokens:
            return "pool read"
        return "gpu hit" if held else "cold"
