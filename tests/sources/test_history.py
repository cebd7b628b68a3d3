"""Own history: recorded where a request went, taken back when it failed, corrected by the engine's own count."""

from kvroute.index.memory import MemoryIndex
from kvroute.index.protocol import Location, Residency, Tier
from kvroute.sources.history import History

A = Location("a", Tier.GPU)
OLD = [1, 2, 3]
PROMPT = [10, 11, 12, 13]


async def lookup(index: MemoryIndex, hashes: list[int], since: float = 0.0) -> Residency:
    return (await index.lookup(hashes, [A], since))[0]


async def test_a_dispatched_prompt_is_resident() -> None:
    index = MemoryIndex()
    await History(index).dispatched(A, PROMPT, 100.0)
    assert await lookup(index, PROMPT) == Residency(4, 100.0)


async def test_it_counts_until_its_time_to_live_is_over() -> None:
    index = MemoryIndex()
    history = History(index, ttl_s=60.0)
    await history.dispatched(A, PROMPT, 100.0)
    assert (await lookup(index, PROMPT, history.since(159.0))).blocks == 4
    assert (await lookup(index, PROMPT, history.since(161.0))).blocks == 0


async def test_no_more_is_believed_than_the_instance_can_hold() -> None:
    index = MemoryIndex()
    history = History(index)
    await history.dispatched(A, OLD, 100.0, capacity_blocks=5)
    await history.dispatched(A, PROMPT, 101.0, capacity_blocks=5)
    assert (await lookup(index, PROMPT)).blocks == 4
    assert (await lookup(index, OLD)).blocks == 1


async def test_a_retracted_prompt_leaves_what_was_there_before() -> None:
    index = MemoryIndex()
    history = History(index)
    await history.dispatched(A, PROMPT[:2], 100.0)
    predicted = await lookup(index, PROMPT)
    await history.dispatched(A, PROMPT, 101.0)
    await history.retracted(A, PROMPT, predicted)
    assert (await lookup(index, PROMPT)).blocks == 2


async def test_an_engine_that_had_evicted_loses_credit_for_all_that_is_as_old() -> None:
    index = MemoryIndex()
    history = History(index)
    await history.dispatched(A, OLD, 100.0)
    await history.dispatched(A, PROMPT, 101.0)
    await history.dispatched(A, [20, 21], 102.0)
    predicted = await lookup(index, PROMPT)
    await history.dispatched(A, PROMPT, 200.0)
    await history.answered(A, PROMPT, predicted, cached_blocks=1, now=201.0)
    assert (await lookup(index, OLD)).blocks == 0
    assert (await lookup(index, [20, 21])).blocks == 2
    assert await lookup(index, PROMPT) == Residency(4, 201.0)


async def test_a_prediction_that_came_true_changes_nothing() -> None:
    index = MemoryIndex()
    history = History(index)
    await history.dispatched(A, OLD, 100.0)
    await history.dispatched(A, PROMPT, 101.0)
    predicted = await lookup(index, PROMPT)
    await history.answered(A, PROMPT, predicted, cached_blocks=4, now=201.0)
    assert (await lookup(index, OLD)).blocks == 3
    assert await lookup(index, PROMPT) == Residency(4, 101.0)
