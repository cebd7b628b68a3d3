"""What the upstream client sends and receives, on asyncio and on uvloop."""

import asyncio

import pytest

from kvroute.relay.connection import HIGH_WATER_BYTES
from kvroute.relay.types import (
    Timeouts,
)
from kvroute.relay.upstream import Upstream
from tests.support.exchanges import CHUNKED, OK, Play, always, get, once, whole
from tests.support.raw_server import Peer


def test_a_request_goes_out_as_given_with_host_and_length(play: Play) -> None:
    seen: list[bytes] = []

    async def script(peer: Peer, number: int) -> None:
        seen.append(await peer.request())
        await peer.send(OK)

    async def scenario(upstream: Upstream) -> None:
        headers = [(b"x-one", b"1"), (b"x-one", b"2")]
        answer = await upstream.send(b"POST", b"/v1/chat?q=%20", headers, b'{"a": 1}')
        assert answer.status == 200
        assert await whole(answer) == b"ok"

    play(script, scenario)
    head, _, body = seen[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /base/v1/chat?q=%20 HTTP/1.1"
    assert lines[1].startswith(b"host: 127.0.0.1:")
    assert lines[2:] == [b"x-one: 1", b"x-one: 2", b"content-length: 8"]
    assert body == b'{"a": 1}'


def test_interim_answers_are_skipped(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        assert answer.status == 200
        assert answer.headers == [(b"content-length", b"2")]
        assert await whole(answer) == b"ok"

    play(always(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK), scenario)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_answers_without_a_body(play: Play, status: bytes) -> None:
    async def scenario(upstream: Upstream) -> None:
        for reused in (False, True):
            answer = await get(upstream)
            assert answer.reused is reused
            assert await whole(answer) == b""

    play(always(b"HTTP/1.1 " + status + b"\r\ncontent-length: 5\r\n\r\n"), scenario)


def test_the_answer_to_head_has_no_body_whatever_its_length_says(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await upstream.send(b"HEAD", b"/", [], b"")
        assert (b"content-length", b"1000") in answer.headers
        assert await whole(answer) == b""

    play(always(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"), scenario)


def test_chunks_with_extensions_and_trailers(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        for reused in (False, True):
            answer = await get(upstream)
            assert answer.reused is reused
            assert await whole(answer) == b"hello world"

    play(always(CHUNKED + b"5;x=1\r\nhello\r\n6\r\n world\r\n0\r\nx-trailer: y\r\n\r\n"), scenario)


def test_a_body_without_framing_ends_with_the_connection(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        assert await whole(await get(upstream)) == b"all of it"

    play(once(b"HTTP/1.1 200 OK\r\n\r\nall of it"), scenario)


def test_end_to_end_headers_stay_as_they_came_and_the_others_go(play: Play) -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nSet-Cookie: a\r\nset-cookie: b\r\nconnection: X-Hop\r\nx-hop: 1\r\nkeep-alive: 5\r\n"
        b"content-length: 0\r\n\r\n"
    )

    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        assert answer.headers == [(b"set-cookie", b"a"), (b"set-cookie", b"b"), (b"content-length", b"0")]

    play(always(head), scenario)


def test_pieces_are_given_as_they_come(play: Play) -> None:
    go_on = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"3\r\none\r\n")
        await go_on.wait()
        await peer.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        assert await answer.read() == b"one"
        go_on.set()
        assert await answer.read() == b"two"
        assert await answer.read() == b""

    play(script, scenario)


def test_a_caller_that_does_not_read_holds_the_instance_back(play: Play) -> None:
    total = 20_000_000
    sent = 0

    async def script(peer: Peer, number: int) -> None:
        nonlocal sent
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        piece = b"x" * 100_000
        while sent < total:
            await peer.send(piece)
            sent += len(piece)
        await peer.closed()

    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        await asyncio.sleep(0.3)
        stopped_at = sent
        await asyncio.sleep(0.2)
        assert sent == stopped_at < total
        assert answer._size < 2 * HIGH_WATER_BYTES + 300_000
        assert len(await whole(answer)) == total

    play(script, scenario)


def test_a_large_request_arrives_whole_at_a_slow_instance(play: Play) -> None:
    body = bytes(range(256)) * 20_000
    arrived: list[bytes] = []

    async def script(peer: Peer, number: int) -> None:
        await asyncio.sleep(0.2)
        arrived.append((await peer.request()).partition(b"\r\n\r\n")[2])
        await peer.send(OK)

    async def scenario(upstream: Upstream) -> None:
        assert await whole(await upstream.send(b"POST", b"/", [], body)) == b"ok"

    play(script, scenario)
    assert arrived == [body]


@pytest.mark.parametrize("url", ["http://one..two", "http://" + "x" * 64])
def test_hosts_that_no_resolver_takes_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not a host's name"):
        Upstream(url, Timeouts())


@pytest.mark.parametrize("url", ["ftp://host", "host:80", "http://", "/path"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http or https URL"):
        Upstream(url, Timeouts())
