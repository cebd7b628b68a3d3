"""Load from Prometheus text, of a recorded vLLM and of SGLang's names."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.fleet.instance import Load
from kvroute.fleet.metrics_text import parse_load

VLLM = (Path(__file__).parents[1] / "golden" / "metrics_vllm.txt").read_text()
SGLANG = """\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{dp_rank="0",model_name="m",tp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="1",model_name="m",tp_rank="0"} 2.0
sglang:num_queue_reqs{dp_rank="0",model_name="m",tp_rank="0"} 4.0
sglang:token_usage{dp_rank="0",model_name="m",tp_rank="0"} 0.25
sglang:token_usage{dp_rank="1",model_name="m",tp_rank="0"} 0.75
sglang:max_total_num_tokens{dp_rank="0",model_name="m",tp_rank="0"} 1e+05
sglang:max_total_num_tokens{dp_rank="1",model_name="m",tp_rank="0"} 100000.0
sglang:page_size{model_name="m"} 64.0
"""


def test_a_recorded_vllm() -> None:
    # 48 blocks of 128 tokens, idle.
    assert parse_load(VLLM, 7.0) == Load(at=7.0, kv_tokens=48 * 128, block_tokens=128)


def test_a_loaded_vllm_with_two_ranks() -> None:
    text = (
        'vllm:num_requests_running{engine="0",model_name="m"} 5.0\n'
        'vllm:num_requests_running{engine="1",model_name="m"} 6.0\n'
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0\n'
        'vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 9.0\n'
        'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.7\n'
        'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="1000"} 1.0\n'
        'vllm:cache_config_info{block_size="16",engine="1",num_gpu_blocks="1000"} 1.0\n'
    )
    load = parse_load(text, 1.0)
    assert (load.running, load.waiting, load.kv_tokens, load.block_tokens) == (11, 1, 32_000, 16)
    assert load.kv_usage == pytest.approx(0.6)


def test_an_old_vllm() -> None:
    assert parse_load("vllm:gpu_cache_usage_perc 0.4\n", 0.0).kv_usage == 0.4


def test_sglang() -> None:
    load = parse_load(SGLANG, 1.0)
    assert (load.running, load.waiting, load.kv_usage) == (5, 4, 0.5)
    assert (load.kv_tokens, load.block_tokens) == (200_000, 64)


@given(st.text() | st.text(st.sampled_from('vllm:num_requests_running{}=" 1.NaN\n')))
def test_any_text_is_taken(text: str) -> None:
    assert parse_load(text, 0.0).kv_usage >= 0


def test_what_is_not_a_number_counts_nothing() -> None:
    text = 'vllm:num_requests_running NaN\nvllm:num_requests_waiting x\nvllm:cache_config_info{block_size="None"} 1\n'
    assert parse_load(text, 0.0) == Load()
