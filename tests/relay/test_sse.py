"""The event scanner: the bytes go through unchanged, cut only between events, and what they say is noticed."""

import json
from itertools import accumulate, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.relay.sse import MAX_HELD_BYTES, SseScanner
from kvroute.relay.usage import Usage


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


def delta(**fields: object) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": None}]}


ROLE = event(delta(role="assistant", content=""))
TEXT = event(delta(content="hello"))
USAGE = event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": None}})
ERROR = event({"error": {"message": "no"}})
DONE = b"data: [DONE]\n\n"


def feed(scanner: SseScanner, *pieces: bytes) -> list[bytes]:
    return [scanner.feed(piece) for piece in pieces]


def test_whole_events_pass_at_once() -> None:
    scanner = SseScanner()
    assert feed(scanner, ROLE, TEXT + USAGE, DONE) == [ROLE, TEXT + USAGE, DONE]
    assert scanner.flush() == b""


def test_an_incomplete_event_waits_for_its_end() -> None:
    scanner = SseScanner()
    assert feed(scanner, ROLE + TEXT[:10], TEXT[10:20], TEXT[20:] + DONE[:3]) == [ROLE, b"", TEXT]
    assert scanner.flush() == DONE[:3]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"])
def test_every_kind_of_line_end_ends_an_event(end: bytes) -> None:
    scanner = SseScanner()
    one, other = b"data: 1" + end, b"data: 2" + end
    assert feed(scanner, one + other[:4]) == [one]


def test_an_event_that_comes_byte_by_byte_passes_with_its_last_byte() -> None:
    scanner = SseScanner()
    one = b"data: 1\r\n\r\n"
    assert feed(scanner, *(bytes([byte]) for byte in one)) == [b""] * (len(one) - 1) + [one]


def test_an_endless_event_is_let_go() -> None:
    scanner = SseScanner()
    assert scanner.feed(b"x" * MAX_HELD_BYTES) == b""
    assert scanner.feed(b"y") == b"x" * MAX_HELD_BYTES + b"y"


CRLF = b"event: x\r\ndata: {}\r\n\r\n"
CR = b"data: {}\r\r"
pieces = st.lists(st.sampled_from([ROLE, TEXT, USAGE, ERROR, DONE, b": keep-alive\n\n", CRLF, CR]))


@given(pieces, st.data())
def test_any_cutting_gives_the_same_bytes_and_the_same_observations(parts: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    whole, cut = SseScanner(), SseScanner()
    assert whole.feed(stream) == stream
    passed = [cut.feed(stream[a:b]) for a, b in pairwise([0, *cuts, len(stream)])]
    assert b"".join(passed) == stream
    assert cut.flush() == b""
    event_ends = {0, *accumulate(map(len, parts))}
    assert event_ends.issuperset(accumulate(map(len, passed)))
    for name in ("first_token", "done", "error", "usage"):
        assert getattr(cut, name) == getattr(whole, name)


@given(st.binary(max_size=200), st.data())
def test_no_byte_is_lost_whatever_comes(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    scanner = SseScanner()
    passed = [scanner.feed(stream[a:b]) for a, b in pairwise([0, *cuts, len(stream)])]
    assert b"".join(passed) + scanner.flush() == stream


@pytest.mark.parametrize(
    ("data", "is_token"),
    [
        (delta(role="assistant", content=""), False),
        (delta(content="x"), True),
        (delta(reasoning_content="x"), True),
        (delta(reasoning="x"), True),
        (delta(tool_calls=[{"index": 0, "function": {"name": "f"}}]), True),
        ({"choices": [{"index": 0, "text": "x"}]}, True),
        ({"choices": [{"index": 0, "text": ""}]}, False),
        ({"choices": []}, False),
        ({"type": "response.created"}, False),
        ({"type": "response.output_text.delta", "delta": "x"}, True),
        ({"type": "message_start"}, False),
        ({"type": "content_block_delta"}, True),
        ({"type": "message_delta"}, False),
        ([1], False),
    ],
)
def test_the_first_token_is_the_first_generated_output(data: Any, is_token: bool) -> None:
    scanner = SseScanner()
    scanner.feed(b": comment\n\n" + event(data))
    assert scanner.first_token is is_token


def test_the_end_is_noticed_and_text_that_looks_like_it_is_not() -> None:
    scanner = SseScanner()
    scanner.feed(event(delta(content='data: [DONE]\n\n and data: {"error": 1} and "usage": {"prompt_tokens": 7}')))
    assert not scanner.done
    assert not scanner.error
    assert scanner.usage is None
    scanner.feed(DONE)
    assert scanner.done


@pytest.mark.parametrize("end", [b"data:[DONE]\n\n", b"data: [DONE]\r\n\r\n", b"data: [DONE]\r\r"])
def test_the_end_may_be_written_in_any_way_that_the_format_allows(end: bytes) -> None:
    scanner = SseScanner()
    scanner.feed(TEXT + end)
    assert scanner.done


def test_the_last_usage_is_kept() -> None:
    scanner = SseScanner()
    feed(scanner, event({"usage": {"prompt_tokens": 9, "completion_tokens": 1}}), USAGE, event({"usage": None}), DONE)
    assert scanner.usage == Usage(prompt_tokens=9, completion_tokens=2, cached_tokens=None)


@pytest.mark.parametrize(
    ("data", "is_error"),
    [
        ({"error": {"message": "no", "code": 400}}, True),
        ({"id": "x", "error": {"message": "no"}}, True),
        ({"object": "error", "message": "no"}, True),
        ({"type": "error", "error": {"type": "overloaded_error"}}, True),
        ({"type": "response.created", "response": {"error": None}}, False),
        ({"error": None, "choices": []}, False),
        (delta(tool_calls=[{"function": {"arguments": '{"error": 1}'}}]), False),
        ({"choices": [{"logprobs": {"error": 1}}]}, False),
    ],
)
def test_an_error_is_an_event_with_an_error_object(data: Any, is_error: bool) -> None:
    scanner = SseScanner()
    scanner.feed(event(data))
    assert scanner.error is is_error


@pytest.mark.parametrize("data", [b"{", b"[" * 100_000, b'{"usage":{"a":' + b"1" * 5000 + b"}}", b'{"error":"\xff"}'])
def test_what_is_no_event_of_any_api_passes_unnoticed(data: bytes) -> None:
    scanner = SseScanner()
    assert scanner.feed(b"data: " + data + b"\n\n") == b"data: " + data + b"\n\n"
    assert (scanner.first_token, scanner.error, scanner.usage) == (False, False, None)
