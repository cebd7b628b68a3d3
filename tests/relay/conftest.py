import asyncio
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from kvroute.relay.types import Timeouts
from kvroute.relay.upstream import Upstream
from tests.support.exchanges import PATIENT, Play, Scenario
from tests.support.raw_server import Script, raw_server

Run = Callable[[Coroutine[None, None, None]], None]


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs a coroutine on a new loop of either kind: the client must work on both."""
    runner: Run = request.param
    return runner


@pytest.fixture
def play(run: Run) -> Play:
    def play(script: Script, scenario: Scenario, timeouts: Timeouts = PATIENT, **options: float) -> None:
        async def main() -> None:
            async with raw_server(script) as port:
                upstream = Upstream(f"http://127.0.0.1:{port}/base", timeouts, **options)  # type: ignore[arg-type]
                try:
                    async with asyncio.timeout(20):
                        await scenario(upstream)
                finally:
                    await upstream.close()

        run(main())

    return play
