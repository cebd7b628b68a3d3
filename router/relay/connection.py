"""One connection to an instance, and the answer that it is receiving.

A connection carries one exchange at a time. Data goes from the parser straight into the answer; the caller is woken
once for each piece that the kernel delivers, however many chunks of HTTP it holds. There is no task and no lock, and
one timer a connection, armed anew only when it fires or is too late.

An answer that has ended has nothing more to do with its connection: by the time its caller runs, another exchange may
be under way there. So what ends a wait (data, the end, an error) also stops the clock, and a caller that is cancelled
closes the connection only while the answer is still to come.
"""

import asyncio
from typing import Protocol, cast

import httptools

from kvroute.relay.headers import end_to_end
from kvroute.relay.types import (
    AnswerBroken,
    FirstByteTimeout,
    Headers,
    IdleTimeout,
    Timeouts,
    UpstreamDisconnected,
    UpstreamError,
)

MAX_HEAD_BYTES = 256 * 1024
HIGH_WATER_BYTES = 256 * 1024
"""Reading from the instance pauses while the caller has more than this to fetch."""
SMALL_BODY_BYTES = 32 * 1024
"""Up to this size head and body go out as one buffer; a larger body is not copied."""

NEVER = float("inf")


class Owner(Protocol):
    """Who a connection belongs to: told when it can be used again, and when it is gone."""

    def connection_free(self, connection: "Connection") -> None: ...

    def connection_gone(self, connection: "Connection") -> None: ...


class Answer:
    """An instance's answer. It must be read to its end or aborted; only then is its connection free or closed."""

    __slots__ = (
        "_chunks",
        "_connection",
        "_ended",
        "_error",
        "_head_given",
        "_size",
        "_waiter",
        "headers",
        "reused",
        "status",
    )

    def __init__(self, connection: "Connection", reused: bool) -> None:
        self.status = 0
        self.headers: Headers = []
        """End-to-end headers; Content-Length is among them, Transfer-Encoding is not."""
        self.reused = reused
        """Whether the connection had carried an exchange before."""
        self._connection = connection
        self._chunks: list[bytes] = []
        self._size = 0
        self._head_given = False
        self._ended = False
        self._error: UpstreamError | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """Whether everything has come and been read, so that read() could only give b"" again."""
        return self._ended and not self._chunks

    async def read(self) -> bytes:
        """All that has come since the last call, waiting for at least a byte; b"" at the end.

        Raises FirstByteTimeout, IdleTimeout, or AnswerBroken; cancellation closes the connection.
        """
        if not self._chunks and not self._ended:
            if self._error is not None:
                raise self._error
            await self._connection.wait_for_data(self)
        return self._take()

    def abort(self) -> None:
        """Close the connection at once unless the answer has come to its end: the engine stops working for it."""
        if not self._ended:
            self._connection.abort()

    def _take(self) -> bytes:
        chunks = self._chunks
        if not chunks:
            if self._error is not None:
                raise self._error
            return b""
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        if self._size > HIGH_WATER_BYTES and not self._ended:
            self._connection.resume()
        self._size = 0
        return data


class Connection(asyncio.Protocol):
    def __init__(self, owner: Owner, timeouts: Timeouts, loop: asyncio.AbstractEventLoop) -> None:
        self._owner = owner
        self._timeouts = timeouts
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._used = False
        self._eof = False
        self._timer: asyncio.TimerHandle | None = None
        self._deadline = NEVER
        self.closed = False
        self.free_since = 0.0

    def _reset(self, head_only: bool) -> None:
        self._head_only = head_only
        self._head_bytes = 0
        self._head_done = False
        self._complete = False
        self._excess = False
        self._keep_alive = False
        self._paused = False
        self._first_byte_deadline = NEVER
        self._headers: Headers = []

    # The caller's side

    async def exchange(self, head: bytes, body: bytes, *, head_only: bool) -> Answer:
        """Send a request and wait for the head of its answer. `head_only`: the answer to HEAD has no body."""
        if self.closed:
            raise UpstreamDisconnected("the connection was closed")
        self._answer = answer = Answer(self, self._used)
        self._used = True
        self._reset(head_only)
        transport = self._transport
        assert transport is not None
        if len(body) <= SMALL_BODY_BYTES:
            transport.write(head + body)
        else:
            transport.write(head)
            transport.write(body)
        self._first_byte_deadline = self._loop.time() + self._timeouts.first_byte_s
        self._arm(self._first_byte_deadline)
        await self._wait(answer)
        if answer._error is not None and not answer._chunks:
            raise answer._error
        answer._head_given = True
        return answer

    async def wait_for_data(self, answer: Answer) -> None:
        """Return when `answer` has data, an error, or its end."""
        # A stream's head comes before its prefill, so the first byte of its body is what may take long.
        deadline = self._first_byte_deadline
        self._arm(self._loop.time() + self._timeouts.idle_s if deadline == NEVER else deadline)
        await self._wait(answer)

    async def _wait(self, answer: Answer) -> None:
        answer._waiter = waiter = self._loop.create_future()
        try:
            await waiter
        except asyncio.CancelledError:
            answer.abort()
            raise

    def resume(self) -> None:
        if self._paused and not self.closed:
            assert self._transport is not None
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        """Close at once, whatever is still to be sent or received."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    # Timing

    def _arm(self, deadline: float) -> None:
        self._deadline = deadline
        timer = self._timer
        if timer is None:
            self._timer = self._loop.call_at(deadline, self._on_timer)
        elif timer.when() > deadline:
            timer.cancel()
            self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._deadline == NEVER or self.closed:
            return
        if self._loop.time() < self._deadline:
            self._timer = self._loop.call_at(self._deadline, self._on_timer)
        elif self._first_byte_deadline != NEVER:
            self._fail(FirstByteTimeout(f"no byte of an answer within {self._timeouts.first_byte_s:g} s"))
        else:
            self._fail(IdleTimeout(f"nothing came for {self._timeouts.idle_s:g} s"))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:
            # Nothing was asked for: whatever this is, the next exchange must not take it for its answer.
            self.abort()
            return
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if not self._complete:
                self._fail(AnswerBroken(f"the answer is not HTTP/1.1: {error}"))
                return
            self._excess = True
        if self._head_bytes > MAX_HEAD_BYTES and self._head_too_large():
            self._fail(AnswerBroken(f"the head of the answer exceeds {MAX_HEAD_BYTES} bytes"))
            return
        if self._complete:
            self._end(answer)
        elif answer._size > HIGH_WATER_BYTES and not self._paused:
            self._paused = True
            assert self._transport is not None
            self._transport.pause_reading()
        self._wake(answer)

    def eof_received(self) -> None:
        # Nothing more can come, so a request that is still being sent is of no use.
        self._eof = True
        self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        answer = self._answer
        self._answer = None
        if answer is not None:
            if answer._error is None:
                if self._eof and self._head_done and not self._framed():
                    answer._ended = True
                else:
                    answer._error = self._loss(exc)
            self._wake(answer)
        self._owner.connection_gone(self)

    # httptools callbacks

    def on_message_begin(self) -> None:
        if self._complete:
            self._excess = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._complete:
            return
        status = self._parser.get_status_code()
        if status < 200:
            return
        answer = self._answer
        assert answer is not None
        answer.status = status
        answer.headers = end_to_end(self._headers)
        self._keep_alive = self._parser.should_keep_alive()
        self._head_done = True
        if self._head_only:
            # The parser would wait for the body that the head describes; the connection is not worth the trouble.
            self._complete = True
            self._keep_alive = False

    def on_body(self, body: bytes) -> None:
        answer = self._answer
        if answer is not None and not self._complete:
            self._first_byte_deadline = NEVER
            answer._chunks.append(body)
            answer._size += len(body)

    def on_message_complete(self) -> None:
        if self._head_done:
            self._complete = True
        else:
            # An interim answer (1xx): the real one follows.
            self._headers = []

    def _head_too_large(self) -> bool:
        """Of what was received up to the end of the head, exactly; the last piece may hold body, too."""
        return not self._head_done or sum(len(name) + len(value) for name, value in self._headers) > MAX_HEAD_BYTES

    def _framed(self) -> bool:
        """Whether the answer's head tells where its body ends; if not, the connection's end does."""
        return any(name in (b"content-length", b"transfer-encoding") for name, _ in self._headers)

    # Endings

    def _end(self, answer: Answer) -> None:
        answer._ended = True
        self._answer = None
        self._first_byte_deadline = NEVER
        transport = self._transport
        assert transport is not None
        if self._keep_alive and not self._excess and not self.closed and not transport.get_write_buffer_size():
            self.resume()
            self._owner.connection_free(self)
        else:
            # Also where the instance answered before it had read the request: what is left of that is not the next one.
            self.abort()

    def _loss(self, exc: Exception | None) -> UpstreamError:
        lost = "the connection was lost" if exc is None else f"the connection was lost ({exc})"
        if self._head_bytes:
            return AnswerBroken(f"{lost} within the answer")
        return UpstreamDisconnected(f"{lost} before an answer")

    def _fail(self, error: UpstreamError) -> None:
        answer = self._answer
        if answer is not None:
            answer._error = error
        self.abort()

    def _wake(self, answer: Answer) -> None:
        waiter = answer._waiter
        if waiter is None or waiter.done():
            return
        new_head = self._head_done and not answer._head_given
        if new_head or answer._chunks or answer._ended or answer._error is not None:
            answer._waiter = None
            self._deadline = NEVER
            waiter.set_result(None)
