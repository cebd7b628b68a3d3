"""The public routes that the gateway answers itself: models, health, readiness. Starlette; none of them is hot."""

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvroute.api.errors import ApiError, unknown_model, unknown_route
from kvroute.api.health import Readiness
from kvroute.routing.catalog import Catalog


def json_response(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


def error_response(error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers=headers)


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405, in the API's form."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return error_response(unknown_route(request.method, request.url.path))
    response = error_response(ApiError(error.status_code, error.detail, code="method_not_allowed"))
    response.headers.update(error.headers or {})
    return response


def health_routes(readiness: Readiness) -> list[Route]:
    async def health(request: Request) -> Response:
        return json_response({"status": "ok"})

    async def ready(request: Request) -> Response:
        is_ready, why_not = readiness.check()
        return json_response({"ready": is_ready, "reason": why_not}, 200 if is_ready else 503)

    return [Route("/health", health), Route("/ready", ready)]


def starlette_app(routes: list[Route]) -> Starlette:
    """An application whose every error is in OpenAI's form."""
    return Starlette(routes=routes, exception_handlers={HTTPException: on_http_exception, ApiError: on_api_error})


def rest_app(catalog: Catalog, readiness: Readiness) -> Starlette:
    async def models(request: Request) -> Response:
        return json_response({"object": "list", "data": catalog.cards()})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        for card in catalog.cards():
            if card["id"] == name:
                return json_response(card)
        raise unknown_model(name)

    return starlette_app(
        [Route("/v1/models", models), Route("/v1/models/{name:path}", model), *health_routes(readiness)]
    )
