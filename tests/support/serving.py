"""Run an ASGI application on a free loopback port, in the test's own event loop, behind the gateway's own server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from kvroute.api.server import Server, ServerLimits, bind


@asynccontextmanager
async def serving(app: Any, *, max_head_bytes: int = 16384, stall_s: float = 5.0) -> AsyncIterator[int]:
    """Yields the port."""
    sock = bind("127.0.0.1", 0)
    server = Server(app, sock, ServerLimits(max_head_bytes, stall_s, drain_s=1))
    port: int = sock.getsockname()[1]
    task = asyncio.create_task(server.run_until_stopped())
    await server.wait_started()
    try:
        yield port
    finally:
        server.should_exit = True
        await task


async def exchange(port: int, request: bytes, *, close_write: bool = False, timeout_s: float = 10.0) -> bytes:
    """Send raw bytes on a new connection; everything that comes back until the server closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        if close_write:
            writer.write_eof()
        async with asyncio.timeout(timeout_s):
            return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
