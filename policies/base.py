"""The interface between the router and a routing policy.

A policy is a frozen dataclass: its fields are its parameters in YAML (`with:`), its `choose` picks one candidate. It
sees no HTTP, no index and no clock, so the same object decides live traffic and a replay in virtual time. Third-party
policies subclass nothing: any class of this shape, named by an entry point in the group `kvroute.policies`, will do.
"""

from collections.abc import Sequence
from random import Random
from typing import NamedTuple, Protocol

import msgspec


class Request(msgspec.Struct, frozen=True, gc=False):
    """What a policy may know of a request."""

    model: str
    prompt_tokens: int
    """Tokens; an estimate where no tokenizer is known."""
    prefix_key: int
    """A 64-bit hash of the prompt's first blocks, equal for requests that begin alike; 0 without a full block."""


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One instance that could serve the request, and what it would take there."""

    instance: str
    network_s: float
    wait_s: float
    """Seconds until the work already promised to the instance lets this request's prefill begin."""
    read_s: float
    """Seconds to read KV from a slower tier under the best plan; 0.0 when the plan reads nothing."""
    prefill_s: float
    """Seconds to compute what is left of the prompt under the best plan."""
    gpu_tokens: int
    """Leading prompt tokens whose KV is in the instance's GPU memory."""
    read_tokens: int
    """Further tokens that the best plan reads from `read_from`."""
    read_from: str
    """Tier of that read ("cpu", "disk", "pool"); "" when the plan reads nothing."""
    in_flight: int
    """Requests sent to the instance by this gateway and not finished."""
    queued_tokens: int
    """Prompt tokens promised to the instance and not yet past their first token."""
    running: int
    """Running requests, as the engine last reported."""
    waiting: int
    """Queued requests, as the engine last reported."""
    kv_usage: float
    """Share of the GPU's KV blocks in use, 0 to 1, as the engine last reported."""

    @property
    def ttft_s(self) -> float:
        """Expected time to first token, in seconds: network + wait + read + prefill."""
        return self.network_s + self.wait_s + self.read_s + self.prefill_s

    @property
    def cached_tokens(self) -> int:
        """Leading tokens that need no prefill under the best plan."""
        return self.gpu_tokens + self.read_tokens


class Choice(NamedTuple):
    """Which candidate, and why, in a word or two that an operator can read."""

    position: int
    """In the sequence of candidates given."""
    reason: str


class Policy(Protocol):
    def choose(self, request: Request, candidates: Sequence[Candidate], random: Random) -> Choice:
        """Pick one of `candidates` (never empty). Ties are broken with `random`, never by order."""
        ...


def load(candidate: Candidate) -> int:
    """Requests at the instance, ours and others': what the engine last reported, or ours if these are more by now."""
    return max(candidate.in_flight, candidate.running + candidate.waiting)
