"""The prefix cache against a slow model of the same rules, and the rules one by one."""

from dataclasses import dataclass, field

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvroute.simulator.blocks import Allocation, BlockCache

BLOCK = 4
CAPACITY = 9


def allocated(cache: BlockCache, hashes: list[int], prompt_tokens: int, total_tokens: int) -> Allocation:
    allocation = cache.allocate(hashes, prompt_tokens, total_tokens)
    assert allocation is not None
    return allocation


def cache_with(hashes: list[int], capacity: int = CAPACITY) -> BlockCache:
    """Holding these blocks, idle."""
    cache = BlockCache(capacity, BLOCK)
    allocation = allocated(cache, hashes, len(hashes) * BLOCK, len(hashes) * BLOCK)
    cache.commit(allocation, hashes)
    cache.release(allocation)
    return cache


def test_a_computed_prefix_is_hit_up_to_the_first_block_that_differs() -> None:
    cache = cache_with([1, 2, 3])
    assert allocated(cache, [1, 2, 30], 3 * BLOCK, 13).cached_blocks == 2


def test_the_last_prompt_token_is_never_a_hit() -> None:
    cache = cache_with([1, 2])
    assert allocated(cache, [1, 2], 2 * BLOCK, 2 * BLOCK + 1).cached_blocks == 1
    assert allocated(cache, [1, 2], 2 * BLOCK + 1, 2 * BLOCK + 2).cached_blocks == 2


def test_the_answers_blocks_are_not_looked_up() -> None:
    cache = cache_with([1, 2, 3])
    assert allocated(cache, [1, 2, 3], BLOCK + 1, 3 * BLOCK).cached_blocks == 1


def test_the_deepest_block_of_the_request_that_ended_first_is_evicted_first() -> None:
    cache = cache_with([1, 2, 3], capacity=6)
    other = allocated(cache, [7, 8, 9], 12, 12)
    cache.commit(other, [7, 8, 9])
    cache.release(other)
    assert allocated(cache, [20, 21, 22, 23], 16, 16).evicted == (3, 2, 1, 9)


def test_a_hit_block_is_not_evicted_for_the_request_that_hit_it() -> None:
    cache = cache_with([1, 2, 3], capacity=3)
    allocation = allocated(cache, [1, 20, 21], 12, 12)
    assert allocation.cached_blocks == 1
    assert allocation.evicted == (3, 2)


def test_there_is_no_room_while_others_hold_the_blocks() -> None:
    cache = BlockCache(3, BLOCK)
    held = allocated(cache, [1, 2], 8, 9)
    assert cache.allocate([5], 4, 5) is None
    cache.release(held)
    assert cache.allocate([5], 4, 5) is not None


def test_blocks_that_two_requests_computed_are_kept_once() -> None:
    cache = BlockCache(CAPACITY, BLOCK)
    one, other = allocated(cache, [1, 2], 9, 9), allocated(cache, [1, 2], 9, 9)
    assert list(cache.commit(one, [1, 2])) == [0, 1]
    assert list(cache.commit(other, [1, 2])) == []
    # Two blocks in the cache, and each request's third one.
    assert cache.available_blocks == CAPACITY - 4


def test_the_cache_is_not_cleared_while_a_request_holds_a_block() -> None:
    cache = cache_with([1, 2])
    held = allocated(cache, [1], 5, 5)
    assert not cache.clear()
    assert cache.cached == {1, 2}
    cache.release(held)
    assert cache.clear()
    assert cache.cached == frozenset()


Path = tuple[int, ...]


@dataclass(eq=False)
class Held:
    """A request in the model: a path through a tree of blocks."""

    path: Path
    blocks: int
    allocation: Allocation
    known: int
    """Its leading blocks that are in the cache."""


@dataclass
class Entry:
    holders: set[int] = field(default_factory=set)
    freed: int = -1
    """When the last holder let go of it: a counter over all blocks."""


class CacheAgainstModel(RuleBasedStateMachine):
    """Requests are paths in a small tree; a block's hash is a number for the path that leads to it."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = BlockCache(CAPACITY, BLOCK)
        self.entries: dict[Path, Entry] = {}
        self.numbers: dict[Path, int] = {}
        self.held: list[Held] = []
        self.clock = 0

    def number(self, path: Path) -> int:
        return self.numbers.setdefault(path, 1000 + len(self.numbers))

    def hashes(self, path: Path) -> list[int]:
        return [self.number(path[: depth + 1]) for depth in range(len(path))]

    def free(self) -> int:
        held_without_hash = sum(each.blocks - each.known for each in self.held)
        return CAPACITY - held_without_hash - sum(1 for entry in self.entries.values() if entry.holders)

    @rule(path=st.lists(st.integers(0, 1), min_size=0, max_size=4).map(tuple), tail=st.integers(1, BLOCK + 2))
    def start(self, path: Path, tail: int) -> None:
        prompt_tokens = len(path) * BLOCK + tail % BLOCK or 1
        total = len(path) * BLOCK + tail
        run = 0
        while run < len(path) and (run + 1) * BLOCK < prompt_tokens and path[: run + 1] in self.entries:
            run += 1
        blocks = -(-total // BLOCK)
        hits = [path[: depth + 1] for depth in range(run)]
        room = self.free() - sum(1 for hit in hits if not self.entries[hit].holders)
        allocation = self.cache.allocate(self.hashes(path), prompt_tokens, total)
        assert (allocation is not None) == (blocks - run <= room)
        if allocation is None:
            return
        assert allocation.cached_blocks == run
        made = Held(path, blocks, allocation, run)
        for hit in hits:
            self.entries[hit].holders.add(id(made))
        expected = []
        empty = CAPACITY - len(self.entries) - sum(each.blocks - each.known for each in self.held)
        for _ in range(blocks - run - empty):
            idle = [each for each, entry in self.entries.items() if not entry.holders]
            oldest = min(idle, key=lambda each: self.entries[each].freed)
            del self.entries[oldest]
            expected.append(self.number(oldest))
        assert list(allocation.evicted) == expected
        self.held.append(made)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def compute_more(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        until = data.draw(st.integers(held.known, len(held.path)))
        expected = []
        for depth in range(held.known, until):
            path = held.path[: depth + 1]
            if path not in self.entries:
                self.entries[path] = Entry()
                expected.append(depth)
            self.entries[path].holders.add(id(held))
        assert list(self.cache.commit(held.allocation, self.hashes(held.path)[:until])) == expected
        held.known = until

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        for depth in reversed(range(held.known)):
            entry = self.entries[held.path[: depth + 1]]
            entry.holders.discard(id(held))
            if not entry.holders:
                self.clock += 1
                entry.freed = self.clock
        self.held.remove(held)
        self.cache.release(held.allocation)

    @rule()
    def clear(self) -> None:
        assert self.cache.clear() == (not self.held)
        if not self.held:
            self.entries.clear()

    @invariant()
    def same_blocks(self) -> None:
        assert self.cache.cached == {self.number(path) for path in self.entries}
        assert self.cache.available_blocks == self.free()
        assert 0 <= self.cache.usage <= 1


TestCacheAgainstModel = CacheAgainstModel.TestCase
