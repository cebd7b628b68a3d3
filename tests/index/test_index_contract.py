"""The index protocol, held by every implementation: each test runs against memory, Redis, and both together."""

import logging
from collections.abc import AsyncIterator, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from kvroute.index.memory import MemoryIndex
from kvroute.index.protocol import NOWHERE, Index, Location, Residency, Tier
from kvroute.index.redis import DEPTH_S, RedisIndex
from kvroute.index.resilient import ResilientIndex
from tests.support.redis_server import RedisServer

A = Location("a", Tier.GPU)
B = Location("b", Tier.GPU)
POOL = Location("flash", Tier.POOL)
PROMPT = [2**64 - 1, 7, 0, 12345678901234567890, 5]
T = 1_796_000_000.0
EVER = 0.0


@pytest.fixture(params=["memory", "redis", "resilient"])
async def index(request: pytest.FixtureRequest) -> AsyncIterator[Index]:
    if request.param == "memory":
        yield MemoryIndex()
        return
    server: RedisServer = request.getfixturevalue("redis_server")
    primary = RedisIndex(Redis.from_url(server.url))
    made: Index = primary
    if request.param == "resilient":
        log = logging.getLogger("test")
        made = await ResilientIndex.start(primary, MemoryIndex(), timeout_s=5.0, log=log)
    yield made
    await made.close()


async def runs(index: Index, hashes: Sequence[int], *locations: Location, since: float = EVER) -> list[int]:
    return [residency.blocks for residency in await index.lookup(hashes, locations, since)]


async def test_what_was_recorded_is_resident_where_it_was_recorded(index: Index) -> None:
    await index.record(A, PROMPT, T)
    assert await runs(index, PROMPT, A, B) == [5, 0]


async def test_answers_come_in_the_order_of_the_locations_asked_for(index: Index) -> None:
    await index.record(A, PROMPT[:2], T)
    await index.record(POOL, PROMPT, T)
    assert await runs(index, PROMPT, POOL, B, A) == [5, 0, 2]


async def test_a_run_ends_at_the_first_block_that_is_missing(index: Index) -> None:
    await index.record(A, PROMPT, T)
    await index.remove(A, [PROMPT[2]])
    assert await runs(index, PROMPT, A) == [2]


async def test_a_longer_prompt_matches_its_known_prefix(index: Index) -> None:
    await index.record(A, PROMPT, T)
    assert await runs(index, [*PROMPT, 99, 98], A) == [5]


async def test_a_prompt_longer_than_a_script_chunk_is_walked_to_its_end(index: Index) -> None:
    long = list(range(1, 1001))
    await index.record(A, long, T)
    assert await runs(index, long, A, B) == [1000, 0]


async def test_seen_is_the_time_of_the_deepest_block_of_the_run(index: Index) -> None:
    await index.record(A, PROMPT, T)
    await index.record(A, PROMPT[:2], T + 60)
    (whole,) = await index.lookup(PROMPT, [A], EVER)
    (short,) = await index.lookup(PROMPT[:2], [A], EVER)
    assert whole.seen == pytest.approx(T, abs=10 * DEPTH_S)
    assert short.seen == pytest.approx(T + 60, abs=10 * DEPTH_S)


async def test_nothing_resident_has_no_time(index: Index) -> None:
    assert await index.lookup(PROMPT, [A], EVER) == [NOWHERE]


async def test_old_entries_do_not_count(index: Index) -> None:
    await index.record(A, PROMPT, T)
    assert await runs(index, PROMPT, A, since=T - 1) == [5]
    assert await runs(index, PROMPT, A, since=T + 1) == [0]


async def test_recording_again_renews(index: Index) -> None:
    await index.record(A, PROMPT, T)
    await index.record(A, PROMPT, T + 100)
    assert await runs(index, PROMPT, A, since=T + 50) == [5]


async def test_capacity_drops_what_was_recorded_longest_ago(index: Index) -> None:
    await index.record(A, [1, 2, 3], T)
    await index.record(A, [4, 5, 6], T + 1, capacity=3)
    assert await runs(index, [1, 2, 3], A) == [0]
    assert await runs(index, [4, 5, 6], A) == [3]


async def test_of_one_prefix_the_deepest_blocks_go_first(index: Index) -> None:
    await index.record(A, [1, 2, 3], T)
    await index.record(A, [4, 5], T + 1, capacity=4)
    assert await runs(index, [1, 2, 3], A) == [2]


async def test_a_prompt_beyond_the_capacity_keeps_its_beginning(index: Index) -> None:
    await index.record(A, PROMPT, T, capacity=3)
    assert await runs(index, PROMPT, A) == [3]


async def test_clear_forgets_one_location_only(index: Index) -> None:
    await index.record(A, PROMPT, T)
    await index.record(B, PROMPT, T)
    await index.clear(A)
    assert await runs(index, PROMPT, A, B) == [0, 5]


async def test_remove_older_takes_the_bound_itself_and_spares_the_younger(index: Index) -> None:
    await index.record(A, [1, 2], T)
    await index.record(A, [3, 4], T + 10)
    await index.remove_older(A, T)
    assert await runs(index, [1, 2], A) == [0]
    assert await runs(index, [3, 4], A) == [2]


async def test_unknown_blocks_and_locations_may_be_removed(index: Index) -> None:
    await index.remove(A, [1])
    await index.remove_older(A, T)
    await index.clear(A)
    assert await runs(index, [1], A) == [0]


async def test_empty_questions_have_empty_answers(index: Index) -> None:
    await index.record(A, [], T)
    assert await index.lookup([], [A, B], EVER) == [NOWHERE, NOWHERE]
    assert await index.lookup(PROMPT, [], EVER) == []


async def test_stats_count_entries_by_location(index: Index) -> None:
    await index.record(A, PROMPT, T)
    await index.record(POOL, PROMPT[:2], T)
    if isinstance(index, ResilientIndex):
        await index.flushed()
    stats = await index.stats()
    assert stats.entries == {"a/gpu": 5, "flash/pool": 2}
    assert stats.healthy


class Model:
    """The protocol's words as plainly as they can be put into code: no order, no masks, no scripts."""

    def __init__(self) -> None:
        self.entries: dict[Location, dict[int, float]] = {A: {}, B: {}}

    def record(self, location: Location, hashes: list[int], now: float, capacity: int | None) -> None:
        entries = self.entries[location]
        for depth, block in enumerate(hashes):
            entries[block] = now - depth * DEPTH_S
        if capacity is not None:
            for block in sorted(entries, key=entries.__getitem__)[: max(0, len(entries) - capacity)]:
                del entries[block]

    def lookup(self, hashes: list[int], location: Location, since: float) -> Residency:
        run = 0
        while run < len(hashes) and self.entries[location].get(hashes[run], -1.0) >= since:
            run += 1
        return Residency(run, self.entries[location][hashes[run - 1]]) if run else NOWHERE


CHAINS = [[1, 2, 3, 4, 5], [1, 2, 6, 7], [8, 9], [1]]
locations = st.sampled_from([A, B])
chains = st.builds(lambda chain, length: chain[:length], st.sampled_from(CHAINS), st.integers(1, 5))
steps = st.one_of(
    st.tuples(st.just("record"), locations, chains, st.sampled_from([None, 1, 3, 6])),
    st.tuples(st.just("remove"), locations, chains),
    st.tuples(st.just("older"), locations, st.integers(0, 20)),
    st.tuples(st.just("clear"), locations),
)


async def agree(index: Index, script: list[tuple[object, ...]]) -> None:
    model = Model()
    # A second apart, so that depth never reorders entries of different times.
    for now, step in enumerate(script, start=int(T)):
        match step:
            case ("record", Location() as at, list() as hashes, capacity):
                assert capacity is None or isinstance(capacity, int)
                await index.record(at, hashes, now, capacity)
                model.record(at, hashes, now, capacity)
            case ("remove", Location() as at, list() as hashes):
                await index.remove(at, hashes)
                for block in hashes:
                    model.entries[at].pop(block, None)
            case ("older", Location() as at, int() as age):
                await index.remove_older(at, now - age)
                model.entries[at] = {block: seen for block, seen in model.entries[at].items() if seen > now - age}
            case ("clear", Location() as at):
                await index.clear(at)
                model.entries[at] = {}
        for chain in CHAINS:
            found = await index.lookup(chain, [A, B], EVER)
            for at, residency in zip([A, B], found, strict=True):
                expected = model.lookup(chain, at, EVER)
                assert residency.blocks == expected.blocks, (step, chain, at)
                assert residency.seen == pytest.approx(expected.seen, abs=10 * DEPTH_S)


@given(st.lists(steps, max_size=25))
async def test_memory_agrees_with_the_model_after_every_step(script: list[tuple[object, ...]]) -> None:
    await agree(MemoryIndex(), script)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps, max_size=12))
async def test_redis_agrees_with_the_model_after_every_step(
    redis_server: RedisServer, script: list[tuple[object, ...]]
) -> None:
    client = Redis.from_url(redis_server.url)
    await client.flushall()
    await agree(RedisIndex(client), script)
    await client.aclose()


async def test_a_redis_lookup_is_one_round_trip(redis_server: RedisServer) -> None:
    client = Redis.from_url(redis_server.url)
    index = RedisIndex(client)
    await index.record(A, PROMPT, T)
    await index.lookup(PROMPT, [A], EVER)
    before = await commands(client)
    await index.lookup(list(range(1, 2000)), [A, B, POOL], EVER)
    after = await commands(client)
    from_client = {name: after[name] - before.get(name, 0) for name in after}
    # ZMSCORE and EXISTS are called by the script, inside the server; INFO is how this test counts.
    sent = {name: count for name, count in from_client.items() if count and name not in ("zmscore", "exists", "info")}
    assert sent == {"evalsha": 1}
    await index.close()


async def commands(client: Redis) -> dict[str, int]:
    stats = await client.info("commandstats")
    return {name.removeprefix("cmdstat_"): value["calls"] for name, value in stats.items()}


async def test_a_lookup_survives_a_script_flush(redis_server: RedisServer) -> None:
    client = Redis.from_url(redis_server.url)
    index = RedisIndex(client)
    await index.record(A, PROMPT, T)
    assert await runs(index, PROMPT, A) == [5]
    await client.script_flush()
    assert await runs(index, PROMPT, A) == [5]
    assert index.reloads == 1
    await index.close()


async def test_memory_is_bounded_over_all_locations() -> None:
    index = MemoryIndex(max_entries=100)
    for number in range(50):
        await index.record(A if number % 3 else B, range(number * 100, number * 100 + 10), T + number)
    stats = await index.stats()
    assert sum(stats.entries.values()) <= 100
    assert await runs(index, list(range(4900, 4910)), A) == [10]


async def test_an_emptied_location_leaves_nothing_behind() -> None:
    index = MemoryIndex()
    for number in range(1000):
        location = Location(f"instance-{number}", Tier.GPU)
        await index.record(location, PROMPT, T)
        await index.clear(location)
    await index.record(A, PROMPT, T)
    assert index.locations() == [A]
    # A mask of one bit: the bits of those that went were used again.
    assert set(index._masks.values()) == {1}
