"""Exchanges of the upstream client with a scripted server."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvroute.relay.connection import Answer
from kvroute.relay.types import Timeouts
from kvroute.relay.upstream import Upstream
from tests.support.raw_server import Peer, Script

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PATIENT = Timeouts()
QUICK = Timeouts(connect_s=0.2, first_byte_s=0.2, idle_s=0.2)

Scenario = Callable[[Upstream], Awaitable[None]]


class Play(Protocol):
    """Runs a scenario with an Upstream (at /base) for a scripted server. `options` are the Upstream's own."""

    def __call__(self, script: Script, scenario: Scenario, timeouts: Timeouts = PATIENT, **options: float) -> None: ...


async def get(upstream: Upstream) -> Answer:
    return await upstream.send(b"GET", b"/x", [], b"")


async def whole(answer: Answer) -> bytes:
    parts = []
    while data := await answer.read():
        parts.append(data)
    return b"".join(parts)


def always(data: bytes) -> Script:
    """Answers every request with `data`."""

    async def script(peer: Peer, number: int) -> None:
        while await peer.request():
            await peer.send(data)

    return script


def once(data: bytes) -> Script:
    """Answers one request with `data`, then closes."""

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.send(data)

    return script


def silent(closed: asyncio.Event) -> Script:
    """Takes requests without a word; sets `closed` when the client has closed."""

    async def script(peer: Peer, number: int) -> None:
        await peer.closed()
        closed.set()

    return script
