"""The HTTP side of a simulated engine: vLLM's routes, and /sim for those who test with it."""

import asyncio
import time
from dataclasses import dataclass

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvroute.simulator import answers, errors
from kvroute.simulator.engine import Engine
from kvroute.simulator.errors import Refusal
from kvroute.simulator.events import BUFFERED_MESSAGES, PUBLISHER_HWM, Publisher
from kvroute.simulator.faults import Faults, FaultSwitch, parse_fault
from kvroute.simulator.generate import Generate, json_object
from kvroute.simulator.metrics import Report
from kvroute.simulator.prompts import Prompts


@dataclass(frozen=True, slots=True)
class Parts:
    """What the routes speak for."""

    engine: Engine
    prompts: Prompts
    report: Report
    model: str
    max_model_len: int
    publisher: Publisher | None


def make_app(parts: Parts) -> Faults:
    """The ASGI application."""
    switch = FaultSwitch()
    routes = _Routes(parts, switch)

    def generate(chat: bool) -> Generate:
        return Generate(parts.engine, parts.prompts, model=parts.model, max_model_len=parts.max_model_len, chat=chat)

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", generate(True), methods=["POST"]),
            Route("/v1/completions", generate(False), methods=["POST"]),
            Route("/v1/models", routes.models),
            Route("/health", routes.health),
            Route("/ping", routes.health, methods=["GET", "POST"]),
            Route("/version", routes.version),
            Route("/load", routes.load),
            Route("/metrics", routes.metrics),
            Route("/tokenize", routes.tokenize, methods=["POST"]),
            Route("/detokenize", routes.detokenize, methods=["POST"]),
            Route("/kv_event_sources", routes.event_sources),
            Route("/reset_prefix_cache", routes.reset, methods=["POST"]),
            Route("/sim/faults", routes.set_fault, methods=["POST"]),
            Route("/sim/state", routes.state),
        ],
        exception_handlers={Refusal: _refused, HTTPException: _not_served},
    )
    return Faults(app, switch)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(error.body, error.status)


async def _not_served(request: Request, error: Exception) -> Response:
    """Paths and methods that there are not."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code)


class _Routes:
    def __init__(self, parts: Parts, switch: FaultSwitch) -> None:
        self._parts = parts
        self._switch = switch
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        return JSONResponse(answers.models(self._parts.model, self._parts.max_model_len, self._started))

    async def health(self, request: Request) -> Response:
        return Response()

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": answers.VERSION})

    async def load(self, request: Request) -> Response:
        now = self._parts.engine.gauges()
        return JSONResponse({"server_load": now.running + now.waiting})

    async def metrics(self, request: Request) -> Response:
        return Response(self._parts.report.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def tokenize(self, request: Request) -> Response:
        body = json_object(await request.body())
        prompts = self._parts.prompts
        read = prompts.read_chat if "messages" in body else prompts.read_completion
        tokens = await asyncio.to_thread(read, body)
        strings = [prompts.text([token]) for token in tokens] if body.get("return_token_strs") is True else None
        return JSONResponse(
            {
                "count": len(tokens),
                "max_model_len": self._parts.max_model_len,
                "tokens": tokens,
                "token_strs": strings,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        tokens = json_object(await request.body()).get("tokens")
        if not isinstance(tokens, list) or not all(type(each) is int and each >= 0 for each in tokens):
            raise errors.invalid("list_type", "tokens", "Input should be a valid list", tokens)
        return JSONResponse({"prompt": self._parts.prompts.text(tokens)})

    async def event_sources(self, request: Request) -> Response:
        publisher = self._parts.publisher
        if publisher is None:
            return JSONResponse({})
        source = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "buffer_steps": BUFFERED_MESSAGES,
            "hwm": PUBLISHER_HWM,
            "max_queue_size": PUBLISHER_HWM,
            "topic": "",
        }
        return JSONResponse({"0": source})

    async def reset(self, request: Request) -> Response:
        return JSONResponse({"success": self._parts.engine.reset()})

    async def set_fault(self, request: Request) -> Response:
        try:
            fault = parse_fault(await request.body())
        except msgspec.MsgspecError as error:
            return JSONResponse({"error": str(error)}, 400)
        self._switch.current = fault
        return JSONResponse({"kind": fault.kind})

    async def state(self, request: Request) -> Response:
        """For tests: what an engine's metrics do not tell, or only late."""
        engine = self._parts.engine
        running, waiting, totals = engine.running, engine.waiting, engine.totals
        return JSONResponse(
            {
                "running": len(running),
                "running_ids": running,
                "waiting": len(waiting),
                "waiting_ids": waiting,
                "requests": totals.requests,
                "aborted": totals.aborted,
                "cached_blocks": len(engine.cache.cached),
                "available_blocks": engine.cache.available_blocks,
                "prefix_queries": totals.prefix_queries,
                "prefix_hits": totals.prefix_hits,
                "external_hits": totals.external_hits,
            }
        )
