"""Any."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random as Source

from kvroute.policies.base import Candidate, Choice, Request


@dataclass(frozen=True)
class Random:
    """Draw an instance, each equally likely: the other baseline, which has no rhythm to fall into as turns have."""

    def choose(self, request: Request, candidates: Sequence[Candidate], random: Source) -> Choice:
        return Choice(random.randrange(len(candidates)), "drawn")
