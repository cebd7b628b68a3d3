"""The admin port: health, metrics, and what the gateway knows, for operators and their tools."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvroute.api.health import Readiness
from kvroute.api.rest import health_routes, json_response, starlette_app
from kvroute.fleet.instance import Health
from kvroute.index.protocol import Index
from kvroute.routing.decision import ServedModel
from kvroute.telemetry.metrics import InstanceState, Metrics


def admin_app(
    models: tuple[ServedModel, ...],
    index: Index,
    metrics: Metrics,
    readiness: Readiness,
    clock: Callable[[], float],
) -> Starlette:
    def states() -> list[InstanceState]:
        now = clock()
        return [
            InstanceState(
                model=model.fleet.name,
                instance=instance.id,
                up=instance.health is Health.UP,
                in_flight=instance.ledger.in_flight,
                running=instance.load.running,
                waiting=instance.load.waiting,
                kv_usage=instance.load.kv_usage,
                wait_s=instance.ledger.wait_s(now),
            )
            for model in models
            for instance in model.fleet.instances
        ]

    async def prometheus(request: Request) -> Response:
        stats = await index.stats()
        text = metrics.render(states(), stats.entries, stats.healthy)
        return Response(text, media_type="text/plain; version=0.0.4")

    async def instances(request: Request) -> Response:
        now = clock()
        return json_response(
            {
                "models": [
                    {
                        "model": model.fleet.name,
                        "policy": model.policy,
                        "prompt_grade": "tokens" if model.reader.tokenizer is not None else "text",
                        "instances": [
                            {
                                "id": instance.id,
                                "url": instance.url,
                                "health": instance.health,
                                "health_reason": instance.health_reason,
                                "serves": sorted(instance.models),
                                "in_flight": instance.ledger.in_flight,
                                "queued_tokens": instance.ledger.queued_tokens(now),
                                "wait_s": instance.ledger.wait_s(now),
                                "load": instance.load,
                            }
                            for instance in model.fleet.instances
                        ],
                    }
                    for model in models
                ]
            }
        )

    async def index_stats(request: Request) -> Response:
        return json_response(await index.stats())

    return starlette_app(
        [
            *health_routes(readiness),
            Route("/metrics", prometheus),
            Route("/admin/instances", instances),
            Route("/admin/index", index_stats),
        ]
    )
