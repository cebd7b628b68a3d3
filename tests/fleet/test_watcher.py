"""Health checks against real servers: well, hung, refusing, flapping."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from kvroute.fleet.instance import Health, Instance
from kvroute.fleet.watcher import Watcher
from kvroute.simulator.process import free_port
from tests.support.raw_server import Peer, raw_server

LOG = logging.getLogger("kvroute.test")


class Engine:
    """What a scripted engine answers now."""

    def __init__(self) -> None:
        self.health = 200
        self.hangs = False
        self.metrics = "vllm:num_requests_running 2.0\n"
        self.models: Any = {"data": [{"id": "m"}, {"id": "lora"}]}
        self.asked: list[str] = []

    async def script(self, peer: Peer, number: int) -> None:
        while request := await peer.request():
            path = request.split(b" ")[1].decode()
            self.asked.append(path)
            if self.hangs:
                await peer.closed()
                return
            status, body = {
                "/health": (self.health, ""),
                "/metrics": (200, self.metrics),
                "/v1/models": (200, json.dumps(self.models)),
            }[path]
            await peer.send(f"HTTP/1.1 {status} x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode())


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as made:
        yield made


def watcher(client: httpx.AsyncClient, *instances: Instance, downs: list[str] | None = None) -> Watcher:
    async def on_down(instance: Instance) -> None:
        if downs is not None:
            downs.append(instance.id)

    return Watcher(
        instances,
        client,
        interval_s=0.05,
        timeout_s=0.2,
        unhealthy_after=2,
        metrics=True,
        clock=time.monotonic,
        log=LOG,
        on_down=on_down,
    )


def instance(port: int) -> Instance:
    return Instance(id=f"i{port}", url=f"http://127.0.0.1:{port}")


async def test_a_healthy_instance_is_up_with_its_models_and_load(client: httpx.AsyncClient) -> None:
    async with raw_server(Engine().script) as port:
        mine = instance(port)
        await watcher(client, mine).check(mine)
        assert mine.health is Health.UP
        assert set(mine.models) == {"m", "lora"}
        assert mine.load.running == 2


async def test_one_failure_is_forgiven_and_two_are_not(client: httpx.AsyncClient) -> None:
    engine, downs = Engine(), list[str]()
    async with raw_server(engine.script) as port:
        mine = instance(port)
        watch = watcher(client, mine, downs=downs)
        await watch.check(mine)
        engine.health = 503
        await watch.check(mine)
        assert mine.health is Health.UP
        for _ in range(3):
            await watch.check(mine)
        assert mine.health is Health.DOWN
        assert mine.health_reason == "/health answered 503"
        assert downs == [mine.id]
        engine.health = 200
        await watch.check(mine)
        assert (mine.health, mine.health_reason) == (Health.UP, "")


async def test_an_instance_that_was_never_seen_is_down_at_the_first_failure(client: httpx.AsyncClient) -> None:
    mine = instance(free_port())
    await watcher(client, mine).check(mine)
    assert mine.health is Health.DOWN


async def test_a_hung_instance_is_down_and_holds_up_nobody(client: httpx.AsyncClient) -> None:
    hung, well = Engine(), Engine()
    hung.hangs = True
    async with raw_server(hung.script) as one, raw_server(well.script) as other:
        instances = [instance(one), instance(other)]
        task = asyncio.create_task(watcher(client, *instances).run())
        await asyncio.sleep(0.15)
        assert instances[1].health is Health.UP
        checked = well.asked.count("/health")
        await asyncio.sleep(0.4)
        assert well.asked.count("/health") > checked
        assert instances[0].health is Health.DOWN
        assert "did not answer" in instances[0].health_reason
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_failed_connection_marks_it_down_and_has_it_checked_soon(client: httpx.AsyncClient) -> None:
    async with raw_server(Engine().script) as port:
        mine = instance(port)
        watch = watcher(client, mine)
        task = asyncio.create_task(watch.run())
        async with asyncio.timeout(5):
            while mine.health is not Health.UP:
                await asyncio.sleep(0.01)
            watch.connection_failed(mine, "connection refused")
            assert (mine.health, mine.health_reason) == (Health.DOWN, "connection refused")
            while mine.health is not Health.UP:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_checks_leave_the_ledger_alone(client: httpx.AsyncClient) -> None:
    async with raw_server(Engine().script) as port:
        mine = instance(port)
        mine.ledger.start(0.0, prefill_tokens=5, work_s=1.0, read_bytes=0, expected_wait_s=0, streaming=True)
        await watcher(client, mine).check(mine)
        assert mine.ledger.in_flight == 1


@pytest.mark.parametrize("models", [[], {"data": None}, {"data": [{}]}, "x"])
async def test_a_strange_list_of_models_is_no_reason_to_be_down(client: httpx.AsyncClient, models: Any) -> None:
    engine = Engine()
    engine.models = models
    async with raw_server(engine.script) as port:
        mine = instance(port)
        await watcher(client, mine).check(mine)
        assert mine.health is Health.UP


async def test_one_line_a_change(client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    caplog.set_level(logging.INFO)
    async with raw_server(engine.script) as port:
        mine = instance(port)
        watch = watcher(client, mine)
        for health in (200, 200, 500, 500, 500, 500, 200, 200):
            engine.health = health
            await watch.check(mine)
    states = [record.getMessage().split(" ")[3].rstrip(":") for record in caplog.records if record.name == LOG.name]
    assert states == ["up", "down", "up"]
