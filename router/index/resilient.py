"""Redis with a shadow in memory: what is shared when it is there, what is ours when it is not.

Everything that this gateway records goes into the shadow at once and to Redis by a background writer, in batches. A
look-up asks both and takes the better answer for each location, so that the writer's lag hides nothing of our own.

When Redis fails (a lost connection at once, a missed deadline twice in a row), the circuit opens: look-ups answer from
the shadow and do not touch Redis, so that a frozen one costs its deadline to those in flight and nothing after that. A
probe in the background asks whether it is back, then heals it before it is used again, since it may have come back
empty: locations where something was removed in the meantime are cleared (what other gateways knew of them is lost,
which costs time, while an entry risen from the dead would cost more), then the shadow's content is written. One line is
logged when Redis goes away and one when it is back.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from redis.asyncio.client import Pipeline
from redis.exceptions import RedisError

from kvroute.index.memory import MemoryIndex
from kvroute.index.protocol import IndexStats, Location, Residency
from kvroute.index.redis import RedisIndex

MAX_QUEUED = 20_000
"""Writes that wait for Redis; beyond it the oldest are dropped, which the shadow makes good for this gateway."""
BATCH = 256
HEAL_CHUNK = 1000
"""Entries a pipeline while healing."""
BACKGROUND_TIMEOUT_S = 1.0
PROBE_DELAYS_S = (0.02, 0.25, 0.5, 1.0, 2.0)
"""Seconds before each probe; the last one repeats."""
MISSES_TO_OPEN = 2

Write = Callable[[Pipeline], None]


class ResilientIndex:
    """Make it with `start`, in the event loop that it will live in."""

    def __init__(self, primary: RedisIndex, shadow: MemoryIndex, *, timeout_s: float, log: logging.Logger) -> None:
        self._primary = primary
        self._shadow = shadow
        self._timeout_s = timeout_s
        self._log = log
        self._reading = False
        self._writing = False
        self._misses = 0
        self._away_because = "not connected yet"
        self._announced = False
        self._queue: deque[tuple[Write, Location | None]] = deque()
        self._work = asyncio.Event()
        self._lost = asyncio.Event()
        self._dirty: set[Location] = set()
        # The client can turn a cancellation into an error of its own, so cancelling alone does not end the tasks.
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(
        cls, primary: RedisIndex, shadow: MemoryIndex, *, timeout_s: float, log: logging.Logger
    ) -> "ResilientIndex":
        """`timeout_s`: the longest that a look-up waits for Redis. Redis need not be there."""
        index = cls(primary, shadow, timeout_s=timeout_s, log=log)
        index._tasks = [asyncio.create_task(index._write_forever()), asyncio.create_task(index._mend_forever())]
        try:
            await index._heal()
        except (RedisError, OSError, TimeoutError) as error:
            index._open(error)
        return index

    async def record(self, location: Location, hashes: Sequence[int], now: float, capacity: int | None = None) -> None:
        await self._shadow.record(location, hashes, now, capacity)
        if hashes:
            self._enqueue(lambda pipeline: self._primary.queue_record(pipeline, location, hashes, now, capacity), None)

    async def remove(self, location: Location, hashes: Sequence[int]) -> None:
        await self._shadow.remove(location, hashes)
        if hashes:
            self._enqueue(lambda pipeline: self._primary.queue_remove(pipeline, location, hashes), location)

    async def remove_older(self, location: Location, before: float) -> None:
        await self._shadow.remove_older(location, before)
        self._enqueue(lambda pipeline: self._primary.queue_remove_older(pipeline, location, before), location)

    async def clear(self, location: Location) -> None:
        await self._shadow.clear(location)
        self._enqueue(lambda pipeline: self._primary.queue_clear(pipeline, location), location)

    async def lookup(self, hashes: Sequence[int], locations: Sequence[Location], since: float) -> list[Residency]:
        own = await self._shadow.lookup(hashes, locations, since)
        if not self._reading:
            return own
        reloads = self._primary.reloads
        asked = asyncio.ensure_future(self._primary.lookup(hashes, locations, since))
        try:
            shared = await _within(self._timeout_s, asked)
        except TimeoutError as error:
            self._misses += 1
            if self._misses >= MISSES_TO_OPEN:
                self._open(error)
            return own
        except (RedisError, OSError) as error:
            self._open(error)
            return own
        self._misses = 0
        if self._primary.reloads != reloads:
            # It had lost our script, so it was restarted or flushed, and has lost what it knew as well.
            self._open(RedisError("it was restarted"))
        return [max(pair) for pair in zip(own, shared, strict=True)]

    async def stats(self) -> IndexStats:
        if self._reading:
            try:
                async with asyncio.timeout(BACKGROUND_TIMEOUT_S):
                    return await self._primary.stats()
            except (RedisError, OSError, TimeoutError) as error:
                self._open(error)
        shadow = await self._shadow.stats()
        return IndexStats("memory (redis unavailable)", shadow.entries, healthy=False, detail=self._away_because)

    async def flushed(self) -> None:
        """Return when everything recorded so far is in Redis, or Redis is away."""
        while self._writing and (self._queue or self._work.is_set()):
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._primary.close()

    def _open(self, error: Exception) -> None:
        """Redis is away: from here on look-ups and writes do without it."""
        self._away_because = str(error) or f"no answer within {self._timeout_s * 1e3:g} ms"
        self._reading = self._writing = False
        self._misses = 0
        for _, removed_from in self._queue:
            if removed_from is not None:
                self._dirty.add(removed_from)
        self._queue.clear()
        if not self._announced:
            self._announced = True
            self._log.warning("redis is away (%s): routing from memory", self._away_because)
        self._lost.set()

    def _enqueue(self, write: Write, removed_from: Location | None) -> None:
        """`removed_from`: the location, when the write removes something there."""
        if not self._writing:
            if removed_from is not None:
                self._dirty.add(removed_from)
            return
        if len(self._queue) >= MAX_QUEUED:
            _, dropped_removal = self._queue.popleft()
            if dropped_removal is not None:
                self._dirty.add(dropped_removal)
        self._queue.append((write, removed_from))
        self._work.set()

    async def _write_forever(self) -> None:
        while not self._closed:
            await self._work.wait()
            if not self._reading:
                # Healing: what is queued meanwhile follows when that is done.
                await asyncio.sleep(0.005)
                if not self._writing:
                    self._work.clear()
                continue
            batch = [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]
            if not batch:
                self._work.clear()
                continue
            pipeline = self._primary.pipeline()
            for write, _ in batch:
                write(pipeline)
            try:
                await self._execute(pipeline)
            except (RedisError, OSError, TimeoutError) as error:
                self._dirty.update(removed_from for _, removed_from in batch if removed_from is not None)
                self._open(error)

    async def _mend_forever(self) -> None:
        while not self._closed:
            await self._lost.wait()
            self._lost.clear()
            attempt = 0
            while not self._reading and not self._closed:
                await asyncio.sleep(PROBE_DELAYS_S[min(attempt, len(PROBE_DELAYS_S) - 1)])
                attempt += 1
                try:
                    await self._heal()
                except (RedisError, OSError, TimeoutError) as error:
                    self._writing = False
                    self._away_because = str(error) or "no answer"

    async def _heal(self) -> None:
        async with asyncio.timeout(BACKGROUND_TIMEOUT_S):
            await self._primary.ping()
        # From here on new writes are queued, so that nothing falls between what is copied now and what comes then.
        self._writing = True
        dirty, self._dirty = self._dirty, set()
        try:
            if dirty:
                pipeline = self._primary.pipeline()
                for location in dirty:
                    self._primary.queue_clear(pipeline, location)
                await self._execute(pipeline)
            for location in self._shadow.locations():
                entries = self._shadow.contents(location)
                for start in range(0, len(entries), HEAL_CHUNK):
                    pipeline = self._primary.pipeline()
                    self._primary.queue_entries(pipeline, location, entries[start : start + HEAL_CHUNK])
                    await self._execute(pipeline)
        except BaseException:
            self._dirty |= dirty
            raise
        self._reading = True
        if self._announced:
            self._announced = False
            self._log.warning("redis is back: the index is shared again")

    @staticmethod
    async def _execute(pipeline: Pipeline) -> None:
        async with asyncio.timeout(BACKGROUND_TIMEOUT_S):
            await pipeline.execute()


async def _within(seconds: float, asked: "asyncio.Future[list[Residency]]") -> list[Residency]:
    """The result of `asked`, or TimeoutError after `seconds`.

    Unlike asyncio.timeout it does not wait for the cancelled work to wind up, which on a frozen server can take as long
    as the server stays frozen.
    """
    try:
        done, _ = await asyncio.wait((asked,), timeout=seconds)
    except asyncio.CancelledError:
        _abandon(asked)
        raise
    if not done:
        _abandon(asked)
        raise TimeoutError
    return asked.result()


def _abandon(asked: "asyncio.Future[list[Residency]]") -> None:
    asked.cancel()
    # Whatever it ends with is nobody's business any more; not looking at it would be reported as an error.
    asked.add_done_callback(lambda future: future.cancelled() or future.exception())
