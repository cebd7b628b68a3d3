"""Routing policies: which candidate, and why."""

from collections import Counter
from dataclasses import FrozenInstanceError
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.policies.base import Candidate, Choice, Policy, Request, load
from kvroute.policies.least_loaded import LeastLoaded
from kvroute.policies.min_prefill import MinPrefill
from kvroute.policies.power_of_two import PowerOfTwo
from kvroute.policies.prefix_affinity import PrefixAffinity
from kvroute.policies.registry import BUILT_IN
from kvroute.policies.round_robin import RoundRobin

REQUEST = Request(model="m", prompt_tokens=30_000, prefix_key=77)


def candidate(instance: str = "i", **fields: Any) -> Candidate:
    defaults: dict[str, Any] = {
        "network_s": 0.0,
        "wait_s": 0.0,
        "read_s": 0.0,
        "prefill_s": 1.0,
        "gpu_tokens": 0,
        "read_tokens": 0,
        "read_from": "",
        "in_flight": 0,
        "queued_tokens": 0,
        "running": 0,
        "waiting": 0,
        "kv_usage": 0.0,
    }
    return Candidate(instance=instance, **(defaults | fields))


seconds = st.floats(0, 1000)
candidates = st.lists(
    st.builds(
        candidate,
        instance=st.uuids().map(str),
        wait_s=seconds,
        read_s=seconds,
        prefill_s=seconds,
        gpu_tokens=st.integers(0, 30_000),
        in_flight=st.integers(0, 100),
        waiting=st.integers(0, 100),
    ),
    min_size=1,
    max_size=10,
)
policies = st.sampled_from([kind() for kind in BUILT_IN.values()])


@given(policies, candidates, st.randoms(use_true_random=False))
def test_every_policy_chooses_one_of_the_candidates_and_says_why(
    policy: Policy, among: list[Candidate], random: Random
) -> None:
    choice = policy.choose(REQUEST, among, random)
    assert 0 <= choice.position < len(among)
    assert choice.reason


@pytest.mark.parametrize("kind", BUILT_IN.values(), ids=BUILT_IN.keys())
def test_policies_cannot_be_changed_by_requests(kind: type) -> None:
    with pytest.raises(FrozenInstanceError):
        kind().tolerance_s = 1


@given(candidates, st.randoms(use_true_random=False))
def test_min_prefill_is_never_slower_than_its_tolerance(among: list[Candidate], random: Random) -> None:
    policy = MinPrefill(tolerance_s=0.5, tolerance_share=0.1)
    chosen = among[policy.choose(REQUEST, among, random).position]
    assert chosen.ttft_s <= min(each.ttft_s for each in among) * 1.1 + 0.5


def decide(*among: Candidate) -> Choice:
    return MinPrefill().choose(REQUEST, among, Random(1))


IDLE_HOLDER = candidate("holder", gpu_tokens=29_952, prefill_s=0.06)
BUSY_HOLDER = candidate("holder", gpu_tokens=29_952, prefill_s=0.06, wait_s=5.0, in_flight=4)
READER = candidate("reader", read_s=1.1, read_tokens=29_952, read_from="pool", prefill_s=0.06)
COMPUTER = candidate("computer", prefill_s=6.5)


def test_an_idle_holder_gets_the_request() -> None:
    assert decide(COMPUTER, IDLE_HOLDER, READER) == Choice(1, "gpu hit")


def test_when_the_holder_is_busy_another_instance_reads_the_pool() -> None:
    # 5.06 s behind the holder's queue, 1.16 s by way of the pool, 6.5 s computed anew.
    assert decide(BUSY_HOLDER, COMPUTER, READER) == Choice(2, "pool read: holder busy")


def test_when_holder_and_pool_are_busier_still_it_is_computed_anew() -> None:
    holder = candidate("holder", gpu_tokens=29_952, prefill_s=0.06, wait_s=20.0)
    # An idle instance computes in 6.5 s what a pool behind sixteen readers gives in 12.
    reader = candidate("reader", read_s=12.0, read_tokens=29_952, read_from="pool", prefill_s=0.06)
    assert decide(holder, reader, COMPUTER) == Choice(2, "recompute: holder busy")


def test_what_only_the_pool_holds_is_read_from_it() -> None:
    assert decide(READER, COMPUTER) == Choice(0, "pool read")


def test_nothing_known_is_cold() -> None:
    assert decide(COMPUTER).reason == "cold"


def test_equal_estimates_go_to_the_one_that_holds_more() -> None:
    one, other = candidate("a", prefill_s=1.0), candidate("b", prefill_s=1.001, gpu_tokens=64)
    assert decide(one, other).position == 1


def test_equal_estimates_spread_evenly() -> None:
    among = [candidate(name) for name in "abcd"]
    random = Random(5)
    counts = Counter(MinPrefill().choose(REQUEST, among, random).position for _ in range(4000))
    assert all(800 < counts[position] < 1200 for position in range(4))


def test_load_is_what_the_engine_reports_or_what_was_sent_if_that_is_more() -> None:
    assert load(candidate(in_flight=3, running=1, waiting=1)) == 3
    assert load(candidate(in_flight=1, running=4, waiting=2)) == 6


@given(candidates, st.randoms(use_true_random=False))
def test_least_loaded_has_no_less_loaded_one(among: list[Candidate], random: Random) -> None:
    chosen = among[LeastLoaded().choose(REQUEST, among, random).position]
    assert load(chosen) == min(map(load, among))


def test_power_of_two_never_takes_the_most_loaded_of_many() -> None:
    among = [candidate(str(number), in_flight=number) for number in range(5)]
    counts = Counter(PowerOfTwo().choose(REQUEST, among, Random(seed)).position for seed in range(2000))
    assert counts[4] == 0
    assert counts[0] > counts[1] > counts[2] > counts[3] > 0


def test_round_robin_takes_turns() -> None:
    policy = RoundRobin()
    among = [candidate(name) for name in "abc"]
    assert [policy.choose(REQUEST, among, Random(1)).position for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_affinity_follows_the_longest_prefix() -> None:
    among = [candidate("a", gpu_tokens=10_000), candidate("b", gpu_tokens=20_000, in_flight=3), candidate("c")]
    assert PrefixAffinity().choose(REQUEST, among, Random(1)) == Choice(1, "longest prefix")


def test_affinity_leaves_an_overloaded_holder() -> None:
    among = [candidate("a", gpu_tokens=20_000, in_flight=20), candidate("b", in_flight=2), candidate("c")]
    assert PrefixAffinity().choose(REQUEST, among, Random(1)) == Choice(2, "least loaded: holder busy")


def test_affinity_ignores_a_match_too_short_to_matter() -> None:
    among = [candidate("a", gpu_tokens=100), candidate("b")]
    assert PrefixAffinity().choose(REQUEST, among, Random(1)).reason == "hashed prefix"


def test_cold_prompts_that_begin_alike_meet_and_others_spread() -> None:
    among = [candidate(str(number)) for number in range(4)]

    def where(key: int) -> int:
        request = Request(model="m", prompt_tokens=1000, prefix_key=key)
        return PrefixAffinity().choose(request, among, Random()).position

    assert len({where(7) for _ in range(20)}) == 1
    counts = Counter(where(key) for key in range(1, 1001))
    assert all(150 < counts[position] < 350 for position in range(4))


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [
        (MinPrefill, {"tolerance_s": -1.0}),
        (MinPrefill, {"tolerance_share": -0.1}),
        (PrefixAffinity, {"min_share": 1.5}),
        (PrefixAffinity, {"max_extra": -1}),
        (PrefixAffinity, {"max_ratio": 0.5}),
    ],
)
def test_senseless_parameters_are_refused(kind: type, parameters: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        kind(**parameters)
