"""The HTTP servers: sockets, uvicorn's settings, and the order in which they end."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from kvroute.api.http import gateway_protocol

BACKLOG = 4096
"""Connections that the kernel holds until they are accepted; a fleet's clients reconnect all at once."""

KEEP_ALIVE_S = 75
"""An idle client connection is kept longer than the 60 s after which common load balancers drop theirs, so that the
side that closes is never the one that is about to be written to."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    max_head_bytes: int
    """Of a request's head."""
    stall_s: float
    """The longest pause within a request that is being received, in seconds."""
    drain_s: float
    """What requests under way get to finish when the server is stopped, in seconds."""


class Server(uvicorn.Server):
    """One listening socket and one application. Signals are left to whoever runs several of these."""

    def __init__(self, app: ASGIApp, sock: socket.socket, limits: ServerLimits) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=gateway_protocol(limits.max_head_bytes, limits.stall_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                # Nothing is done for a client's address, and a forwarded one must not be believed unasked.
                proxy_headers=False,
                # The engine's own Date and Server headers are passed on; a second one of either would be a fault.
                date_header=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=max(1, round(limits.drain_s)),
            )
        )
        self.sock = sock

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_until_stopped(self) -> None:
        """Serve until `should_exit` is set, then finish what is under way within the drain time."""
        await self.serve(sockets=[self.sock])

    async def wait_started(self) -> None:
        while not self.started:
            await asyncio.sleep(0.005)


def bind(host: str, port: int) -> socket.socket:
    """A bound, not yet listening socket; port 0 takes any free one. Raises OSError with the address in its text."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return sock


def url_of(sock: socket.socket) -> str:
    """The URL under which a local client reaches the socket."""
    host, port = sock.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
