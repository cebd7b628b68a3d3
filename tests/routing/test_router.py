"""The decision, in virtual time: the real index, ledgers, cost model and policies, with clocks that the test moves."""

from random import Random

import pytest

from kvroute.cost.model import CostParameters
from kvroute.fleet.fleet import Fleet
from kvroute.fleet.instance import Health, Instance, Load
from kvroute.index.memory import MemoryIndex
from kvroute.index.protocol import Location, Tier
from kvroute.policies.min_prefill import MinPrefill
from kvroute.policies.round_robin import RoundRobin
from kvroute.prompt.reader import PromptReader
from kvroute.prompt.types import Grade, Prompt
from kvroute.routing.decision import Decision, NamedPolicy, Placement, ServedModel
from kvroute.routing.router import NoInstance, Router
from kvroute.sources.history import History

POOL = Location("flash", Tier.POOL)
COST = CostParameters(
    network_s=0.0,
    overhead_s=0.0,
    prefill_tokens_per_s=5000,
    kv_bytes_per_token=250_000,
    pool_bytes_per_s=10e9,
    pool_latency_s=0.3,
)


def prompt(first: int, blocks: int = 470) -> Prompt:
    """About 30k tokens; prompts with the same first hash are equal."""
    return Prompt(blocks * 64 + 1, tuple(range(first, first + blocks)), 64, Grade.TOKENS)


class World:
    def __init__(self, instances: int = 3, *, pool: bool = True) -> None:
        self.now = 1000.0
        self.index = MemoryIndex()
        self.history = History(self.index, ttl_s=600.0)
        self.instances = [Instance(id=f"i{n}", url=f"http://i{n}", health=Health.UP) for n in range(instances)]
        placements = {
            each.id: Placement(Location(each.id, Tier.GPU), COST, POOL if pool else None, None)
            for each in self.instances
        }
        fleet = Fleet("m", self.instances)
        self.model = ServedModel(fleet, PromptReader(), placements, POOL if pool else None, "min_prefill")
        clock = lambda: self.now  # noqa: E731  (read at each call)
        self.router = Router(self.index, self.history, clock=clock, wall_clock=clock, random=Random(3))

    async def decide(self, asked: Prompt, *, exclude: frozenset[str] = frozenset(), streaming: bool = True) -> Decision:
        policy = NamedPolicy("min_prefill", MinPrefill())
        return await self.router.decide(self.model, "m", asked, policy, streaming=streaming, exclude=exclude)

    async def hold(self, instance: str, asked: Prompt, *, in_pool: bool = False) -> None:
        await self.index.record(Location(instance, Tier.GPU), asked.hashes, self.now)
        if in_pool:
            await self.index.record(POOL, asked.hashes, self.now)


async def test_an_idle_holder_gets_the_request() -> None:
    world = World()
    await world.hold("i1", prompt(1))
    decision = await world.decide(prompt(1))
    assert (decision.instance.id, decision.reason) == ("i1", "gpu hit")
    assert decision.predicted_cached_tokens == 470 * 64
    assert decision.predicted.blocks == 470
    assert decision.predicted_ttft_s == pytest.approx(1 / 5000)


async def test_a_busy_holder_loses_it_to_one_that_reads_the_pool() -> None:
    world = World()
    await world.hold("i1", prompt(1), in_pool=True)
    world.instances[1].ledger.start(
        world.now, prefill_tokens=25_000, work_s=5.0, read_bytes=0, expected_wait_s=0, streaming=True
    )
    decision = await world.decide(prompt(1))
    assert decision.instance.id != "i1"
    assert decision.reason == "pool read: holder busy"
    # 117 chunks of 256 tokens at 250 kB a token: 7.5 GB at 10 GB/s, after 0.3 s; the rest is computed.
    assert decision.chosen.read_s == pytest.approx(0.3 + 117 * 256 * 250_000 / 10e9)
    assert decision.chosen.wait_s == 0.0
    assert decision.candidates[1].ttft_s == pytest.approx(5.0 + 1 / 5000)


async def test_reads_in_progress_slow_the_next_one_over_the_whole_fleet() -> None:
    world = World()
    for number in range(3):
        await world.index.record(POOL, prompt(1000 * number).hashes, world.now)
    alone = await world.decide(prompt(0))
    beside = await world.decide(prompt(1000))
    assert beside.instance.id != alone.instance.id
    assert beside.chosen.read_s == pytest.approx(2 * alone.chosen.read_s - 0.3)


async def test_siblings_see_each_others_promises() -> None:
    world = World(pool=False)
    chosen = [(await world.decide(prompt(1000 * number))).instance.id for number in range(3)]
    assert sorted(chosen) == ["i0", "i1", "i2"]


async def test_the_ledger_knows_what_was_promised() -> None:
    world = World(1, pool=False)
    first = await world.decide(prompt(1))
    assert world.instances[0].ledger.queued_tokens(world.now) == 470 * 64 + 1
    second = await world.decide(prompt(1000))
    assert second.chosen.wait_s == pytest.approx(first.predicted_ttft_s)
    first.ticket.finish(world.now)
    second.ticket.finish(world.now)
    assert world.instances[0].ledger.in_flight == 0


async def test_excluded_instances_are_not_asked_again() -> None:
    world = World()
    await world.hold("i1", prompt(1))
    assert (await world.decide(prompt(1), exclude=frozenset({"i1"}))).instance.id != "i1"
    with pytest.raises(NoInstance):
        await world.decide(prompt(1), exclude=frozenset({"i0", "i1", "i2"}))


async def test_entries_older_than_their_time_to_live_earn_no_credit() -> None:
    world = World()
    await world.hold("i1", prompt(1))
    world.now += 601
    assert (await world.decide(prompt(1))).reason == "cold"


async def test_others_requests_that_wait_at_an_instance_count_while_the_report_is_fresh() -> None:
    world = World(2, pool=False)
    await world.hold("i1", prompt(1))
    world.instances[1].load = Load(at=world.now, waiting=3)
    decision = await world.decide(prompt(1))
    assert decision.instance.id == "i0"
    assert decision.candidates[1].wait_s == pytest.approx(3 * (470 * 64 + 1) / 5000)
    decision.ticket.finish(world.now)
    world.now += 11
    assert (await world.decide(prompt(1))).instance.id == "i1"


async def test_our_own_waiting_requests_are_not_counted_twice() -> None:
    world = World(1, pool=False)
    first = await world.decide(prompt(1))
    world.instances[0].load = Load(at=world.now, waiting=1)
    second = await world.decide(prompt(1000))
    assert second.chosen.wait_s == pytest.approx(first.predicted_ttft_s)


async def test_an_instance_that_does_not_mount_the_pool_cannot_read_it() -> None:
    world = World(1)
    placement = world.model.placements["i0"]
    unmounted = Placement(placement.gpu, placement.cost, None, None)
    world.model = ServedModel(world.model.fleet, PromptReader(), {"i0": unmounted}, POOL, "min_prefill")
    await world.index.record(POOL, prompt(1).hashes, world.now)
    assert (await world.decide(prompt(1))).reason == "cold"


async def test_a_prompt_without_blocks_is_routed_without_a_look_up() -> None:
    world = World()
    decision = await world.decide(Prompt(5, (), 64, Grade.TOKENS))
    assert decision.predicted.blocks == 0


async def test_the_policy_of_the_request_decides() -> None:
    world = World()
    await world.hold("i1", prompt(1))
    policy = NamedPolicy("turns", RoundRobin())
    decisions = [await world.router.decide(world.model, "m", prompt(1), policy, streaming=True) for _ in range(4)]
    assert [each.instance.id for each in decisions] == ["i0", "i1", "i2", "i0"]
    assert {each.policy for each in decisions} == {"turns"}
