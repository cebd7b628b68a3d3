"""Token counts found in raw answers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.relay.usage import TAIL_BYTES, JsonTail, Usage, find_usage

OPENAI = {
    "prompt_tokens": 369,
    "total_tokens": 373,
    "completion_tokens": 4,
    "prompt_tokens_details": {"cached_tokens": 256, "created_cache_tokens": 0},
}


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_openai(separators: tuple[str, str]) -> None:
    answer = json.dumps({"choices": [], "usage": OPENAI, "kv_transfer_params": None}, separators=separators)
    assert find_usage(answer.encode()) == Usage(369, 4, 256)


def test_details_may_be_null_or_missing() -> None:
    assert find_usage(b'{"usage": {"prompt_tokens": 1, "prompt_tokens_details": null}}') == Usage(1, None, None)
    assert find_usage(b'{"usage": {"prompt_tokens": 1}}') == Usage(1, None, None)


def test_responses_and_messages() -> None:
    responses = b'{"usage":{"input_tokens":5,"output_tokens":2,"input_tokens_details":{"cached_tokens":3}}}'
    messages = b'{"usage":{"input_tokens":5,"output_tokens":2,"cache_read_input_tokens":4}}'
    assert find_usage(responses) == Usage(5, 2, 3)
    assert find_usage(messages) == Usage(5, 2, 4)


def test_text_that_looks_like_usage_is_not() -> None:
    assert find_usage(json.dumps({"content": '"usage": {"prompt_tokens": 7}'}).encode()) is None


def test_null_and_cut_usage_is_none() -> None:
    assert find_usage(b'{"usage": null}') is None
    assert find_usage(b'{"usage": {"prompt_tok') is None
    assert find_usage(b"") is None


def test_the_last_one_counts() -> None:
    assert find_usage(
        b'{"usage":{"prompt_tokens":1}} {"usage":null} {"usage":{"prompt_tokens":2}} {"usage":null}'
    ) == Usage(2)


@given(st.lists(st.integers(1, 9000), max_size=8))
def test_the_tail_of_a_long_answer_is_enough(sizes: list[int]) -> None:
    answer = json.dumps({"choices": "x" * 3 * TAIL_BYTES, "usage": OPENAI}).encode()
    tail = JsonTail()
    for size in sizes:
        tail.feed(answer[:size])
        answer = answer[size:]
    tail.feed(answer)
    assert tail.usage() == Usage(369, 4, 256)
    assert len(tail._tail) <= TAIL_BYTES
