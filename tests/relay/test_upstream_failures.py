"""Instances that can't be reached, are slow, break off, or are no longer wanted."""

import asyncio
import contextlib
import socket

import pytest

from kvroute.relay.connection import HIGH_WATER_BYTES
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
from tests.relay.conftest import Run
from tests.support.exchanges import CHUNKED, OK, PATIENT, QUICK, Play, always, get, once, silent, whole
from tests.support.raw_server import Peer, raw_server


def test_nobody_listens(play: Play) -> None:
    async def scenario(_: Upstream) -> None:
        nobody = Upstream(f"http://127.0.0.1:{free_port()}", Timeouts())
        with pytest.raises(ConnectError):
            await get(nobody)

    play(always(OK), scenario)


def test_a_host_that_does_not_exist(play: Play) -> None:
    async def scenario(_: Upstream) -> None:
        with pytest.raises(ConnectError):
            await get(Upstream("http://host.invalid", Timeouts()))

    play(always(OK), scenario)


def test_closed_without_an_answer(play: Play) -> None:
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
def test_an_answer_without_a_head_to_speak_of(play: Play, data: bytes) -> None:
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
def test_a_body_that_breaks_off_raises_after_what_came(play: Play, data: bytes) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        received = b""
        with pytest.raises(AnswerBroken):
            while True:
                received += await answer.read()
        assert received == b"half"
        assert upstream.idle_connections == 0

    play(once(data), scenario)


def test_no_answer_in_time(play: Play) -> None:
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


def test_a_head_without_a_body_in_time_is_no_first_byte(play: Play) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.send(CHUNKED)
        await peer.closed()

    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        with pytest.raises(FirstByteTimeout):
            await answer.read()

    play(script, scenario, QUICK)


def test_an_answer_that_stops_coming(play: Play) -> None:
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


def test_a_slow_reader_is_not_an_idle_instance(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        await asyncio.sleep(0.5)
        assert await whole(answer) == b"ok"

    play(always(OK), scenario, QUICK)


@pytest.mark.parametrize("begun", [False, True], ids=["before the head", "within the body"])
def test_cancelled_work_closes_the_connection_at_once(play: Play, begun: bool) -> None:
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


def test_an_aborted_answer_closes_the_connection_at_once(play: Play) -> None:
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


def test_aborting_a_finished_answer_spares_its_connection(play: Play) -> None:
    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        await whole(answer)
        answer.abort()
        assert (await get(upstream)).reused

    play(always(OK), scenario)


def test_an_answer_without_framing_is_whole_only_when_the_instance_ended_it(play: Play) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\n\r\nhalf")
        await peer.closed()

    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        assert await answer.read() == b"half"
        await upstream.close()
        with pytest.raises(AnswerBroken):
            await answer.read()

    play(script, scenario)


def test_an_instance_that_closes_its_side_during_an_upload_ends_the_exchange(play: Play) -> None:
    async def script(peer: Peer, number: int) -> None:
        peer.stop_reading()
        peer.writer.write_eof()
        await asyncio.sleep(60)

    async def scenario(upstream: Upstream) -> None:
        with pytest.raises(UpstreamDisconnected):
            await upstream.send(b"POST", b"/", [], b"x" * 20_000_000)
        assert upstream.open_connections == 0

    play(script, scenario)


def test_an_aborted_answer_that_was_held_back_gives_what_it_has_then_breaks_off(play: Play) -> None:
    async def script(peer: Peer, number: int) -> None:
        await peer.request()
        await peer.send(b"HTTP/1.1 200 OK\r\ncontent-length: 9000000\r\n\r\n" + b"x" * 9_000_000)

    async def scenario(upstream: Upstream) -> None:
        answer = await get(upstream)
        await asyncio.sleep(0.05)
        answer.abort()
        assert len(await answer.read()) > HIGH_WATER_BYTES
        with pytest.raises(AnswerBroken):
            await answer.read()

    play(script, scenario)


def test_no_connection_in_time(run: Run) -> None:
    """The server accepts and then does not shake hands."""

    async def main() -> None:
        closed = asyncio.Event()
        async with raw_server(silent(closed)) as port:
            upstream = Upstream(f"https://127.0.0.1:{port}", QUICK)
            with pytest.raises(ConnectError, match=r"0\.2 s"):
                await get(upstream)
            await asyncio.wait_for(closed.wait(), 0.2)
            assert upstream.open_connections == 0

    run(main())


def test_no_connection_in_time_where_the_instance_accepts_none(run: Run) -> None:
    async def main() -> None:
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            # More than a full queue of connections to accept is left without a reply.
            for _ in range(4):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(listener.getsockname())
            upstream = Upstream(f"http://127.0.0.1:{listener.getsockname()[1]}", QUICK)
            with pytest.raises(ConnectError, match=r"0\.2 s"):
                await get(upstream)

    run(main())


def test_cancelled_while_connecting_closes_the_connection_at_once(run: Run) -> None:
    async def main() -> None:
        closed = asyncio.Event()
        async with raw_server(silent(closed)) as port:
            task = asyncio.create_task(get(Upstream(f"https://127.0.0.1:{port}", PATIENT)))
            await asyncio.sleep(0.1)
            assert not task.done()
            task.cancel()
            await asyncio.wait_for(closed.wait(), 0.2)
            with pytest.raises(asyncio.CancelledError):
                await task

    run(main())
