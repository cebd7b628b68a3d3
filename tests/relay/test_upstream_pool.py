"""Which connections are kept and used again."""

import asyncio

import pytest

from kvroute.relay.types import (
    ConnectError,
    FirstByteTimeout,
)
from kvroute.relay.upstream import Upstream
from tests.support.exchanges import OK, QUICK, Play, always, get, once, whole
from tests.support.raw_server import Peer, Script


def test_a_connection_is_used_again(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        answers = []
        for _ in range(5):
            answer = await get(upstream)
            answers.append(answer.reused)
            assert await whole(answer) == b"ok"
        assert answers == [False, True, True, True, True]
        assert upstream.open_connections == upstream.idle_connections == 1

    play(always(OK), scenario)


def test_requests_at_once_have_a_connection_each(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        answers = await asyncio.gather(*(get(upstream) for _ in range(10)))
        assert [await whole(answer) for answer in answers] == [b"ok"] * 10

    play(always(OK), scenario)


def test_no_more_idle_connections_than_allowed_are_kept(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        answers = await asyncio.gather(*(get(upstream) for _ in range(10)))
        for answer in answers:
            await whole(answer)
        await asyncio.sleep(0.05)
        assert upstream.idle_connections == upstream.open_connections == 3

    play(always(OK), scenario, max_idle=3)


def test_a_connection_that_has_been_idle_too_long_is_not_used(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        await whole(await get(upstream))
        await asyncio.sleep(0.1)
        assert not (await get(upstream)).reused

    play(always(OK), scenario, idle_ttl_s=0.05)


def test_a_kept_connection_that_dies_on_the_next_request_is_replaced_without_a_word(play: Play) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.send(OK)
        if number == 0:
            # As a server whose keep-alive time runs out just when the next request arrives.
            await peer.request()
        else:
            await peer.closed()

    async def scenario(upstream: Upstream) -> None:
        assert await whole(await get(upstream)) == b"ok"
        again = await get(upstream)
        assert not again.reused
        assert await whole(again) == b"ok"

    play(script, scenario)


def test_idle_connections_that_the_server_closes_are_forgotten(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        await whole(await get(upstream))
        await asyncio.sleep(0.1)
        assert upstream.open_connections == 0

    play(once(OK), scenario)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\nok",
    ],
    ids=["connection: close", "HTTP/1.0"],
)
def test_a_connection_that_is_to_be_closed_is_not_kept(play: Play, answer: bytes) -> None:
    async def scenario(upstream: Upstream) -> None:
        for _ in range(2):
            received = await get(upstream)
            assert not received.reused
            assert await whole(received) == b"ok"

    play(always(answer), scenario)


def test_bytes_behind_an_answer_end_the_connection_and_harm_nobody(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        for _ in range(2):
            answer = await get(upstream)
            assert not answer.reused
            assert await whole(answer) == b"ok"

    play(always(OK + b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong"), scenario)


def test_bytes_on_an_idle_connection_are_not_the_next_answer(play: Play) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.send(OK)
        await asyncio.sleep(0.05)
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong")
        await peer.closed()

    async def scenario(upstream: Upstream) -> None:
        await whole(await get(upstream))
        await asyncio.sleep(0.15)
        assert await whole(await get(upstream)) == b"ok"

    play(script, scenario)


def test_connections_of_a_burst_do_not_outlive_it(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        for answer in await asyncio.gather(*(get(upstream) for _ in range(5))):
            await whole(answer)
        assert upstream.idle_connections == 5
        for _ in range(20):
            await whole(await get(upstream))
            await asyncio.sleep(0.02)
        assert upstream.open_connections == 1

    play(always(OK), scenario, idle_ttl_s=0.2)


def test_after_an_answer_that_came_before_the_request_was_sent_the_connection_is_not_used(play: Play) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.reader.readuntil(b"\r\n\r\n")
        peer.stop_reading()
        await peer.send(b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\nno")
        await asyncio.sleep(60)

    async def scenario(upstream: Upstream) -> None:
        for _ in range(2):
            answer = await upstream.send(b"POST", b"/", [], b"x" * 20_000_000)
            assert (answer.status, answer.reused) == (413, False)
            assert await whole(answer) == b"no"
        await asyncio.sleep(0.02)
        assert upstream.open_connections == 0

    play(script, scenario)


def in_two_parts(body_may_come: asyncio.Event, then: bytes) -> Script:
    """Answers the first request of a connection with a head, and a body when it may; the second with `then`."""

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.send(OK[:-2])
        await body_may_come.wait()
        await peer.send(OK[-2:])
        await peer.request()
        await peer.send(then)
        await peer.closed()

    return script


async def until_free(upstream: Upstream) -> None:
    """Return as soon as the connection is free, before its last caller has run: that one was woken later."""
    while not upstream.idle_connections:
        await asyncio.sleep(0)


def test_a_caller_cancelled_when_its_answer_has_ended_leaves_the_connection_to_the_next(play: Play) -> None:
    go_on = asyncio.Event()

    async def scenario(upstream: Upstream) -> None:
        first = asyncio.create_task(whole(await get(upstream)))
        await asyncio.sleep(0.02)
        go_on.set()
        await until_free(upstream)
        first.cancel()
        answer = await get(upstream)
        assert answer.reused
        assert await whole(answer) == b"ok"
        assert first.cancelled()

    play(in_two_parts(go_on, OK), scenario)


def test_the_time_limit_of_an_exchange_is_not_lifted_by_the_caller_of_the_one_before(play: Play) -> None:
    go_on = asyncio.Event()

    async def scenario(upstream: Upstream) -> None:
        first = asyncio.create_task(whole(await get(upstream)))
        await asyncio.sleep(0.02)
        go_on.set()
        await until_free(upstream)
        with pytest.raises(FirstByteTimeout):
            await get(upstream)
        assert await first == b"ok"

    play(in_two_parts(go_on, b""), scenario, QUICK)


def test_close_ends_what_is_under_way_and_nothing_is_sent_afterwards(play: Play) -> None:
    connections = 0

    async def script(peer: Peer, number: int) -> None:
        nonlocal connections
        connections += 1
        await peer.request()
        await peer.send(OK)
        await peer.closed()

    async def scenario(upstream: Upstream) -> None:
        await whole(await get(upstream))
        waiting = asyncio.create_task(get(upstream))
        await asyncio.sleep(0.02)
        await upstream.close()
        assert upstream.open_connections == 0
        # On a connection used before, it would otherwise be sent again.
        with pytest.raises(ConnectError):
            await waiting
        with pytest.raises(ConnectError):
            await get(upstream)
        assert connections == 1

    play(script, scenario)
