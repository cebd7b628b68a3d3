"""The upstream client against servers that behave and servers that do not, on asyncio and on uvloop."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from kvroute.relay.connection import HIGH_WATER_BYTES, Answer
from kvroute.relay.types import (
    AnswerBroken,
    ConnectError,
    FirstByteTimeout,
    IdleTimeout,
    Timeouts,
    UpstreamDisconnected,
)
from kvroute.relay.upstream import Upstream
from kvroute.simulator.process import free_port
from tests.support.raw_server import Peer, Script, raw_server

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
PATIENT = Timeouts()
QUICK = Timeouts(connect_s=1.0, first_byte_s=0.2, idle_s=0.2)

Scenario = Callable[[Upstream], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def play(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Runs a scenario against a scripted server, on the loop of the parameter."""

    def run(script: Script, scenario: Scenario, timeouts: Timeouts = PATIENT, **options: float) -> None:
        async def main() -> None:
            async with raw_server(script) as port:
                upstream = Upstream(f"http://127.0.0.1:{port}/base", timeouts, **options)  # type: ignore[arg-type]
                try:
                    async with asyncio.timeout(20):
                        await scenario(upstream)
                finally:
                    await upstream.close()

        if request.param == "uvloop":
            uvloop.run(main())
        else:
            asyncio.run(main())

    return run


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


def test_a_request_goes_out_as_given_with_host_and_length(play: Callable[..., None]) -> None:
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


def test_a_connection_is_used_again(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        answers = []
        for _ in range(5):
            answer = await get(upstream)
            answers.append(answer.reused)
            assert await whole(answer) == b"ok"
        assert answers == [False, True, True, True, True]
        assert upstream.open_connections == upstream.idle_connections == 1

    play(always(OK), scenario)


def test_requests_at_once_have_a_connection_each(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        answers = await asyncio.gather(*(get(upstream) for _ in range(10)))
        assert [await whole(answer) for answer in answers] == [b"ok"] * 10

    play(always(OK), scenario)


def test_no_more_idle_connections_than_allowed_are_kept(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        answers = await asyncio.gather(*(get(upstream) for _ in range(10)))
        for answer in answers:
            await whole(answer)
        await asyncio.sleep(0.05)
        assert upstream.idle_connections == upstream.open_connections == 3

    play(always(OK), scenario, max_idle=3)


def test_a_connection_that_has_been_idle_too_long_is_not_used(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        await whole(await get(upstream))
        await asyncio.sleep(0.1)
        assert not (await get(upstream)).reused

    play(always(OK), scenario, idle_ttl_s=0.05)


def test_a_kept_connection_that_dies_on_the_next_request_is_replaced_without_a_word(play: Callable[..., None]) -> None:
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


def test_idle_connections_that_the_server_closes_are_forgotten(play: Callable[..., None]) -> None:
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
def test_a_connection_that_is_to_be_closed_is_not_kept(play: Callable[..., None], answer: bytes) -> None:
    async def scenario(upstream: Upstream) -> None:
        for _ in range(2):
            received = await get(upstream)
            assert not received.reused
            assert await whole(received) == b"ok"

    play(always(answer), scenario)


def test_bytes_behind_an_answer_end_the_connection_and_harm_nobody(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        for _ in range(2):
            answer = await get(upstream)
            assert not answer.reused
            assert await whole(answer) == b"ok"

    play(always(OK + b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nwrong"), scenario)


def test_bytes_on_an_idle_connection_are_not_the_next_answer(play: Callable[..., None]) -> None:
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


def test_interim_answers_are_skipped(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        assert answer.status == 200
        assert answer.headers == [(b"content-length", b"2")]
        assert await whole(answer) == b"ok"

    play(always(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + OK), scenario)


@pytest.mark.parametrize("status", [b"204 No Content", b"304 Not Modified"])
def test_answers_without_a_body(play: Callable[..., None], status: bytes) -> None:
    async def scenario(upstream: Upstream) -> None:
        for reused in (False, True):
            answer = await get(upstream)
            assert answer.reused is reused
            assert await whole(answer) == b""

    play(always(b"HTTP/1.1 " + status + b"\r\n\r\n"), scenario)


def test_the_answer_to_head_has_no_body_whatever_its_length_says(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await upstream.send(b"HEAD", b"/", [], b"")
        assert (b"content-length", b"1000") in answer.headers
        assert await whole(answer) == b""

    play(always(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n"), scenario)


def test_chunks_with_extensions_and_trailers(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        for reused in (False, True):
            answer = await get(upstream)
            assert answer.reused is reused
            assert await whole(answer) == b"hello world"

    play(always(CHUNKED + b"5;x=1\r\nhello\r\n6\r\n world\r\n0\r\nx-trailer: y\r\n\r\n"), scenario)


def test_a_body_without_framing_ends_with_the_connection(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        assert await whole(await get(upstream)) == b"all of it"

    play(once(b"HTTP/1.1 200 OK\r\n\r\nall of it"), scenario)


def test_end_to_end_headers_stay_as_they_came_and_the_others_go(play: Callable[..., None]) -> None:
    head = (
        b"HTTP/1.1 200 OK\r\nSet-Cookie: a\r\nset-cookie: b\r\nconnection: X-Hop\r\nx-hop: 1\r\nkeep-alive: 5\r\n"
        b"content-length: 0\r\n\r\n"
    )

    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        assert answer.headers == [(b"set-cookie", b"a"), (b"set-cookie", b"b"), (b"content-length", b"0")]

    play(always(head), scenario)


def test_pieces_are_given_as_they_come(play: Callable[..., None]) -> None:
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


def test_nobody_listens(play: Callable[..., None]) -> None:
    async def scenario(_: Upstream) -> None:
        nobody = Upstream(f"http://127.0.0.1:{free_port()}", Timeouts())
        with pytest.raises(ConnectError):
            await get(nobody)

    play(always(OK), scenario)


def test_a_host_that_does_not_exist(play: Callable[..., None]) -> None:
    async def scenario(_: Upstream) -> None:
        with pytest.raises(ConnectError):
            await get(Upstream("http://host.invalid", Timeouts()))

    play(always(OK), scenario)


def test_closed_without_an_answer(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        with pytest.raises(UpstreamDisconnected):
            await get(upstream)

    play(once(b""), scenario)


BROKEN = {
    "within the head": b"HTTP/1.1 200 OK\r\ncontent-le",
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
    "head too large": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000 + b"\r\n\r\n",
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN.keys())
def test_an_answer_without_a_head_to_speak_of(play: Callable[..., None], data: bytes) -> None:
    async def scenario(upstream: Upstream) -> None:
        with pytest.raises(AnswerBroken):
            await get(upstream)

    play(once(data), scenario)


BROKEN_BODIES = {
    "shorter than its length": b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhalf",
    "between chunks": CHUNKED + b"4\r\nhalf\r\n",
    "within a chunk": CHUNKED + b"8\r\nhalf",
    "bad chunk size": CHUNKED + b"4\r\nhalf\r\nzz\r\n",
}


@pytest.mark.parametrize("data", BROKEN_BODIES.values(), ids=BROKEN_BODIES.keys())
def test_a_body_that_breaks_off_raises_after_what_came(play: Callable[..., None], data: bytes) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        received = b""
        with pytest.raises(AnswerBroken):
            while True:
                received += await answer.read()
        assert received == b"half"
        assert upstream.idle_connections == 0

    play(once(data), scenario)


def test_no_answer_in_time(play: Callable[..., None]) -> None:
    closed = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.closed()
        closed.set()

    async def scenario(upstream: Upstream) -> None:
        with pytest.raises(FirstByteTimeout):
            await get(upstream)
        await asyncio.wait_for(closed.wait(), 1)

    play(script, scenario, QUICK)


def test_a_head_without_a_body_in_time_is_no_first_byte(play: Callable[..., None]) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        await peer.closed()

    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        with pytest.raises(FirstByteTimeout):
            await answer.read()

    play(script, scenario, QUICK)


def test_an_answer_that_stops_coming(play: Callable[..., None]) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        for _ in range(3):
            await peer.send(CHUNKED + b"1\r\nx\r\n" if _ == 0 else b"1\r\nx\r\n")
            await asyncio.sleep(0.12)
        await peer.closed()

    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        received = b""
        with pytest.raises(IdleTimeout):
            while True:
                received += await answer.read()
        # Longer than the limit in all, but never for the limit without a byte.
        assert received == b"xxx"

    play(script, scenario, QUICK)


def test_a_slow_reader_is_not_an_idle_instance(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        await asyncio.sleep(0.5)
        assert await whole(answer) == b"ok"

    play(always(OK), scenario, QUICK)


@pytest.mark.parametrize("begun", [False, True], ids=["before the head", "within the body"])
def test_cancelled_work_closes_the_connection_at_once(play: Callable[..., None], begun: bool) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        if begun:
            await peer.send(CHUNKED + b"1\r\nx\r\n")
        asked.set()
        await peer.closed()
        closed.set()

    async def scenario(upstream: Upstream) -> None:
        async def work() -> None:
            answer = await get(upstream)
            while True:
                await answer.read()

        task = asyncio.create_task(work())
        await asked.wait()
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait_for(closed.wait(), 0.2)
        assert upstream.open_connections == 0

    play(script, scenario)


def test_an_aborted_answer_closes_the_connection_at_once(play: Callable[..., None]) -> None:
    closed = asyncio.Event()

    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.send(CHUNKED + b"1\r\nx\r\n")
        await peer.closed()
        closed.set()

    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        answer.abort()
        await asyncio.wait_for(closed.wait(), 0.2)

    play(script, scenario)


def test_aborting_a_finished_answer_spares_its_connection(play: Callable[..., None]) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        await whole(answer)
        answer.abort()
        assert (await get(upstream)).reused

    play(always(OK), scenario)


def test_a_caller_that_does_not_read_holds_the_instance_back(play: Callable[..., None]) -> None:
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


def test_a_large_request_arrives_whole_at_a_slow_instance(play: Callable[..., None]) -> None:
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


@pytest.mark.parametrize("url", ["ftp://host", "host:80", "http://", "/path"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="not an http or https URL"):
        Upstream(url, Timeouts())
