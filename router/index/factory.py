"""From a URL to an index."""

import logging

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from kvroute.index.memory import MemoryIndex
from kvroute.index.protocol import Index
from kvroute.index.redis import RedisIndex
from kvroute.index.resilient import ResilientIndex

SOCKET_TIMEOUT_S = 1.0
"""Bounds what is left behind when a look-up's own, shorter deadline has passed."""
MAX_CONNECTIONS = 1024
"""Look-ups in flight at once; each has a connection while it waits."""


async def open_index(url: str | None, *, timeout_s: float, prefix: str, log: logging.Logger) -> Index:
    """The index at `url` (redis://, rediss://, unix://), or in memory for None. Redis need not be there yet.

    `timeout_s` bounds what a look-up waits for Redis. Raises ValueError for a URL that is none of these.
    """
    if url is None:
        return MemoryIndex()
    client = Redis.from_url(
        url,
        socket_connect_timeout=SOCKET_TIMEOUT_S,
        socket_timeout=SOCKET_TIMEOUT_S,
        max_connections=MAX_CONNECTIONS,
        # A failure must be seen at once: it decides about the circuit, and a retry would multiply the deadline.
        retry=Retry(NoBackoff(), 0),
    )
    return await ResilientIndex.start(RedisIndex(client, prefix), MemoryIndex(), timeout_s=timeout_s, log=log)
