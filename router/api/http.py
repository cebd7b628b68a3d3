"""The client side's HTTP/1.1: uvicorn's httptools protocol, made fit for the open internet.

What it adds: malformed requests are answered in OpenAI's form; a request's framing must be unambiguous; heads are
bounded in bytes; a head or body that stalls is cut off; and a client that leaves has its request cancelled at once, by
cancelling the ASGI task, so that no handler needs a second task to listen for the disconnect.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from kvroute.api.errors import ApiError


class RefusedRequest(Exception):
    """Raised in a parser callback to refuse a request before it reaches the application."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.error = ApiError(status, message, code=code)


class _CorkedTransport:
    """Sends an answer's head together with the first piece of its body: one system call and one packet less.

    uvicorn writes a head first and then, from the application's next message, the body; the gateway's applications
    never start an answer before they have its first piece.
    """

    __slots__ = ("_head", "_head_taken", "_transport")

    def __init__(self, transport: asyncio.Transport) -> None:
        """For one answer."""
        self._transport = transport
        self._head = b""
        self._head_taken = False

    def write(self, data: bytes) -> None:
        if self._head:
            data = self._head + data
            self._head = b""
        elif not self._head_taken and not data.startswith(b"HTTP/1.1 100"):
            self._head_taken = True
            self._head = data
            return
        self._transport.write(data)

    def flush(self) -> None:
        if self._head:
            self._transport.write(self._head)
            self._head = b""

    def close(self) -> None:
        self.flush()
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()


class GatewayProtocol(HttpToolsProtocol):
    """One client connection. `max_head_bytes` and `stall_s` are set on a subclass by `gateway_protocol`."""

    max_head_bytes = 64 * 1024
    stall_s = 10.0

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._head_bytes = 0
        self._receiving = False
        self._last_data = 0.0
        self._stall_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        # A connection on which nothing is ever sent is idle like one between two requests.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            refused = error.__context__
            if isinstance(refused, RefusedRequest):
                self._refuse(refused.error)
            else:
                self._refuse(ApiError(400, "Invalid HTTP request: bad request target.", code="bad_http"))
            return
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"Invalid HTTP request: {error}.", code="bad_http"))
            return
        except httptools.HttpParserUpgrade:
            self._refuse(ApiError(400, "Protocol upgrades are not supported here.", code="bad_http"))
            return
        if self._receiving:
            # Only a request that did not arrive in one piece pays for a timer, and for one timer at a time.
            self._last_data = self.loop.time()
            if self._stall_timer is None:
                self._stall_timer = self.loop.call_later(self.stall_s, self._check_stall)

    def _check_stall(self) -> None:
        self._stall_timer = None
        if not self._receiving or self.transport.is_closing():
            return
        left = self._last_data + self.stall_s - self.loop.time()
        if left > 0 or self.flow.read_paused:
            self._stall_timer = self.loop.call_later(max(left, 0.05), self._check_stall)
        else:
            self._refuse(ApiError(408, f"No data for {self.stall_s:g} s within a request.", code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer and close; where another answer is still under way on this connection, only close."""
        if self.transport.is_closing():
            return
        under_way = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        if not under_way:
            body = error.body()
            head = [STATUS_LINE[error.status]]
            for name, value in [*error.headers(), (b"content-length", b"%d" % len(body)), (b"connection", b"close")]:
                head += [name, b": ", value, b"\r\n"]
            self.transport.write(b"".join([*head, b"\r\n", body]))
        self.transport.close()
        if self.cycle is not None and not self.cycle.response_complete:
            # Whatever the handler does from here on must not reach the wire behind the answer above.
            self.cycle.disconnected = True
        if self._task is not None:
            self._task.cancel()

    # Parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._receiving = True
        self._head_bytes = 0
        extensions: dict[str, Any] = {"kvroute.abort": self._abort}
        self.scope["extensions"] = extensions

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self.max_head_bytes:
            raise RefusedRequest(431, f"The request head exceeds {self.max_head_bytes} bytes.", "headers_too_large")

    def on_headers_complete(self) -> None:
        hosts = 0
        for name, value in self.headers:
            if name == b"host":
                hosts += 1
            elif name == b"transfer-encoding" and value.strip().lower() != b"chunked":
                # llhttp takes "gzip, chunked"; nothing behind us could be trusted to read that the same way.
                raise RefusedRequest(400, "Only chunked transfer coding is supported.", "bad_http")
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            raise RefusedRequest(400, "A request needs exactly one Host header.", "bad_http")
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._receiving = False
        super().on_message_complete()
        # uvicorn leaves reading paused behind a large body until the handler asks for more; a client that leaves
        # would not be noticed. Pipelined requests pause it again.
        self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._corked.flush()
        self._idle_since = self.loop.time()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)

    def _unset_keepalive_if_required(self) -> None:
        """The timer stays and looks when it fires; uvicorn would cancel it at each request and set another after."""

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if self.transport.is_closing():
            return
        busy = self._receiving or (self.cycle is not None and not self.cycle.response_complete)
        left = self.timeout_keep_alive if busy else self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._corked = _CorkedTransport(self.transport)
        cycle.transport = self._corked  # type: ignore[assignment]
        self._task = task = self.loop.create_task(cycle.run_asgi(app))
        task.add_done_callback(self._task_done)
        self.tasks.add(task)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if self._task is task:
            self._task = None

    def _abort(self) -> None:
        """Cut the connection: the only honest end of an answer whose length was promised and cannot be kept."""
        self.cycle.disconnected = True
        self.transport.abort()


def gateway_protocol(max_head_bytes: int, stall_s: float) -> type[GatewayProtocol]:
    """The protocol class for uvicorn's `http=`, with its limits."""

    class ConfiguredGatewayProtocol(GatewayProtocol):
        pass

    ConfiguredGatewayProtocol.max_head_bytes = max_head_bytes
    ConfiguredGatewayProtocol.stall_s = stall_s
    return ConfiguredGatewayProtocol
