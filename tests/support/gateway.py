"""The gateway as operators run it: `kvroute serve FILE` in a process of its own."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from kvroute.simulator.process import free_port


class GatewayProcess:
    """`async with GatewayProcess(folder, urls) as gateway: gateway.url`"""

    def __init__(
        self,
        folder: Path,
        instances: Sequence[str],
        *,
        model: str = "sim",
        settings: dict[str, Any] | None = None,
        model_settings: dict[str, Any] | None = None,
    ) -> None:
        """`settings` and `model_settings` go into the configuration's top level and its one model."""
        self.port = free_port()
        self.admin_port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.admin = f"http://127.0.0.1:{self.admin_port}"
        self.log_path = folder / f"requests-{self.port}.jsonl"
        self.stderr_path = folder / f"stderr-{self.port}.txt"
        self._config = folder / f"kvroute-{self.port}.yaml"
        settings = dict(settings or {})
        server = {"listen": f"127.0.0.1:{self.port}", "admin": f"127.0.0.1:{self.admin_port}"}
        values = {
            "telemetry": {"request_log": str(self.log_path)},
            "health": {"interval": 0.2, "timeout": 1.0},
            "models": {model: {"instances": list(instances), **(model_settings or {})}},
            **settings,
            "server": server | settings.get("server", {}),
        }
        self._config.write_text(yaml.safe_dump(values))
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> "subprocess.Popen[bytes]":
        with self.stderr_path.open("wb") as stderr:
            return subprocess.Popen(
                [sys.executable, "-m", "kvroute.cli", "serve", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )

    async def __aenter__(self) -> "GatewayProcess":
        self.process = self.start()
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(400):
                if self.process.poll() is not None:
                    raise RuntimeError(f"the gateway ended: {self.stderr_path.read_text()}")
                try:
                    await client.get(self.url + "/health")
                    break
                except httpx.HTTPError:
                    await asyncio.sleep(0.05)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process is not None
        self.process.terminate()
        try:
            await asyncio.to_thread(self.process.wait, 10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    async def records(self, count: int) -> list[dict[str, Any]]:
        """The request log, once it has `count` lines."""
        async with asyncio.timeout(10):
            while True:
                lines = self.log_path.read_text().splitlines() if self.log_path.exists() else []
                if len(lines) >= count:
                    return [json.loads(line) for line in lines]
                await asyncio.sleep(0.05)
