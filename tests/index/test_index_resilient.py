"""Redis may freeze, die, come back empty, or not be there: look-ups go on, and the index heals."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from kvroute.index.factory import open_index
from kvroute.index.memory import MemoryIndex
from kvroute.index.protocol import Index, Location, Tier
from kvroute.index.redis import RedisIndex
from kvroute.index.resilient import ResilientIndex
from tests.support.redis_server import RedisServer

A = Location("a", Tier.GPU)
B = Location("b", Tier.GPU)
PROMPT = list(range(1, 301))
T = 1_796_000_000.0
LOG = logging.getLogger("kvroute.test")


@pytest.fixture
async def index(redis_server: RedisServer) -> AsyncIterator[ResilientIndex]:
    made = await open_index(redis_server.url, timeout_s=0.05, prefix="kvroute:", log=LOG)
    assert isinstance(made, ResilientIndex)
    yield made
    await made.close()


async def run(index: Index, location: Location = A) -> int:
    return (await index.lookup(PROMPT, [location], 0.0))[0].blocks


async def run_in_redis(server: RedisServer, location: Location = A) -> int:
    other = RedisIndex(Redis.from_url(server.url))
    try:
        return await run(other, location)
    finally:
        await other.close()


async def until_healthy(index: Index) -> None:
    async with asyncio.timeout(15):
        while not (await index.stats()).healthy:
            await asyncio.sleep(0.02)


async def until_away(index: Index) -> None:
    async with asyncio.timeout(15):
        while (await index.stats()).healthy:
            await index.lookup(PROMPT, [A], 0.0)


async def test_one_gateway_finds_what_another_recorded(index: ResilientIndex, redis_server: RedisServer) -> None:
    await index.record(A, PROMPT, T)
    await index.flushed()
    other = await open_index(redis_server.url, timeout_s=1.0, prefix="kvroute:", log=LOG)
    assert await run(other) == 300
    await other.close()


async def test_a_frozen_redis_costs_its_deadline_once_and_then_nothing(
    index: ResilientIndex, redis_server: RedisServer
) -> None:
    await index.record(A, PROMPT, T)
    redis_server.freeze()
    started = time.monotonic()
    answers = await asyncio.gather(*(run(index) for _ in range(50)))
    in_flight = time.monotonic() - started
    started = time.monotonic()
    later = [await run(index) for _ in range(200)]
    afterwards = time.monotonic() - started
    assert set(answers) | set(later) == {300}
    # The deadline is 0.05 s; the rest is room for a busy machine. 200 further deadlines would be 10 s.
    assert in_flight < 1.0
    assert afterwards < 1.0


async def test_a_thawed_redis_is_used_again(index: ResilientIndex, redis_server: RedisServer) -> None:
    redis_server.freeze()
    for _ in range(2):
        await run(index)
    await index.record(A, PROMPT, T)
    redis_server.thaw()
    await until_healthy(index)
    assert await run_in_redis(redis_server) == 300


async def test_a_redis_that_comes_back_empty_is_filled_again(index: ResilientIndex, redis_server: RedisServer) -> None:
    await index.record(A, PROMPT, T)
    await index.record(B, PROMPT[:10], T)
    await index.flushed()
    redis_server.restart_empty()
    assert await run(index) == 300
    await until_healthy(index)
    assert await run_in_redis(redis_server) == 300
    assert await run_in_redis(redis_server, B) == 10


async def test_lookups_go_on_while_redis_is_down(index: ResilientIndex, redis_server: RedisServer) -> None:
    await index.record(A, PROMPT, T)
    redis_server.stop()
    assert [await run(index) for _ in range(20)] == [300] * 20
    await index.record(B, PROMPT[:5], T)
    assert await run(index, B) == 5
    stats = await index.stats()
    assert not stats.healthy
    assert stats.backend == "memory (redis unavailable)"
    assert stats.detail


async def test_redis_need_not_be_there_at_the_start(redis_server: RedisServer) -> None:
    redis_server.stop()
    index = await open_index(redis_server.url, timeout_s=0.05, prefix="kvroute:", log=LOG)
    await index.record(A, PROMPT, T)
    assert await run(index) == 300
    redis_server.start()
    await until_healthy(index)
    assert await run_in_redis(redis_server) == 300
    await index.close()


async def test_what_was_cleared_while_redis_was_away_stays_cleared(
    index: ResilientIndex, redis_server: RedisServer
) -> None:
    await index.record(A, PROMPT, T)
    await index.record(B, PROMPT, T)
    await index.flushed()
    redis_server.freeze()
    await until_away(index)
    await index.clear(A)
    redis_server.thaw()
    await until_healthy(index)
    assert await run(index) == 0
    assert await run(index, B) == 300


async def test_one_line_when_it_goes_and_one_when_it_is_back(
    index: ResilientIndex, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis_server.stop()
    for _ in range(100):
        await run(index)
    redis_server.start()
    await until_healthy(index)
    assert [record.getMessage().split(" (")[0].split(":")[0] for record in caplog.records] == [
        "redis is away",
        "redis is back",
    ]


async def test_a_cancelled_lookup_leaves_the_index_in_order(index: ResilientIndex, redis_server: RedisServer) -> None:
    await index.record(A, PROMPT, T)
    await index.flushed()
    for _ in range(50):
        task = asyncio.create_task(run(index))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert await run(index) == 300
    assert await run(index, B) == 0


async def test_no_url_means_memory() -> None:
    assert isinstance(await open_index(None, timeout_s=1.0, prefix="", log=LOG), MemoryIndex)
