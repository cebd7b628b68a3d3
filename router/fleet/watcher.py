"""Active health checks and load reports: every instance is asked again and again, each with its own deadline."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import httpx

from kvroute.fleet.instance import Health, Instance
from kvroute.fleet.metrics_text import parse_load

MODELS_EVERY_S = 30.0
"""How often an instance that is up is asked again for its models: LoRA adapters come and go."""
MAX_RETRY_DELAY_S = 0.5
"""How soon an instance that the data path could not reach is checked, at the latest."""


class Watcher:
    """Writes `health`, `load` and `models` of its instances, and nothing else of them: ledgers are not its business."""

    def __init__(
        self,
        instances: Sequence[Instance],
        client: httpx.AsyncClient,
        *,
        interval_s: float,
        timeout_s: float,
        unhealthy_after: int,
        metrics: bool,
        clock: Callable[[], float],
        log: logging.Logger,
        on_down: Callable[[Instance], Awaitable[None]],
    ) -> None:
        """`unhealthy_after`: checks in a row that must fail before an instance that was up is down. `on_down` is
        awaited each time that one goes down: its process, and with it its cache, may be gone."""
        self._instances = tuple(instances)
        self._client = client
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._unhealthy_after = unhealthy_after
        self._metrics = metrics
        self._clock = clock
        self._log = log
        self._on_down = on_down
        self._failures = dict.fromkeys((each.id for each in instances), 0)
        self._models_asked = dict.fromkeys((each.id for each in instances), -MODELS_EVERY_S)
        self._early = {each.id: asyncio.Event() for each in instances}

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for instance in self._instances:
                tasks.create_task(self._watch(instance))

    async def _watch(self, instance: Instance) -> None:
        early = self._early[instance.id]
        while True:
            await self.check(instance)
            try:
                async with asyncio.timeout(self._interval_s):
                    await early.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(min(MAX_RETRY_DELAY_S, self._interval_s))
            early.clear()

    async def check(self, instance: Instance) -> None:
        """Ask one instance for its health and, when that is good, for its load and its models."""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.get(instance.url + "/health")
            if not answer.is_success:
                await self._failed(instance, f"/health answered {answer.status_code}")
                return
        except TimeoutError:
            await self._failed(instance, f"/health did not answer within {self._timeout_s:g} s")
            return
        except httpx.HTTPError as error:
            await self._failed(instance, f"/health: {error or type(error).__name__}")
            return
        await self._ask_models(instance)
        self._failures[instance.id] = 0
        if instance.health is not Health.UP:
            instance.health = Health.UP
            instance.health_reason = ""
            self._log.info("instance %s is up", instance.id)
        if self._metrics:
            await self._ask_load(instance)

    def connection_failed(self, instance: Instance, error: str) -> None:
        """The data path could not connect: no check can know better, so the instance is down at once, and checked soon.

        Called in the event loop of `run`."""
        if instance.health is not Health.DOWN:
            self._go_down(instance, error)
            self._failures[instance.id] = self._unhealthy_after - 1
        self._early[instance.id].set()

    def _go_down(self, instance: Instance, reason: str) -> None:
        instance.health = Health.DOWN
        instance.health_reason = reason
        # Asked anew when it is back: it may have been restarted with other models.
        self._models_asked[instance.id] = -MODELS_EVERY_S
        self._log.warning("instance %s is down: %s", instance.id, reason)

    async def _failed(self, instance: Instance, reason: str) -> None:
        self._failures[instance.id] += 1
        failures = self._failures[instance.id]
        if instance.health is Health.DOWN:
            instance.health_reason = reason
        elif instance.health is Health.UNKNOWN or failures >= self._unhealthy_after:
            self._go_down(instance, reason)
        if failures == self._unhealthy_after:
            await self._on_down(instance)

    async def _ask_models(self, instance: Instance) -> None:
        now = self._clock()
        if now - self._models_asked[instance.id] < MODELS_EVERY_S:
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.get(instance.url + "/v1/models")
            cards = answer.json()["data"]
            instance.models = {card["id"]: card for card in cards}
            self._models_asked[instance.id] = now
        except (TimeoutError, httpx.HTTPError, ValueError, KeyError, TypeError):
            # Its requests may be served all the same; it is asked again at the next check.
            self._log.debug("instance %s did not list its models", instance.id)

    async def _ask_load(self, instance: Instance) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._client.get(instance.url + "/metrics")
        except (TimeoutError, httpx.HTTPError):
            return
        if answer.is_success:
            instance.load = parse_load(answer.text, self._clock())
