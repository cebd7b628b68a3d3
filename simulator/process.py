"""Simulated engines as processes of their own, for demos and tests."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

import httpx

START_TIMEOUT_S = 30.0


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class SimProcess:
    """`async with SimProcess(["--time-scale", "20"]) as engine: engine.url`"""

    def __init__(self, arguments: Sequence[str] = (), *, port: int | None = None) -> None:
        """`arguments`: of the simulator's command line, but for the port."""
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._arguments = list(arguments)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvroute.simulator", "--port", str(self.port), *self._arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Ctrl-C in a terminal reaches the whole group; whoever started the engines ends them in order.
            start_new_session=True,
        )

    async def wait_ready(self) -> None:
        """Raises RuntimeError when the process ends or does not answer in time."""
        assert self._process is not None
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(round(START_TIMEOUT_S / 0.05)):
                if self._process.poll() is not None:
                    raise RuntimeError(f"the simulated engine ended with status {self._process.returncode}")
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(self.url + "/health")).is_success:
                        return
                await asyncio.sleep(0.05)
        raise RuntimeError("the simulated engine did not come up")

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """End it as a crash would: at once, without a word to anyone."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGTERM, and SIGKILL if that does not help."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(3)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    async def __aenter__(self) -> "SimProcess":
        self.start()
        try:
            await self.wait_ready()
        except BaseException:
            self.kill()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.stop)
