from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvroute.simulator.__main__ import MODEL_FOLDER
from kvroute.simulator.process import SimProcess
from tests.support.gateway import GatewayProcess
from tests.support.redis_server import RedisServer, find_redis, redis_version


def pytest_report_header() -> str:
    return f"redis: {find_redis()}, {redis_version()}"


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
async def two_engines() -> AsyncIterator[list[SimProcess]]:
    """Two simulated engines, ten times as fast as the clock."""
    async with SimProcess(["--time-scale", "10"]) as one, SimProcess(["--time-scale", "10"]) as other:
        yield [one, other]


@pytest.fixture
async def gateway(tmp_path: Path, two_engines: list[SimProcess]) -> AsyncIterator[GatewayProcess]:
    """A gateway in front of `two_engines`, hashing their tokens."""
    async with GatewayProcess(
        tmp_path,
        [engine.url for engine in two_engines],
        model_settings={"tokenizer": str(MODEL_FOLDER)},
    ) as process:
        yield process
