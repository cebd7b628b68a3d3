"""The composition root: configuration in, a running gateway out. The only module that knows every part."""

import asyncio
import gc
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import BinaryIO

import httpx
from starlette.types import ASGIApp

from kvroute.api.admin import admin_app
from kvroute.api.gateway import Gateway
from kvroute.api.health import Readiness
from kvroute.api.inference import DecisionHeaders, Inference, InferenceSettings
from kvroute.api.rest import rest_app
from kvroute.api.server import Server, ServerLimits, bind, url_of
from kvroute.config import Config, PolicyKinds, build_policy
from kvroute.cost.model import CostParameters
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.instance import Instance
from kvroute.fleet.watcher import Watcher
from kvroute.index.factory import open_index
from kvroute.index.protocol import Location, Tier
from kvroute.policies.registry import BUILT_IN
from kvroute.prompt.model_folder import kv_bytes_per_token, load_reader
from kvroute.prompt.tokenizer import PromptSetupError
from kvroute.relay.types import Timeouts
from kvroute.relay.upstream import Upstream
from kvroute.routing.catalog import Catalog
from kvroute.routing.decision import NamedPolicy, Placement, ServedModel
from kvroute.routing.router import Router
from kvroute.routing.rules import PolicyTable, Rule
from kvroute.sources.history import History
from kvroute.telemetry.metrics import Metrics
from kvroute.telemetry.request_log import RequestLog

log = logging.getLogger("kvroute")

TOKENIZER_THREADS = 2
DRAIN_NOTICE_S = 0.5
"""Between readiness turning false and the listening socket closing, so that a load balancer can look elsewhere."""


@dataclass(frozen=True, slots=True, eq=False)
class Application:
    """A gateway that runs: its two ASGI applications, and the switch that its load balancer watches."""

    public: ASGIApp
    admin: ASGIApp
    readiness: Readiness


def served_models(config: Config, instances: Mapping[str, Instance]) -> list[ServedModel]:
    """The configured models. Raises PromptSetupError for a model folder that can't be used."""
    models = []
    for name, settings in config.models.items():
        folder = settings.tokenizer
        try:
            reader = load_reader(folder, block_tokens=settings.block_tokens, chat_template=settings.chat_template)
            kv_bytes = kv_bytes_per_token(folder) if folder is not None else None
        except PromptSetupError as error:
            raise PromptSetupError(f"models.{name}.tokenizer: {error}") from error
        pool = Location(settings.pool.name, Tier.POOL) if settings.pool is not None else None
        # One object for equal costs, so that the router can tell at a glance that instances are alike.
        costs: dict[CostParameters, CostParameters] = {}
        placements = {
            each.name: Placement(
                gpu=Location(each.name, Tier.GPU),
                cost=costs.setdefault(cost := settings.cost_parameters(each, kv_bytes), cost),
                pool=pool if each.pool else None,
                kv_tokens=each.kv_tokens,
            )
            for each in settings.instances
        }
        fleet = Fleet(name, [instances[each.name] for each in settings.instances])
        models.append(ServedModel(fleet, reader, placements, pool, settings.policy))
    return models


def policy_table(config: Config, kinds: PolicyKinds) -> PolicyTable:
    policies = {name: NamedPolicy(name, build_policy(each, kinds)) for name, each in config.policies.items()}
    used = {model.policy for model in config.models.values()} | {route.policy for route in config.routes}
    # A kind can be named without an entry of its own; it then has its defaults.
    policies |= {name: NamedPolicy(name, kinds[name]()) for name in used - policies.keys()}
    rules = [
        Rule(
            policy=route.policy,
            model=route.when.model,
            headers=tuple((key.lower().encode(), value.encode()) for key, value in route.when.header.items()),
            prompt_tokens=route.when.prompt_tokens,
        )
        for route in config.routes
    ]
    return PolicyTable(policies, rules)


@asynccontextmanager
async def running(config: Config, kinds: PolicyKinds = BUILT_IN) -> AsyncIterator[Application]:
    """A gateway with all that works in its background, until the context is left."""
    instances = {
        each.name: Instance(id=each.name, url=each.url) for model in config.models.values() for each in model.instances
    }
    models = served_models(config, instances)
    timeouts = Timeouts(
        connect_s=config.relay.connect_timeout,
        first_byte_s=config.relay.first_byte_timeout,
        idle_s=config.relay.idle_timeout,
    )
    async with AsyncExitStack() as stack:
        index = await open_index(config.index.url, timeout_s=config.index.timeout, prefix=config.index.prefix, log=log)
        stack.push_async_callback(index.close)
        history = History(index, ttl_s=config.index.ttl)
        upstreams = {each.id: Upstream(each.url, timeouts) for each in instances.values()}
        for upstream in upstreams.values():
            stack.push_async_callback(upstream.close)
        client = await stack.enter_async_context(httpx.AsyncClient(timeout=config.health.timeout, trust_env=False))

        async def forget(instance: Instance) -> None:
            await index.clear(Location(instance.id, Tier.GPU))

        watcher = Watcher(
            list(instances.values()),
            client,
            interval_s=config.health.interval,
            timeout_s=config.health.timeout,
            unhealthy_after=config.health.unhealthy_after,
            metrics=config.health.metrics,
            clock=time.monotonic,
            log=log,
            on_down=forget,
        )
        # One look before the first request, so that it meets known models; the rest is the watcher's task.
        await asyncio.gather(*map(watcher.check, instances.values()))
        watching = asyncio.create_task(watcher.run())
        stack.push_async_callback(_cancelled, watching)
        request_log = RequestLog(stack.enter_context(_log_file(config.telemetry.request_log)).write)
        stack.callback(request_log.close)
        executor = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenize")
        stack.callback(executor.shutdown, wait=False, cancel_futures=True)
        metrics = Metrics()
        catalog = Catalog(models)
        readiness = Readiness(models)
        inference = Inference(
            settings=InferenceSettings(
                max_body=config.server.max_body,
                retries=config.relay.retries,
                decision_headers=DecisionHeaders(config.server.decision_headers),
            ),
            catalog=catalog,
            policies=policy_table(config, kinds),
            router=Router(index, history, clock=time.monotonic, wall_clock=time.time, random=Random()),
            upstreams=upstreams,
            history=history,
            metrics=metrics,
            request_log=request_log,
            executor=executor,
            instance_failed=watcher.connection_failed,
            clock=time.monotonic,
            wall_clock=time.time,
        )
        yield Application(
            public=Gateway(inference, rest_app(catalog, readiness)),
            admin=admin_app(tuple(models), index, metrics, readiness, time.monotonic),
            readiness=readiness,
        )


async def serve(
    config: Config, *, kinds: PolicyKinds = BUILT_IN, started: Callable[[str, str | None], None] = lambda *_: None
) -> None:
    """Serve until SIGTERM or SIGINT, then drain: readiness first, then no new connections, then what is under way.

    A second signal ends the draining. `started` gets the public and the admin URL. Raises OSError when an address can't
    be listened on, and what `running` raises.
    """
    settings = config.server
    public_socket = bind(*settings.listen)
    admin_socket = bind(*settings.admin) if settings.admin is not None else None
    async with running(config, kinds) as application:
        limits = ServerLimits(settings.max_header, settings.header_timeout, settings.drain_timeout)
        servers = [Server(application.public, public_socket, limits)]
        if admin_socket is not None:
            servers.append(Server(application.admin, admin_socket, limits))
        stop = asyncio.Event()

        def on_signal() -> None:
            if stop.is_set():
                for server in servers:
                    server.force_exit = True
            stop.set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, on_signal)
        tasks = [asyncio.create_task(server.run_until_stopped()) for server in servers]
        for server in servers:
            await server.wait_started()
        _calm_the_collector()
        started(url_of(public_socket), url_of(admin_socket) if admin_socket is not None else None)
        await stop.wait()
        application.readiness.draining = True
        log.info("draining")
        await asyncio.sleep(DRAIN_NOTICE_S)
        # The admin port answers until the last request is done: that is when an operator wants to look.
        for server, task in zip(servers, tasks, strict=True):
            server.should_exit = True
            await task


def _calm_the_collector() -> None:
    """What is here now stays for good, so the collector need not look at it again; and requests leave few cycles behind
    but allocate a lot, so by default it would run, for nothing, every few of them."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class _LogFile:
    """Where request lines go. Standard streams are not closed."""

    def __init__(self, stream: BinaryIO | None, *, ours: bool = False) -> None:
        self._stream = stream
        self._ours = ours

    def __enter__(self) -> "_LogFile":
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours and self._stream is not None:
            self._stream.close()

    def write(self, lines: bytes) -> None:
        if self._stream is not None:
            self._stream.write(lines)
            self._stream.flush()


def _log_file(target: str) -> _LogFile:
    if target == "off":
        return _LogFile(None)
    if target in ("stderr", "stdout"):
        return _LogFile(getattr(sys, target).buffer)
    try:
        return _LogFile(Path(target).open("ab"), ours=True)
    except OSError as error:
        raise OSError(error.errno, f"telemetry.request_log: {target}: {error.strerror}") from error
