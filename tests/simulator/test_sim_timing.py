"""The scheduler and the shared bandwidth, against times worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.simulator.blocks import BlockCache
from kvroute.simulator.scheduler import Admitted, Job, Scheduler, Stage, StepEnded
from kvroute.simulator.sharing import Read, SharedReads
from kvroute.simulator.timing import Timing

# 1 ms a prompt token in pieces of at most 100, 0.5 s a request, 0.1 s a decoding step; two requests at a time.
TIMING = Timing(
    prefill_tokens_per_s=1000,
    attention_s_per_token2=0,
    overhead_s=0.5,
    decode_s_per_token=0.1,
    max_batched_tokens=100,
    max_running=2,
)
BLOCK = 10


def job(prompt_tokens: int, answer_tokens: int, *, prefix: int = 0, slowdown: float = 1.0) -> Job:
    """Jobs with the same `prefix` have the same prompt, as far as the shorter one goes."""
    blocks = (prompt_tokens + answer_tokens - 1) // BLOCK
    return Job(prompt_tokens, answer_tokens, tuple(range(prefix, prefix + blocks)), slowdown)


def scheduler(capacity: int = 1000, timing: Timing = TIMING, pool: dict[Job, int] | None = None) -> Scheduler:
    return Scheduler(timing, BlockCache(capacity, BLOCK), lambda job: (pool or {}).get(job, 0))


def run(made: Scheduler, until: float = 1e9) -> dict[Job, list[float]]:
    """Times of each job's tokens."""
    times: dict[Job, list[float]] = {}
    for progress in made.advance(until):
        if isinstance(progress, StepEnded):
            for each in progress.produced:
                times.setdefault(each, []).append(pytest.approx(progress.at))
    return times


def test_prefill_takes_linear_time_and_attention_over_all_earlier_tokens() -> None:
    timing = Timing(prefill_tokens_per_s=1000, attention_s_per_token2=1e-6)
    assert timing.prefill_s(0, 1000) == pytest.approx(1 + 0.5)
    assert timing.prefill_s(1000, 2000) == pytest.approx(1 + 1.5)
    assert timing.prefill_s(0, 2000) == pytest.approx(timing.prefill_s(0, 1000) + timing.prefill_s(1000, 2000))


def test_the_defaults_are_near_what_was_measured() -> None:
    assert 30_208 / 5_100 < Timing().prefill_s(0, 30_208) < 30_208 / 3_700


def test_a_request_alone_takes_its_prefill_its_overhead_and_its_decoding_steps() -> None:
    made, only = scheduler(), job(250, 3)
    made.submit(2.0, only)
    assert run(made) == {only: [2.0 + 0.25 + 0.5, 2.85, 2.95]}
    assert only.stage is Stage.DONE
    assert made.next_event() is None


def test_prefills_come_one_after_another_and_stretch_the_decoding_of_others() -> None:
    made, first, second = scheduler(), job(100, 3), job(150, 2, prefix=5000)
    made.submit(0.0, first)
    made.submit(0.0, second)
    # 0.6: first's prompt. Then second's two pieces, 0.1 and 0.05 + 0.5, each with a decoding step of 0.1.
    assert run(made) == {first: [0.6, 0.8, 1.45], second: [1.45, 1.55]}


def test_no_more_run_than_may_and_the_rest_come_in_order() -> None:
    made = scheduler()
    jobs = [job(100, 1 + 5 * (number == 0), prefix=1000 * number) for number in range(4)]
    for each in jobs:
        made.submit(0.0, each)
    times = run(made)
    assert [times[each][0] for each in jobs] == [0.6, 1.3, 2.0, 2.7]
    made = scheduler(timing=Timing(max_running=1))
    for each in (long := job(100, 50), waits := job(100, 1)):
        made.submit(0.0, each)
    times = run(made)
    assert times[waits][0].expected > times[long][-1].expected


def test_a_request_behind_one_with_the_same_prefix_hits_what_that_one_computed() -> None:
    made, first, second = scheduler(), job(100, 1), job(125, 1)
    made.submit(0.0, first)
    made.submit(0.0, second)
    assert run(made) == {first: [0.6], second: [0.6 + 0.025 + 0.5]}
    assert second.hit_tokens == 100


def test_a_request_waits_for_blocks_that_others_hold() -> None:
    made, first, second = scheduler(capacity=25), job(100, 50), job(150, 1, prefix=5000)
    made.submit(0.0, first)
    made.submit(0.0, second)
    times = run(made)
    assert second.admitted_at == pytest.approx(times[first][-1].expected)


def test_what_could_never_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="more blocks"):
        scheduler(capacity=10).submit(0.0, job(100, 1))


def test_a_pool_hit_is_read_before_the_rest_is_computed_and_others_compute_meanwhile() -> None:
    reads, computes = job(300, 1), job(100, 1, prefix=5000)
    made = scheduler(pool={reads: 200})
    made.submit(0.0, reads)
    made.submit(0.0, computes)
    progress = made.advance(0.0)
    assert [each.job for each in progress if isinstance(each, Admitted)] == [reads, computes]
    assert (reads.stage, reads.read_tokens) == (Stage.READING, 200)
    assert run(made, until=5.0) == {computes: [0.6]}
    made.loaded(5.0, reads)
    assert run(made) == {reads: [5.0 + 0.1 + 0.5]}


def test_the_pool_gives_only_what_the_gpu_does_not_have() -> None:
    first, second = job(100, 1), job(300, 1)
    made = scheduler(pool={second: 200})
    made.submit(0.0, first)
    made.submit(0.0, second)
    run(made)
    assert (second.hit_tokens, second.read_tokens) == (100, 100)


def test_what_was_read_from_the_pool_is_in_the_cache_afterwards() -> None:
    reads = job(300, 1)
    made = scheduler(pool={reads: 200})
    made.submit(0.0, reads)
    made.advance(0.0)
    made.loaded(1.0, reads)
    stored = [each for progress in made.advance(9.0) if isinstance(progress, StepEnded) for each in progress.stored]
    assert stored == [(reads, range(30))]


def test_a_generated_token_has_kv_only_when_it_has_been_fed_back() -> None:
    made, only = scheduler(), job(10, 13)
    made.submit(0.0, only)
    stored = [each for progress in made.advance(9.0) if isinstance(progress, StepEnded) for each in progress.stored]
    assert stored == [(only, range(1)), (only, range(1, 2))]
    made, only = scheduler(), job(10, 13)
    made.submit(0.0, only)
    # 0.51 s to the first token; ten more have come with the step that ends at 1.51, and the tenth is fed back in it.
    made.advance(1.45)
    assert (only.produced, len(only.allocation.hashed)) == (10, 1)
    made.advance(1.55)
    assert (only.produced, len(only.allocation.hashed)) == (11, 2)


@pytest.mark.parametrize("at", [0.05, 0.3, 0.75], ids=["prefilling", "prefilling-later", "decoding"])
def test_a_cancelled_request_holds_nothing_from_that_moment(at: float) -> None:
    cache = BlockCache(1000, BLOCK)
    made, gone = Scheduler(TIMING, cache), job(150, 50)
    made.submit(0.0, gone)
    made.advance(at)
    made.cancel(at, gone)
    assert cache.available_blocks == 1000
    assert run(made) == {}
    assert made.next_event() is None


def test_what_a_cancelled_request_had_computed_stays_cached() -> None:
    made, gone, second = scheduler(), job(150, 1), job(150, 1)
    made.submit(0.0, gone)
    made.advance(0.12)
    made.cancel(0.12, gone)
    made.submit(0.12, second)
    run(made)
    assert second.hit_tokens == 100


def test_a_cancelled_request_that_still_waits_is_never_admitted() -> None:
    made, first, gone = scheduler(), job(100, 1), job(100, 1, prefix=5000)
    made.submit(0.0, first)
    made.submit(0.0, gone)
    made.advance(0.1)
    made.cancel(0.1, gone)
    assert run(made) == {first: [0.6]}
    assert gone.allocation is None


def test_a_slow_request_slows_the_decoding_of_those_it_shares_steps_with() -> None:
    made, other, slow = scheduler(), job(100, 4), job(100, 2, prefix=5000, slowdown=2.0)
    made.submit(0.0, other)
    made.submit(0.0, slow)
    assert run(made) == {other: [0.6, 1.9, 2.1, 2.2], slow: [1.9, 2.1]}


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 250), st.integers(1, 6), st.integers(0, 2)), max_size=8),
    st.lists(st.floats(0.01, 2), max_size=20),
)
def test_a_driver_that_comes_late_gets_the_same_times(
    asked: list[tuple[float, int, int, int]], pauses: list[float]
) -> None:
    def play(*, punctual: bool) -> list[tuple[float, list[int], list[int]]]:
        made = scheduler(capacity=40)
        arrivals = sorted(asked)
        jobs = [job(prompt, answer, prefix=1000 * prefix) for _, prompt, answer, prefix in arrivals]
        progress = []
        now = 0.0
        for (at, *_), each in zip(arrivals, jobs, strict=True):
            while punctual and (due := made.next_event()) is not None and due <= at:
                progress += made.advance(due)
            progress += made.advance(at)
            made.submit(now := at, each)
        for pause in pauses if not punctual else ():
            now += pause
            progress += made.advance(now)
        progress += made.advance(1e9)
        return [
            (each.at, [jobs.index(produced) for produced in each.produced], [len(new) for _, new in each.stored])
            for each in progress
            if isinstance(each, StepEnded)
        ]

    assert play(punctual=False) == play(punctual=True)


def finishes(made: SharedReads, until: float = 1e9) -> dict[Read, float]:
    return {read: pytest.approx(at, abs=1e-5) for at, read in made.advance(until)}


def test_a_read_alone_takes_its_latency_and_its_bytes_at_full_bandwidth() -> None:
    made = SharedReads(100, 1)
    read = made.start(0, 500)
    assert finishes(made) == {read: 6}


def test_two_reads_get_half_each_while_both_last() -> None:
    made = SharedReads(100, 1)
    first = made.start(0, 1000)
    made.advance(5)
    second = made.start(5, 1000)
    # 500 bytes of the first are there at 6, when the second's latency is over; the other 500 take 10 s.
    assert finishes(made) == {first: 16, second: 21}


def test_readers_elsewhere_take_their_share() -> None:
    made = SharedReads(100, 0)
    read = made.start(0, 1000)
    made.advance(5)
    made.set_others(5, 4)
    # 500 bytes at 20 a second.
    assert made.next_event() == pytest.approx(30)
    made.advance(15)
    made.set_others(15, 0)
    assert finishes(made) == {read: 18}


def test_a_cancelled_read_leaves_its_share_to_the_others() -> None:
    made = SharedReads(100, 0)
    gone, stays = made.start(0, 1000), made.start(0, 1000)
    made.advance(10)
    made.cancel(gone)
    assert finishes(made) == {stays: 15}


@pytest.mark.parametrize("early_s", [0, 1e-9, 5e-7, 2e-6, 0.1])
def test_a_read_is_told_of_once_even_if_it_is_looked_at_just_before_its_end(early_s: float) -> None:
    made = SharedReads(100, 1)
    read = made.start(0, 500)
    assert [each for _, each in [*made.advance(6 - early_s), *made.advance(7)]] == [read]
    assert made.next_event() is None


@given(st.lists(st.tuples(st.floats(0, 50), st.floats(1, 1e6)), min_size=1, max_size=12))
def test_while_anyone_reads_the_whole_bandwidth_is_used(asked: list[tuple[float, float]]) -> None:
    made = SharedReads(1000, 0.5)
    finished = []
    for at, size in sorted(asked):
        finished += made.advance(at)
        made.start(at, size)
    finished += made.advance(1e12)
    assert len(finished) == len(asked)
    free_at = 0.0
    for at, size in sorted(asked):
        free_at = max(free_at, at + 0.5) + size / 1000
    assert max(at for at, _ in finished) == pytest.approx(free_at, rel=1e-6, abs=1e-4)
