"""The client side of the gateway: what reaches an application, and what is refused before it."""

import asyncio
import json
from typing import Any

import pytest

from tests.support.serving import exchange, serving


class Echo:
    """Answers the body it received, and remembers the requests that reached it and those whose client left."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.cancelled = asyncio.Event()
        self.entered = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.paths.append(scope["path"])
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        if scope["path"] == "/wait":
            self.entered.set()
            try:
                await asyncio.sleep(30)
            except asyncio.CancelledError:
                self.cancelled.set()
                return
        if scope["path"] == "/half":
            headers = [(b"content-length", b"100")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"half", "more_body": True})
            scope["extensions"]["kvroute.abort"]()
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
        await send({"type": "http.response.body", "body": body})


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def request(head: str, body: str = "") -> bytes:
    return (head.replace("\n", "\r\n") + "\r\n\r\n" + body).encode("latin-1")


AMBIGUOUS = {
    "length and chunked": request(
        "POST / HTTP/1.1\nHost: a\nContent-Length: 5\nTransfer-Encoding: chunked", "0\r\n\r\n"
    ),
    "chunked and length": request(
        "POST / HTTP/1.1\nHost: a\nTransfer-Encoding: chunked\nContent-Length: 5", "0\r\n\r\n"
    ),
    "two lengths": request("POST / HTTP/1.1\nHost: a\nContent-Length: 5\nContent-Length: 6", "hello!"),
    "signed length": request("POST / HTTP/1.1\nHost: a\nContent-Length: +5", "hello"),
    "hex length": request("POST / HTTP/1.1\nHost: a\nContent-Length: 0x5", "hello"),
    "list of codings": request("POST / HTTP/1.1\nHost: a\nTransfer-Encoding: gzip, chunked", "0\r\n\r\n"),
    "chunked twice": request("POST / HTTP/1.1\nHost: a\nTransfer-Encoding: chunked, chunked", "0\r\n\r\n"),
    "unknown coding": request("POST / HTTP/1.1\nHost: a\nTransfer-Encoding: xchunked", "0\r\n\r\n"),
    "space before colon": request("POST / HTTP/1.1\nHost: a\nTransfer-Encoding : chunked", "0\r\n\r\n"),
    "folded header": request("POST / HTTP/1.1\nHost: a\n Transfer-Encoding: chunked", "0\r\n\r\n"),
    "bare line feeds": b"POST / HTTP/1.1\nHost: a\nContent-Length: 5\n\nhello",
    "NUL in a value": request("POST / HTTP/1.1\nHost: a\nX: a\x00b"),
    "bad chunk size": request("POST / HTTP/1.1\nHost: a\nTransfer-Encoding: chunked", "zz\r\nhello\r\n0\r\n\r\n"),
    "no host": request("POST / HTTP/1.1\nContent-Length: 0"),
    "two hosts": request("POST / HTTP/1.1\nHost: a\nHost: b\nContent-Length: 0"),
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "tunnel": request("CONNECT a:443 HTTP/1.1\nHost: a"),
    "upgrade": request("GET / HTTP/1.1\nHost: a\nConnection: Upgrade\nUpgrade: websocket"),
}


@pytest.mark.parametrize("raw", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_ambiguous_or_malformed_framing_is_refused_and_the_connection_closed(raw: bytes) -> None:
    async with serving(Echo()) as port:
        answer = await exchange(port, raw + request("GET /smuggled HTTP/1.1\nHost: a"))
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 ") == 1
        assert error_of(answer)["type"] == "invalid_request_error"


@pytest.mark.parametrize("raw", AMBIGUOUS.values(), ids=AMBIGUOUS.keys())
async def test_nothing_behind_a_refused_request_reaches_the_application(raw: bytes) -> None:
    echo = Echo()
    async with serving(echo) as port:
        await exchange(port, raw + request("GET /smuggled HTTP/1.1\nHost: a"))
    assert "/smuggled" not in echo.paths


async def test_a_head_beyond_the_limit_is_431() -> None:
    async with serving(Echo(), max_head_bytes=4096) as port:
        answer = await exchange(port, request("GET / HTTP/1.1\nHost: a\nX: " + "x" * 5000))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert error_of(answer)["code"] == "headers_too_large"


async def test_many_small_headers_count_towards_the_limit() -> None:
    async with serving(Echo(), max_head_bytes=4096) as port:
        answer = await exchange(port, request("GET / HTTP/1.1\nHost: a" + "\nX: y" * 1000))
    assert answer.startswith(b"HTTP/1.1 431 ")


async def test_the_limit_is_per_request_not_per_connection() -> None:
    async with serving(Echo(), max_head_bytes=4096) as port:
        one = request("GET / HTTP/1.1\nHost: a\nX: " + "x" * 3000)
        last = request("GET / HTTP/1.1\nHost: a\nConnection: close")
        answer = await exchange(port, one + one + last)
    assert answer.count(b"HTTP/1.1 200 ") == 3


async def test_a_stalled_head_is_cut_off() -> None:
    async with serving(Echo(), stall_s=0.2) as port:
        answer = await exchange(port, b"GET / HTTP/1.1\r\nHost: a\r\n")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert error_of(answer)["code"] == "request_timeout"


async def test_a_stalled_body_is_cut_off_once() -> None:
    async with serving(Echo(), stall_s=0.2) as port:
        answer = await exchange(port, request("POST / HTTP/1.1\nHost: a\nContent-Length: 10", "hell"))
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_a_slow_but_moving_body_arrives() -> None:
    async with serving(Echo(), stall_s=0.4) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("POST / HTTP/1.1\nHost: a\nConnection: close\nContent-Length: 6"))
        for letter in b"slowly":
            await asyncio.sleep(0.15)
            writer.write(bytes([letter]))
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
    assert answer.endswith(b"\r\n\r\nslowly")


async def test_a_client_that_leaves_cancels_its_request_at_once() -> None:
    echo = Echo()
    async with serving(echo) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request("GET /wait HTTP/1.1\nHost: a"))
        await asyncio.wait_for(echo.entered.wait(), 5)
        writer.close()
        await asyncio.wait_for(echo.cancelled.wait(), 1)


async def test_an_aborted_answer_ends_in_a_cut_connection_not_a_short_body(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(Echo()) as port:
        answer = await exchange(port, request("GET /half HTTP/1.1\nHost: a"))
    assert not answer or answer.endswith(b"half")
    assert caplog.records == []


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(Echo()) as port:
        first = request("POST / HTTP/1.1\nHost: a\nContent-Length: 3", "one")
        second = request("POST / HTTP/1.1\nHost: a\nContent-Length: 3\nConnection: close", "two")
        answer = await exchange(port, first + second)
    assert answer.index(b"one") < answer.index(b"two")


async def test_garbage_behind_a_request_under_way_does_not_mix_into_its_answer() -> None:
    echo = Echo()
    async with serving(echo) as port:
        answer = await exchange(port, request("GET /wait HTTP/1.1\nHost: a") + b"\x00\x01garbage\r\n\r\n")
    assert answer.count(b"HTTP/1.1 ") <= 1
    assert b" 200 " not in answer


async def test_an_idle_connection_is_closed_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.api.server.KEEP_ALIVE_S", 0.3)
    echo = Echo()
    async with serving(echo) as port:
        started = asyncio.get_running_loop().time()
        assert await exchange(port, b"") == b""
        assert 0.2 < asyncio.get_running_loop().time() - started < 3
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(4):
            await asyncio.sleep(0.2)
            writer.write(request("GET / HTTP/1.1\nHost: a"))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert await reader.read() == b""
        writer.write(request("GET /wait HTTP/1.1\nHost: a"))
        writer.close()
        waiting = asyncio.create_task(exchange(port, request("GET /wait HTTP/1.1\nHost: a")))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
