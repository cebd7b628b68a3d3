"""The decision: residency from the index, seconds from the cost model, a choice from the policy.

Between the answer of the index and the ledger entry nothing is awaited, so that requests that arrive together see one
another's promises. Time and randomness come in as arguments: the same code decides in virtual time.
"""

from collections.abc import Callable, Set
from random import Random

from kvroute.cost.estimate import best_plan
from kvroute.cost.model import Plan
from kvroute.fleet.instance import Instance
from kvroute.index.protocol import NOWHERE, Index, Location, Residency
from kvroute.policies.base import Candidate, Request
from kvroute.prompt.types import Prompt
from kvroute.routing.decision import Decision, NamedPolicy, ServedModel
from kvroute.sources.history import History

LOAD_REPORT_LIFE_S = 10.0
"""A load report older than this says nothing about now (the metrics end point is slow, hung or switched off)."""

PREFIX_KEY_BLOCKS = 4
"""Requests whose first blocks, up to this many, are equal have the same `prefix_key`."""


class NoInstance(Exception):
    """No instance is left that could be asked."""


class Router:
    def __init__(
        self,
        index: Index,
        history: History,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        random: Random,
    ) -> None:
        """`clock`: monotonic seconds, for waits; `wall_clock`: Unix seconds, for the index, which gateways share."""
        self._index = index
        self._history = history
        self._clock = clock
        self._wall_clock = wall_clock
        self._random = random

    async def decide(
        self,
        model: ServedModel,
        name: str,
        prompt: Prompt,
        policy: NamedPolicy,
        *,
        streaming: bool,
        exclude: Set[str] = frozenset(),
    ) -> Decision:
        """Choose an instance for a request for model `name` and open a ticket in its ledger.

        `exclude` holds ids of instances that have failed this request. Raises NoInstance when none is left.
        """
        instances = model.fleet.candidates(exclude, name)
        if not instances:
            raise NoInstance
        residencies, pooled = await self._residencies(model, instances, prompt)
        now = self._clock()
        pool_bytes = sum(each.ledger.read_bytes(now) for each in model.fleet.instances) if pooled.blocks else 0.0
        candidates = _candidates(model, instances, residencies, pooled, prompt, pool_bytes, now)
        hashes = prompt.hashes
        prefix_key = hashes[min(PREFIX_KEY_BLOCKS, len(hashes)) - 1] if hashes else 0
        choice = policy.policy.choose(Request(name, prompt.tokens, prefix_key), candidates, self._random)
        chosen = candidates[choice.position]
        instance = instances[choice.position]
        placement = model.placements[instance.id]
        ticket = instance.ledger.start(
            now,
            prefill_tokens=prompt.tokens - chosen.cached_tokens,
            work_s=chosen.read_s + chosen.prefill_s,
            read_bytes=chosen.read_tokens * placement.cost.kv_bytes_per_token,
            expected_wait_s=chosen.wait_s,
            streaming=streaming,
        )
        return Decision(
            instance=instance,
            placement=placement,
            ticket=ticket,
            policy=policy.name,
            reason=choice.reason,
            chosen=chosen,
            candidates=candidates,
            prompt=prompt,
            predicted=residencies[choice.position],
        )

    async def _residencies(
        self, model: ServedModel, instances: list[Instance], prompt: Prompt
    ) -> tuple[list[Residency], Residency]:
        """What each instance's GPU holds of the prompt, and what the pool holds."""
        if not prompt.hashes:
            return [NOWHERE] * len(instances), NOWHERE
        locations: list[Location] = [model.placements[instance.id].gpu for instance in instances]
        if model.pool is not None:
            locations.append(model.pool)
        found = await self._index.lookup(prompt.hashes, locations, self._history.since(self._wall_clock()))
        return (found[:-1], found[-1]) if model.pool is not None else (found, NOWHERE)


def _candidates(
    model: ServedModel,
    instances: list[Instance],
    residencies: list[Residency],
    pooled: Residency,
    prompt: Prompt,
    pool_bytes: float,
    now: float,
) -> list[Candidate]:
    """What the request would take at each of `instances`."""
    candidates = []
    placements = model.placements
    tokens, block_tokens = prompt.tokens, prompt.block_tokens
    # Instances alike in what they cost and hold have the same plan, and in most fleets most of them are alike.
    plans: dict[tuple[int, int, bool], Plan] = {}
    for instance, residency in zip(instances, residencies, strict=True):
        placement = placements[instance.id]
        cost, ledger, load = placement.cost, instance.ledger, instance.load
        mounts_pool = placement.pool is not None
        key = (id(cost), residency.blocks, mounts_pool)
        plan = plans.get(key)
        if plan is None:
            pool_tokens = pooled.blocks * block_tokens if mounts_pool else 0
            plan = plans[key] = best_plan(cost, tokens, residency.blocks * block_tokens, pool_tokens, pool_bytes)
        wait_s = ledger.wait_s(now)
        if load.waiting and now - load.at < LOAD_REPORT_LIFE_S:
            # Requests of others queue there too. Nothing is known of their length: each is taken to be like this one,
            # without any of it cached.
            foreign = load.waiting - ledger.queued(now)
            if foreign > 0:
                wait_s += foreign * best_plan(cost, tokens, 0, 0, 0.0).seconds
        candidates.append(
            Candidate(
                instance.id,
                cost.network_s,
                wait_s,
                plan.read_s,
                plan.prefill_s,
                plan.gpu_tokens,
                plan.read_tokens,
                "pool" if plan.read_tokens else "",
                ledger.in_flight,
                ledger.queued_tokens(now),
                load.running,
                load.waiting,
                load.kv_usage,
            )
        )
    return candidates
