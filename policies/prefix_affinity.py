"""Follow the prefix."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import xxhash

from kvroute.policies.base import Candidate, Choice, Request, load


@dataclass(frozen=True)
class PrefixAffinity:
    """Send the request to the instance that holds most of its prompt in GPU memory, unless that one is overloaded.

    A match counts from `min_share` of the prompt on. The holder is overloaded when it has more than `max_extra`
    requests more than the least loaded instance and more than `max_ratio` times as many: both, as in sglang-router's
    cache_aware (its balance_abs_threshold and balance_rel_threshold), but judged for this request's holder alone, so
    that one hot instance does not switch affinity off for the whole fleet.

    Without a match, prompts that begin alike meet by rendezvous hashing (Thaler and Ravishankar, 1998) of their first
    blocks, so that the second of two simultaneous siblings follows the first. Overloaded instances are left out.
    """

    min_share: float = 0.1
    max_extra: int = 8
    max_ratio: float = 1.5

    def __post_init__(self) -> None:
        if not 0 <= self.min_share <= 1:
            raise ValueError("min_share must be between 0 and 1")
        if self.max_extra < 0 or self.max_ratio < 1:
            raise ValueError("max_extra must not be negative, max_ratio at least 1")

    def choose(self, request: Request, candidates: Sequence[Candidate], random: Random) -> Choice:
        least = min(load(candidate) for candidate in candidates)
        limit = max(least + self.max_extra, least * self.max_ratio)
        allowed = [i for i, candidate in enumerate(candidates) if load(candidate) <= limit]
        longest = max(candidates[i].gpu_tokens for i in allowed)
        if longest and longest >= self.min_share * request.prompt_tokens:
            holders = [i for i in allowed if candidates[i].gpu_tokens == longest]
            return Choice(min(holders, key=lambda i: (load(candidates[i]), random.random())), "longest prefix")
        if any(candidate.gpu_tokens >= max(1.0, self.min_share * request.prompt_tokens) for candidate in candidates):
            return Choice(self._least(allowed, candidates, random), "least loaded: holder busy")
        if request.prefix_key:
            key = request.prefix_key
            return Choice(
                max(allowed, key=lambda i: xxhash.xxh3_64_intdigest(candidates[i].instance.encode(), seed=key)),
                "hashed prefix",
            )
        return Choice(self._least(allowed, candidates, random), "least loaded: no prefix")

    @staticmethod
    def _least(allowed: Sequence[int], candidates: Sequence[Candidate], random: Random) -> int:
        return min(allowed, key=lambda i: (load(candidates[i]), random.random()))
