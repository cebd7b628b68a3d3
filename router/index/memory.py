"""The index in this process's memory."""

from collections import OrderedDict
from collections.abc import Sequence

from kvroute.index.protocol import NOWHERE, IndexStats, Location, Residency

DEFAULT_MAX_ENTRIES = 5_000_000


class _Entries:
    """One location's blocks, oldest first, and its bit in the masks."""

    __slots__ = ("bit", "seen")

    def __init__(self, bit: int) -> None:
        self.bit = bit
        self.seen: OrderedDict[int, float] = OrderedDict()


class MemoryIndex:
    """A table from block hash to the set of its locations, as a bit mask, so that one walk over a prompt's hashes
    answers for all locations: a location drops out where its bit does.

    Each location also keeps its blocks in the order in which they were last recorded, the deepest block of a prompt
    before its first, so that what goes first is what engines evict first. Never suspends; not thread-safe.
    """

    def __init__(self, max_entries: int = DEFAULT_MAX_ENTRIES) -> None:
        """`max_entries`: bound on blocks over all locations; beyond it the fullest location loses its oldest ones."""
        self._max_entries = max_entries
        self._masks: dict[int, int] = {}
        self._locations: dict[Location, _Entries] = {}
        self._free_bits: list[int] = []
        self._size = 0

    async def record(self, location: Location, hashes: Sequence[int], now: float, capacity: int | None = None) -> None:
        if not hashes:
            return
        entries = self._locations.get(location)
        if entries is None:
            bit = self._free_bits.pop() if self._free_bits else 1 << len(self._locations)
            entries = self._locations[location] = _Entries(bit)
        bit, seen, masks = entries.bit, entries.seen, self._masks
        before = len(seen)
        for block in reversed(hashes):
            if block in seen:
                seen.move_to_end(block)
            else:
                masks[block] = masks.get(block, 0) | bit
            seen[block] = now
        self._size += len(seen) - before
        if capacity is not None:
            self._drop_oldest(location, entries, len(seen) - capacity)
        while self._size > self._max_entries:
            fullest, its_entries = max(self._locations.items(), key=lambda item: len(item[1].seen))
            self._drop_oldest(fullest, its_entries, max(1, min(len(its_entries.seen), self._size - self._max_entries)))

    async def remove(self, location: Location, hashes: Sequence[int]) -> None:
        entries = self._locations.get(location)
        if entries is None:
            return
        for block in hashes:
            if entries.seen.pop(block, None) is not None:
                self._unset(block, entries.bit)
        self._forget_if_empty(location, entries)

    async def remove_older(self, location: Location, before: float) -> None:
        entries = self._locations.get(location)
        if entries is not None:
            self._expire(location, entries, before, inclusive=True)

    async def clear(self, location: Location) -> None:
        entries = self._locations.get(location)
        if entries is not None:
            self._drop_oldest(location, entries, len(entries.seen))

    async def lookup(self, hashes: Sequence[int], locations: Sequence[Location], since: float) -> list[Residency]:
        found = [NOWHERE] * len(locations)
        open_locations: list[tuple[int, int, _Entries]] = []
        alive = 0
        for position, location in enumerate(locations):
            entries = self._locations.get(location)
            if entries is not None:
                self._expire(location, entries, since, inclusive=False)
                if entries.seen:
                    open_locations.append((position, entries.bit, entries))
                    alive |= entries.bit
        get = self._masks.get
        depth = 0
        for block in hashes:
            still = alive & get(block, 0)
            if still != alive:
                self._close(open_locations, still, hashes, depth, found)
                alive = still
                if not alive:
                    return found
            depth += 1
        self._close(open_locations, 0, hashes, depth, found)
        return found

    @staticmethod
    def _close(
        open_locations: list[tuple[int, int, _Entries]],
        still: int,
        hashes: Sequence[int],
        depth: int,
        found: list[Residency],
    ) -> None:
        """Note the residency of the locations whose runs end at `depth`: those without a bit in `still`."""
        if depth:
            deepest = hashes[depth - 1]
            for position, bit, entries in open_locations:
                if not bit & still:
                    found[position] = Residency(depth, entries.seen[deepest])
        open_locations[:] = [each for each in open_locations if each[1] & still]

    async def stats(self) -> IndexStats:
        entries = {f"{owner}/{tier}": len(each.seen) for (owner, tier), each in self._locations.items()}
        return IndexStats(backend="memory", entries=entries, healthy=True)

    async def close(self) -> None:
        """Nothing to release."""

    def contents(self, location: Location) -> list[tuple[int, float]]:
        """(hash, seen) of every entry of `location`, oldest first."""
        entries = self._locations.get(location)
        return list(entries.seen.items()) if entries is not None else []

    def locations(self) -> list[Location]:
        """The locations that hold anything."""
        return list(self._locations)

    def _expire(self, location: Location, entries: _Entries, before: float, *, inclusive: bool) -> None:
        seen = entries.seen
        while seen:
            block, at = next(iter(seen.items()))
            if at > before or (at == before and not inclusive):
                break
            del seen[block]
            self._unset(block, entries.bit)
        self._forget_if_empty(location, entries)

    def _drop_oldest(self, location: Location, entries: _Entries, count: int) -> None:
        for _ in range(min(count, len(entries.seen))):
            block, _ = entries.seen.popitem(last=False)
            self._unset(block, entries.bit)
        self._forget_if_empty(location, entries)

    def _unset(self, block: int, bit: int) -> None:
        self._size -= 1
        left = self._masks[block] & ~bit
        if left:
            self._masks[block] = left
        else:
            del self._masks[block]

    def _forget_if_empty(self, location: Location, entries: _Entries) -> None:
        if not entries.seen:
            # No mask holds the bit any more, so another location may have it.
            del self._locations[location]
            self._free_bits.append(entries.bit)
