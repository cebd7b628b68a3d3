"""The prefix cache of an engine, as vLLM's: full blocks under chained hashes, least recently used evicted first."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Allocation:
    """The blocks that one request holds."""

    cached_blocks: int
    """Leading blocks that were there already."""
    hashed: list[int]
    """Hashes of the blocks that are held and cached, leading block first."""
    plain: int
    """Blocks held that have no hash (yet): being computed, or not full."""
    evicted: list[int] = field(default_factory=list)
    """Hashes that had to go to make room."""


class BlockCache:
    def __init__(self, capacity: int, block_tokens: int) -> None:
        """`capacity`: blocks in the GPU; `block_tokens`: tokens a block."""
        self.capacity = capacity
        self.block_tokens = block_tokens
        self._references: dict[int, int] = {}
        # Cached blocks that nobody holds, the one to go first in front.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._plain = 0

    @property
    def free(self) -> int:
        """Blocks that a new request could get: empty ones and idle cached ones."""
        return self.capacity - self._plain - len(self._references) + len(self._idle)

    @property
    def cached(self) -> frozenset[int]:
        """Hashes of all cached blocks."""
        return frozenset(self._references)

    @property
    def usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1 - self.free / self.capacity

    def allocate(self, hashes: Sequence[int], prompt_tokens: int, total_tokens: int) -> Allocation | None:
        """Hold the blocks for a request of `total_tokens`, whose prompt's full blocks have `hashes`.

        The last prompt token is never a hit, since its logits are needed. None when there is no room now.
        """
        most = min(len(hashes), max(0, prompt_tokens - 1) // self.block_tokens)
        run = 0
        while run < most and hashes[run] in self._references:
            run += 1
        needed = -(-total_tokens // self.block_tokens) - run
        idle_hits = sum(1 for block in hashes[:run] if self._references[block] == 0)
        if needed > self.free - idle_hits:
            return None
        held = list(hashes[:run])
        for block in held:
            if self._references[block] == 0:
                del self._idle[block]
            self._references[block] += 1
        evicted = []
        while needed > self.capacity - self._plain - len(self._references):
            block, _ = self._idle.popitem(last=False)
            del self._references[block]
            evicted.append(block)
        self._plain += needed
        return Allocation(run, held, needed, evicted)

    def commit(self, allocation: Allocation, hashes: Sequence[int]) -> list[int]:
        """The blocks of `hashes`, which begin with those that are held, are computed. Returns the new ones."""
        stored = []
        for block in hashes[len(allocation.hashed) :]:
            if allocation.plain == 0:
                break
            allocation.plain -= 1
            self._plain -= 1
            references = self._references.get(block)
            if references is None:
                self._references[block] = 1
                stored.append(block)
            else:
                # Another request has computed the same meanwhile; one copy is enough.
                if references == 0:
                    del self._idle[block]
                self._references[block] = references + 1
            allocation.hashed.append(block)
        return stored

    def release(self, allocation: Allocation) -> None:
        """The request is over. Its deepest blocks are the first to go when room is needed."""
        self._plain -= allocation.plain
        allocation.plain = 0
        for block in reversed(allocation.hashed):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._idle[block] = None
        allocation.hashed.clear()

    def clear(self) -> bool:
        """Forget all cached blocks; refused while any is held, as the engine refuses it."""
        if self._plain or len(self._idle) != len(self._references):
            return False
        self._idle.clear()
        self._references.clear()
        return True
