"""What routing decided for one request, and all that it decided from."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvroute.cost.model import CostParameters
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.instance import Instance
from kvroute.fleet.ledger import Ticket
from kvroute.index.protocol import Location, Residency
from kvroute.policies.base import Candidate, Policy
from kvroute.prompt.reader import PromptReader
from kvroute.prompt.types import Prompt


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """What is configured of one instance as a server of one model."""

    gpu: Location
    cost: CostParameters
    pool: Location | None
    """The pool that the instance reads from and writes to."""
    kv_tokens: int | None
    """Capacity of the GPU's KV cache in tokens, where it is configured; else what the engine reports holds."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model, or with the name "*" a family of models, and everything that routing a request to it takes."""

    fleet: Fleet
    reader: PromptReader
    placements: Mapping[str, Placement]
    """By instance id."""
    pool: Location | None
    policy: str
    """Name of the policy for requests that no route sends elsewhere."""


class NamedPolicy(msgspec.Struct, frozen=True):
    """A policy under the name that the configuration gives it."""

    name: str
    policy: Policy


@dataclass(slots=True, eq=False)
class Decision:
    """The choice of one attempt. Its ticket is open in the instance's ledger until someone finishes it."""

    instance: Instance
    placement: Placement
    ticket: Ticket
    policy: str
    reason: str
    chosen: Candidate
    candidates: list[Candidate]
    prompt: Prompt
    predicted: Residency
    """What the index believed of the chosen instance's GPU."""

    @property
    def predicted_cached_tokens(self) -> int:
        return self.chosen.cached_tokens

    @property
    def predicted_ttft_s(self) -> float:
        return self.chosen.ttft_s
