"""Faults on demand: `POST /sim/faults` sets one for all requests to come, the header `x-sim-fault` for one request."""

from enum import StrEnum

import msgspec
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.simulator import errors
from kvroute.simulator.errors import Refusal

CUT_EXTENSION = "kvroute.simulator.cut"
"""Key in an ASGI scope's extensions: a function that cuts the connection."""


class FaultKind(StrEnum):
    NONE = "none"
    SLOW = "slow"
    """The request's work takes `factor` times as long. A decoding step is as slow as the slowest request in it."""
    STALL = "stall"
    """Requests are taken and never answered."""
    DROP_MID_STREAM = "drop_mid_stream"
    """The connection is cut after `after_chunks` pieces of a stream, or in the middle of a whole answer."""
    STATUS = "status"
    """Answered with the status `code`."""
    REFUSE = "refuse"
    """The connection is cut as soon as a request's head has come."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: FaultKind = FaultKind.NONE
    path: str = "/v1/"
    """Only requests whose path begins with it: by default an engine with a fault still looks healthy."""
    factor: float = 5.0
    after_chunks: int = 3
    code: int = 500


class Cut(Exception):
    """The connection is to be cut without a word, as by an engine that dies."""


def parse_fault(data: bytes) -> Fault:
    """From JSON, or from the bare name of a kind. Raises msgspec.ValidationError."""
    if data.lstrip().startswith(b"{"):
        return msgspec.json.decode(data, type=Fault)
    return msgspec.convert({"kind": data.decode("latin-1")}, Fault)


class FaultSwitch:
    """What POST /sim/faults turns."""

    def __init__(self) -> None:
        self.current = Fault()


class Faults:
    """ASGI middleware. Leaves what the generating routes themselves have to act on in `scope["state"]["fault"]`."""

    def __init__(self, app: ASGIApp, switch: FaultSwitch) -> None:
        self._app = app
        self._switch = switch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path.startswith("/sim/"):
            # The way out of a fault.
            await self._app(scope, receive, send)
            return
        try:
            fault = self._fault_of(scope)
            if not path.startswith(fault.path):
                fault = Fault()
            scope.setdefault("state", {})["fault"] = fault
            if fault.kind is FaultKind.REFUSE:
                raise Cut
            if fault.kind is FaultKind.STALL:
                await disconnected(receive)
                return
            if fault.kind is FaultKind.STATUS:
                raise errors.on_demand(fault.code)
            await self._app(scope, receive, send)
        except Refusal as refusal:
            await JSONResponse(refusal.body, refusal.status)(scope, receive, send)
        except Cut:
            scope["extensions"][CUT_EXTENSION]()

    def _fault_of(self, scope: Scope) -> Fault:
        for name, value in scope["headers"]:
            if name == b"x-sim-fault":
                try:
                    return parse_fault(value)
                except msgspec.MsgspecError as error:
                    raise Refusal(400, f"x-sim-fault: {error}", "BadRequestError", None) from error
        return self._switch.current


async def disconnected(receive: Receive) -> None:
    """Until the client has gone. What is left of the request's body is thrown away."""
    while (await receive())["type"] != "http.disconnect":
        pass
