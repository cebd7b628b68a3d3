"""The connections to one instance."""

import asyncio
import ssl
from urllib.parse import urlsplit

from kvroute.relay.connection import Answer, Connection
from kvroute.relay.types import ConnectError, Headers, Timeouts, UpstreamDisconnected

_BODY_METHODS = frozenset({b"POST", b"PUT", b"PATCH"})


class Upstream:
    """Sends requests to the origin of `url`, over connections that are kept alive.

    Of the idle connections the one used last is taken first, and none that has been idle for `idle_ttl_s`: uvicorn, and
    so vLLM, closes its idle ones after 5 s. At most `max_idle` are kept, in the order in which they became idle.
    """

    def __init__(
        self,
        url: str,
        timeouts: Timeouts,
        *,
        max_idle: int = 256,
        idle_ttl_s: float = 4.0,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """`url`: http or https, with an optional path prefix. Raises ValueError for any other URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https URL: {url!r}")
        try:
            # asyncio gives resolvers a name in this form; one that has none would fail each send, not as an OSError.
            self._host = parts.hostname.encode("idna").decode("ascii")
        except UnicodeError:
            raise ValueError(f"not a host's name: {parts.hostname!r}") from None
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = (ssl_context or ssl.create_default_context()) if parts.scheme == "https" else None
        self._prefix = parts.path.rstrip("/").encode("ascii")
        authority = parts.netloc.rpartition("@")[2].encode("ascii")
        self._host_line = b"host: " + authority + b"\r\n"
        self._timeouts = timeouts
        self._max_idle = max_idle
        self._idle_ttl_s = idle_ttl_s
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def send(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> Answer:
        """Send a request; return when the head of its answer has come.

        `target` (path and query, as received) goes behind the URL's own path. `headers` are end-to-end ones without
        Host and Content-Length, which are added here. A connection that was kept alive and turns out to be dead before
        a byte of the answer is replaced by another without a word: the instance may close it at any time. Raises the
        exceptions of `UpstreamError`. Cancelled, it closes the connection at once, be it only half made.
        """
        parts = [method, b" ", self._prefix, target, b" HTTP/1.1\r\n", self._host_line]
        for name, value in headers:
            parts += (name, b": ", value, b"\r\n")
        if body or method in _BODY_METHODS:
            parts.append(b"content-length: %d\r\n" % len(body))
        parts.append(b"\r\n")
        head = b"".join(parts)
        head_only = method == b"HEAD"
        while (connection := self._take_idle()) is not None:
            try:
                return await connection.exchange(head, body, head_only=head_only)
            except UpstreamDisconnected:
                continue
        if self._closed:
            raise ConnectError("no more connections are made to this instance")
        connection = await self._connect()
        return await connection.exchange(head, body, head_only=head_only)

    @property
    def open_connections(self) -> int:
        return len(self._all)

    @property
    def idle_connections(self) -> int:
        return len(self._idle)

    async def close(self) -> None:
        """Close every connection, whatever is under way on it. To send is then a ConnectError."""
        self._closed = True
        for connection in list(self._all):
            connection.abort()
        while self._all:
            await asyncio.sleep(0)

    def _take_idle(self) -> Connection | None:
        if not self._idle:
            return None
        assert self._loop is not None
        oldest = self._loop.time() - self._idle_ttl_s
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                if connection.free_since >= oldest:
                    return connection
                connection.abort()
        return None

    async def _connect(self) -> Connection:
        loop = self._loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._timeouts.connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self, self._timeouts, loop), self._host, self._port, ssl=self._ssl
                )
        except TimeoutError:
            raise ConnectError(f"no connection within {self._timeouts.connect_s:g} s") from None
        except OSError as error:
            raise ConnectError(error.strerror or str(error)) from error
        if self._closed:
            connection.abort()
        if not connection.closed:
            self._all.add(connection)
        return connection

    # Connections report here

    def connection_free(self, connection: Connection) -> None:
        if len(self._idle) >= self._max_idle:
            connection.abort()
            return
        assert self._loop is not None
        connection.free_since = now = self._loop.time()
        # One old connection goes for each that comes, so that a burst's connections don't outlive it.
        if self._idle and self._idle[0].free_since < now - self._idle_ttl_s:
            self._idle.pop(0).abort()
        self._idle.append(connection)

    def connection_gone(self, connection: Connection) -> None:
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
