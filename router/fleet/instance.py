"""An instance as the router sees it: where it is, whether it serves, how loaded it is."""

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from kvroute.fleet.ledger import Ledger


class Health(StrEnum):
    UNKNOWN = "unknown"
    """Not checked yet: may be routed to."""
    UP = "up"
    DOWN = "down"


class Load(msgspec.Struct, frozen=True):
    """What the engine last said of itself."""

    at: float = 0.0
    """Monotonic seconds of the report; 0.0 before the first."""
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of the GPU's KV blocks in use, 0 to 1."""
    kv_tokens: int = 0
    """Capacity of the GPU's KV cache, in tokens; 0 while unknown."""
    block_tokens: int = 0
    """The engine's own block (page) size, in tokens; 0 while unknown."""


@dataclass(slots=True, eq=False)
class Instance:
    """One engine replica. Mutable: the watcher writes `health`, `load` and `models`, the router its ledger."""

    id: str
    """Unique in the gateway; "host:port" unless configured."""
    url: str
    """Base URL without a trailing slash: scheme, host, port, and perhaps a path prefix."""
    health: Health = Health.UNKNOWN
    health_reason: str = ""
    load: Load = field(default_factory=Load)
    models: dict[str, dict[str, object]] = field(default_factory=dict)
    """The engine's /v1/models cards by id, as last seen."""
    ledger: Ledger = field(default_factory=Ledger)
