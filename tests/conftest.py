from collections.abc import Iterator

import pytest
from tests.support.redis_server import RedisServer, redis_version


def pytest_report_header() -> str:
    return f"redis: {redis_version()}"


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()
