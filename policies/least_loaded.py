"""The fewest requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvroute.policies.base import Candidate, Choice, Request, load


@dataclass(frozen=True)
class LeastLoaded:
    """Send the request to the instance with the fewest requests, ours and others'; equals are drawn at random."""

    def choose(self, request: Request, candidates: Sequence[Candidate], random: Random) -> Choice:
        loads = [load(candidate) for candidate in candidates]
        least = min(loads)
        return Choice(random.choice([i for i, each in enumerate(loads) if each == least]), "least loaded")
