"""The public ASGI application: inference routes ahead of Starlette, everything else behind it."""

from starlette.types import ASGIApp

from kvroute.api.errors import bad_request
from kvroute.api.inference import Inference
from kvroute.api.rest import error_response
from kvroute.api.types import Receive, Scope, Send


class Gateway:
    def __init__(self, inference: Inference, rest: ASGIApp) -> None:
        self._inference = inference
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves HTTP scopes; the server is configured to make no others."""
        path: str = scope["path"]
        if not path.startswith("/v1/") or path.startswith("/v1/models"):
            await self._rest(scope, receive, send)
        elif _has_dot_segment(path):
            # The target is passed on as it came, and what stands in front of an engine might resolve it.
            error = bad_request("The path must not hold `.` or `..` segments.", code="invalid_path")
            await error_response(error)(scope, receive, send)
        else:
            await self._inference(scope, receive, send)


def _has_dot_segment(path: str) -> bool:
    return "/." in path and any(segment in (".", "..") for segment in path.split("/"))
