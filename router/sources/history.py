"""The gateway's own history as a source: an instance has cached what it was sent, until it needs the room.

This is the lower of the two grades of truth (nobody told us, we infer it), so it decays: an entry counts for `ttl_s`,
at most as many as fit into the instance's KV cache, and only until the engine's own count of cached tokens says
otherwise.
"""

from collections.abc import Sequence

from kvroute.index.protocol import Index, Location, Residency


class History:
    def __init__(self, index: Index, *, ttl_s: float = 3600.0) -> None:
        self._index = index
        self._ttl_s = ttl_s

    def since(self, now: float) -> float:
        """The oldest time of recording, in Unix seconds, that still counts at `now`."""
        return now - self._ttl_s

    async def dispatched(
        self, location: Location, hashes: Sequence[int], now: float, capacity_blocks: int | None = None
    ) -> None:
        """The prompt of `hashes` has been sent to where its blocks will be held at `location`."""
        await self._index.record(location, hashes, now, capacity_blocks)

    async def retracted(self, location: Location, hashes: Sequence[int], predicted: Residency) -> None:
        """It was not computed there after all. What was held before, as `predicted` says, may be held still."""
        await self._index.remove(location, hashes[predicted.blocks :])

    async def answered(
        self, location: Location, hashes: Sequence[int], predicted: Residency, cached_blocks: int, now: float
    ) -> None:
        """The engine told how many leading blocks of the prompt it had.

        When it had fewer than predicted, some were evicted that the index still listed. Engines evict what was used
        least recently, so whatever was last recorded there at or before the time of the evicted ones (`predicted.seen`)
        has gone as well, or goes next: it is all forgotten. The prompt itself has just been computed, so it is there.
        """
        if cached_blocks < predicted.blocks:
            await self._index.remove_older(location, predicted.seen)
            await self._index.record(location, hashes, now)
