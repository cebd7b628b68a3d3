"""One after another."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from random import Random

from kvroute.policies.base import Candidate, Choice, Request


@dataclass(frozen=True)
class RoundRobin:
    """Take the instances in turn, whatever they hold and however busy they are: the baseline.

    The turn is counted per policy object, so each name in the configuration has its own.
    """

    _turn: Iterator[int] = field(default_factory=count, init=False, repr=False, compare=False)

    def choose(self, request: Request, candidates: Sequence[Candidate], random: Random) -> Choice:
        return Choice(next(self._turn) % len(candidates), "turn")
