"""A real Redis server on a free loopback port, for as long as a test needs it."""

import shutil
import signal
import socket
import subprocess
import tempfile
import time

from kvroute.simulator.process import free_port


def find_redis() -> str:
    """The binary on PATH; `make test` puts one there where the machine has none."""
    path = shutil.which("redis-server")
    if path is None:
        raise RuntimeError("no redis-server on PATH: run the tests with `make test`, which installs one")
    return path


def redis_version() -> str:
    return subprocess.run([find_redis(), "--version"], check=True, capture_output=True, text=True).stdout.strip()


class RedisServer:
    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = tempfile.TemporaryDirectory(prefix="kvroute-redis-")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start empty; returns when it answers."""
        self._process = subprocess.Popen(
            [find_redis(), "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
            + ["--dir", self._folder.name],
            stdout=subprocess.DEVNULL,
        )
        for _ in range(500):
            try:
                with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                    connection.sendall(b"PING\r\n")
                    if connection.recv(16) == b"+PONG\r\n":
                        return
            except OSError:
                time.sleep(0.01)
        raise RuntimeError("redis-server did not come up")

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """As a machine that hangs: connections stay open, nothing answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def restart_empty(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        self.stop()
        self._folder.cleanup()
