"""Faults on demand: POST /sim/faults sets one for all requests to come, the header `x-sim-fault` for one request."""

from enum import StrEnum

import msgspec


class FaultKind(StrEnum):
    NONE = "none"
    SLOW = "slow"
    """All work takes `factor` times as long."""
    STALL = "stall"
    """Requests are taken and never answered."""
    DROP_MID_STREAM = "drop_mid_stream"
    """The connection is cut after `after_chunks` pieces of an answer."""
    STATUS = "status"
    """Answered with the status `code`."""
    REFUSE = "refuse"
    """The connection is cut as soon as the request has come."""


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kind: FaultKind = FaultKind.NONE
    factor: float = 5.0
    after_chunks: int = 3
    code: int = 500


def parse_fault(data: bytes | str) -> Fault:
    """From JSON. Raises msgspec.ValidationError."""
    return msgspec.json.decode(data, type=Fault)
