"""Seconds from tokens and bytes, with the figures of a measured pool as worked examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.cost.estimate import best_plan, prefill_seconds, read_seconds
from kvroute.cost.model import CostParameters

LAB = CostParameters(
    overhead_s=0.05,
    prefill_tokens_per_s=4500,
    kv_bytes_per_token=253_952,
    pool_bytes_per_s=9.6e9,
    pool_latency_s=0.3,
)
PROMPT = 30_208
PROMPT_BYTES = PROMPT * 253_952


def test_a_prompt_of_the_lab_has_7_67_gigabytes_of_kv() -> None:
    assert pytest.approx(7.67e9, rel=1e-3) == PROMPT_BYTES


@pytest.mark.parametrize(("readers", "measured"), [(8, 7.53), (16, 11.85), (32, 26.35)])
def test_waves_of_readers_take_about_as_long_as_was_measured(readers: int, measured: float) -> None:
    # One measurement a point; the model that fits all three misses the middle one by 11 %.
    assert read_seconds(LAB, PROMPT_BYTES, (readers - 1) * PROMPT_BYTES) == pytest.approx(measured, rel=0.12)


def test_a_reader_alone_takes_its_latency_and_its_bytes() -> None:
    assert read_seconds(LAB, PROMPT_BYTES, 0) == pytest.approx(0.3 + 0.799, abs=0.001)


def test_computing_at_an_idle_instance_takes_six_to_eight_seconds() -> None:
    assert 6 < prefill_seconds(LAB, 0, PROMPT) < 8


def test_attention_adds_its_pairs() -> None:
    p = CostParameters(overhead_s=0.0, prefill_tokens_per_s=1000, attention_s_per_token2=1e-6)
    # 100 tokens behind 900: (1000^2 - 900^2) / 2 = 95,000 pairs.
    assert prefill_seconds(p, 900, 1000) == pytest.approx(0.1 + 0.095)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(1, 1000))
def test_computing_in_two_parts_costs_one_overhead_more(start: int, one: int, other: int) -> None:
    p = CostParameters(overhead_s=0.5, attention_s_per_token2=1e-7)
    middle, end = start + one, start + one + other
    parts = prefill_seconds(p, start, middle) + prefill_seconds(p, middle, end)
    assert parts == pytest.approx(prefill_seconds(p, start, end) + 0.5)


def test_an_idle_pool_is_read() -> None:
    plan = best_plan(LAB, PROMPT, 0, PROMPT, 0.0)
    assert plan.read_tokens == 117 * 256  # the last chunk holds the last token, which is always computed
    assert plan.read_s == pytest.approx(0.3 + 117 * 256 * 253_952 / 9.6e9)
    assert plan.prefill_s == pytest.approx(0.05 + 256 / 4500)


def test_behind_sixteen_readers_computing_is_quicker() -> None:
    plan = best_plan(LAB, PROMPT, 0, PROMPT, 16 * PROMPT_BYTES)
    assert (plan.read_tokens, plan.read_s) == (0, 0.0)
    assert plan.seconds == prefill_seconds(LAB, 0, PROMPT)


def test_only_what_the_gpu_does_not_hold_is_read() -> None:
    plan = best_plan(LAB, PROMPT, 10_240, 20_480, 0.0)
    assert (plan.gpu_tokens, plan.read_tokens) == (10_240, 10_240)


def test_a_pool_that_holds_no_more_than_the_gpu_is_left_alone() -> None:
    assert best_plan(LAB, PROMPT, 20_480, 20_480, 0.0).read_tokens == 0


def test_the_last_token_is_always_computed() -> None:
    plan = best_plan(LAB, 1024, 1024, 0, 0.0)
    assert plan.gpu_tokens == 1023
    assert plan.prefill_s > LAB.overhead_s


def test_without_a_pool_nothing_is_read() -> None:
    assert best_plan(CostParameters(), 1024, 0, 1024, 0.0).read_tokens == 0


@given(st.integers(0, 100_000), st.integers(0, 100_000), st.integers(0, 100_000), st.floats(0, 1e12))
def test_plans_are_possible_and_never_slower_than_computing(prompt: int, gpu: int, pool: int, others: float) -> None:
    plan = best_plan(LAB, prompt, gpu, pool, others)
    assert 0 <= plan.gpu_tokens + plan.read_tokens <= max(0, prompt - 1)
    assert plan.gpu_tokens <= gpu
    assert plan.seconds <= prefill_seconds(LAB, min(gpu, max(0, prompt - 1)), prompt)
