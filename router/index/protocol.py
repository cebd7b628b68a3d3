"""The index: which location holds which blocks.

An entry (location, block hash) says that the location held the whole prefix up to that block when the entry was last
recorded. Hashes are chained and rooted in the model, so one index serves every model. A wrong entry costs time, never
correctness.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol

import msgspec


class Tier(StrEnum):
    """Where in a location's memory hierarchy a block lies, fastest first."""

    GPU = "gpu"
    CPU = "cpu"
    DISK = "disk"
    POOL = "pool"


class Location(NamedTuple):
    """A place that holds blocks: an instance's tier (owner = instance id) or a pool (owner = pool name)."""

    owner: str
    tier: Tier


class Residency(NamedTuple):
    """How much of a prefix a location holds."""

    blocks: int
    """Length of the longest leading run of the looked-up hashes that is resident, in blocks."""
    seen: float
    """Unix time, in seconds, at which the deepest block of that run was last recorded; 0.0 when `blocks` is 0."""


NOWHERE = Residency(0, 0.0)


class IndexStats(msgspec.Struct, frozen=True):
    """A snapshot for people: what the index holds and how it is doing."""

    backend: str
    """"memory", "redis", or "memory (redis unavailable)"."""
    entries: dict[str, int]
    """Entries by location, keyed "owner/tier"."""
    healthy: bool
    detail: str = ""


class Index(Protocol):
    """Implementations never raise for a lost backend: they answer from what they still have."""

    async def record(self, location: Location, hashes: Sequence[int], now: float, capacity: int | None = None) -> None:
        """Say that `location` holds the prefix made of `hashes` (leading block first) as of `now` (Unix seconds).

        Entries already there are renewed. With a `capacity` (blocks), the entries that were recorded longest ago are
        dropped until at most that many are left; of one prefix, the deepest blocks go first.
        """
        ...

    async def remove(self, location: Location, hashes: Sequence[int]) -> None:
        """Forget these blocks at `location`; unknown ones are ignored."""
        ...

    async def remove_older(self, location: Location, before: float) -> None:
        """Forget every entry of `location` that was last recorded at or before `before` (Unix seconds)."""
        ...

    async def clear(self, location: Location) -> None:
        """Forget everything at `location`."""
        ...

    async def lookup(self, hashes: Sequence[int], locations: Sequence[Location], since: float) -> list[Residency]:
        """Longest leading run of `hashes` resident at each of `locations`, in their order; one round trip.

        Entries last recorded before `since` (Unix seconds) do not count.
        """
        ...

    async def stats(self) -> IndexStats: ...

    async def close(self) -> None: ...
