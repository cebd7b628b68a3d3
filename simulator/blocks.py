"""The prefix cache of an engine, as vLLM's: full blocks under chained hashes, least recently used evicted first."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Allocation:
    """The blocks that one request holds."""

    cached_blocks: int
    """Leading blocks that were there already."""
    evicted: tuple[int, ...]
    """Hashes that had to go to make room, in that order."""
    hashed: list[int]
    """Hashes of the held blocks that are in the cache, leading block first."""
    plain: int
    """Held blocks that have no hash: not computed yet, or not full."""


class BlockCache:
    """Every block is empty, held by requests (one without a hash by one request, one in the cache by any number), or
    idle: in the cache and held by nobody, to be hit again or evicted."""

    def __init__(self, capacity_blocks: int, block_tokens: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.block_tokens = block_tokens
        self._holders: dict[int, int] = {}
        """Of each block in the cache, how many requests hold it."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """The one to be evicted first in front."""
        self._plain = 0

    @property
    def cached(self) -> frozenset[int]:
        """Hashes of all blocks in the cache, held or idle."""
        return frozenset(self._holders)

    @property
    def available_blocks(self) -> int:
        """What a new request could get: empty blocks and idle ones."""
        return self._empty + len(self._idle)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.available_blocks / self.capacity_blocks

    @property
    def _empty(self) -> int:
        return self.capacity_blocks - self._plain - len(self._holders)

    def allocate(self, hashes: Sequence[int], prompt_tokens: int, total_tokens: int) -> Allocation | None:
        """Hold blocks for `total_tokens` tokens, whose first full blocks have `hashes`; None when there is no room now.

        Only the prompt is looked up, and its last token is never a hit: the first token's logits come of computing it.
        """
        most = min(len(hashes), (prompt_tokens - 1) // self.block_tokens)
        run = 0
        while run < most and hashes[run] in self._holders:
            run += 1
        hits = list(hashes[:run])
        needed = -(-total_tokens // self.block_tokens) - run
        if needed > self.available_blocks - sum(1 for block in hits if block in self._idle):
            return None
        for block in hits:
            self._hold(block)
        evicted = [self._evict() for _ in range(needed - self._empty)]
        self._plain += needed
        return Allocation(run, tuple(evicted), hits, needed)

    def commit(self, allocation: Allocation, hashes: Sequence[int]) -> range:
        """The request's leading blocks, whose hashes these are, have been computed. Returns the positions in `hashes`
        that are new in the cache.

        Another request may have put some of them there meanwhile. One copy is enough, so this one's is given up.
        """
        known = first_new = len(allocation.hashed)
        for position, block in enumerate(hashes[known:], known):
            allocation.plain -= 1
            self._plain -= 1
            allocation.hashed.append(block)
            if block in self._holders:
                self._hold(block)
                # Who has a block has all before it, so what is new begins after it.
                first_new = position + 1
            else:
                self._holders[block] = 1
        return range(first_new, len(hashes))

    def release(self, allocation: Allocation) -> None:
        """The request is over. Its deepest blocks are the first to go when room is needed, since a block is of no use
        without those before it."""
        self._plain -= allocation.plain
        allocation.plain = 0
        for block in reversed(allocation.hashed):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._idle[block] = None
        allocation.hashed.clear()

    def clear(self) -> bool:
        """Forget all blocks; refused while any is held, as vLLM refuses it."""
        if self.available_blocks < self.capacity_blocks:
            return False
        self._idle.clear()
        self._holders.clear()
        return True

    def _hold(self, block: int) -> None:
        if self._holders[block] == 0:
            del self._idle[block]
        self._holders[block] += 1

    def _evict(self) -> int:
        block, _ = self._idle.popitem(last=False)
        del self._holders[block]
        return block
