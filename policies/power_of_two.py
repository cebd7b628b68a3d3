"""The better of two drawn at random."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from kvroute.policies.base import Candidate, Choice, Request, load


@dataclass(frozen=True)
class PowerOfTwo:
    """Draw two instances and take the one with fewer requests.

    Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001: nearly as balanced as
    asking all, and no herd runs to the one that looks idle while load reports lag.
    """

    def choose(self, request: Request, candidates: Sequence[Candidate], random: Random) -> Choice:
        if len(candidates) == 1:
            return Choice(0, "only one")
        one, other = random.sample(range(len(candidates)), 2)
        # The draw's own order is random, so that equal loads are, too.
        return Choice(one if load(candidates[one]) <= load(candidates[other]) else other, "less loaded of two")
