"""The index in Redis (or a server that speaks like it), shared by all gateways and surviving their restarts.

A location is one sorted set, `<prefix>{kv}:<owner>/<tier>`: members are block hashes (8 bytes, big-endian), scores the
time at which each was last recorded (Unix seconds). Clearing a location is the deletion of a key, trimming it to a
capacity a removal by rank, and expiry a comparison with the score at look-up.
"""

from collections.abc import Iterable, Sequence
from importlib.resources import files
from struct import pack

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.exceptions import NoScriptError

from kvroute.index.protocol import NOWHERE, IndexStats, Location, Residency, Tier

DEPTH_S = 1e-6
"""A block's score is this much lower for each block above it, so that trimming takes the deepest of a prompt first."""

KEY_LIFE_S = 7 * 24 * 3600
"""A location that nobody has recorded anything at for so long goes away by itself, with its instance."""


class RedisIndex:
    """Raises `redis.exceptions.RedisError` and OSError; `ResilientIndex` deals with them."""

    def __init__(self, client: Redis, prefix: str = "kvroute:") -> None:
        self._client = client
        # The braces keep all keys of one deployment on one shard, since a look-up is one script over several of them.
        self._prefix = f"{prefix}{{kv}}:"
        self._script = files(__package__).joinpath("lookup.lua").read_text()
        self._sha = ""
        self.reloads = 0
        """How often the server turned out to have lost the look-up script, and so to have been restarted or flushed."""

    async def record(self, location: Location, hashes: Sequence[int], now: float, capacity: int | None = None) -> None:
        if hashes:
            pipeline = self.pipeline()
            self.queue_record(pipeline, location, hashes, now, capacity)
            await pipeline.execute()

    async def remove(self, location: Location, hashes: Sequence[int]) -> None:
        if hashes:
            await self._client.zrem(self._key(location), *map(_member, hashes))

    async def remove_older(self, location: Location, before: float) -> None:
        await self._client.zremrangebyscore(self._key(location), "-inf", before)

    async def clear(self, location: Location) -> None:
        await self._client.unlink(self._key(location))

    async def lookup(self, hashes: Sequence[int], locations: Sequence[Location], since: float) -> list[Residency]:
        if not hashes or not locations:
            return [NOWHERE] * len(locations)
        arguments: list[str | bytes] = [*map(self._key, locations), pack(f">{len(hashes)}Q", *hashes), repr(since)]
        if not self._sha:
            self._sha = await self._client.script_load(self._script)
        try:
            answer = await self._client.evalsha(self._sha, len(locations), *arguments)
        except NoScriptError:
            # Restarted or flushed since; this way once costs the script's text on the wire and loads it again.
            self.reloads += 1
            answer = await self._client.eval(self._script, len(locations), *arguments)
        return [Residency(int(run), float(seen)) for run, seen in zip(answer[::2], answer[1::2], strict=True)]

    async def stats(self) -> IndexStats:
        entries: dict[str, int] = {}
        async for key in self._client.scan_iter(match=_escape(self._prefix) + "*", count=1000):
            name = key.decode()[len(self._prefix) :]
            entries[name] = await self._client.zcard(key)
        return IndexStats(backend="redis", entries=entries, healthy=True)

    async def close(self) -> None:
        await self._client.aclose()

    async def ping(self) -> None:
        await self._client.ping()

    def pipeline(self) -> Pipeline:
        """For `queue_record` and its siblings; execute() sends all that is queued in one round trip."""
        return self._client.pipeline(transaction=False)

    def queue_record(
        self, pipeline: Pipeline, location: Location, hashes: Sequence[int], now: float, capacity: int | None
    ) -> None:
        key = self._key(location)
        pipeline.zadd(key, {_member(block): now - depth * DEPTH_S for depth, block in enumerate(hashes)})
        if capacity is not None:
            pipeline.zremrangebyrank(key, 0, -capacity - 1)
        pipeline.expire(key, KEY_LIFE_S)

    def queue_entries(self, pipeline: Pipeline, location: Location, entries: Iterable[tuple[int, float]]) -> None:
        """Record (hash, seen) pairs; what Redis has seen later stays as it is."""
        key = self._key(location)
        pipeline.zadd(key, {_member(block): seen for block, seen in entries}, gt=True)
        pipeline.expire(key, KEY_LIFE_S)

    def queue_remove(self, pipeline: Pipeline, location: Location, hashes: Sequence[int]) -> None:
        pipeline.zrem(self._key(location), *map(_member, hashes))

    def queue_remove_older(self, pipeline: Pipeline, location: Location, before: float) -> None:
        pipeline.zremrangebyscore(self._key(location), "-inf", before)

    def queue_clear(self, pipeline: Pipeline, location: Location) -> None:
        pipeline.unlink(self._key(location))

    def _key(self, location: Location) -> str:
        return f"{self._prefix}{location.owner}/{location.tier}"

    @staticmethod
    def location_of(name: str) -> Location:
        """The location of an "owner/tier" name in `stats`."""
        owner, _, tier = name.rpartition("/")
        return Location(owner, Tier(tier))


def _member(block: int) -> bytes:
    return block.to_bytes(8, "big")


def _escape(pattern: str) -> str:
    return "".join("\\" + letter if letter in "*?[]\\" else letter for letter in pattern)
