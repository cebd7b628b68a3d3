"""Token counts, found in the bytes of an answer without parsing or keeping the whole of it."""

import json
import re

import msgspec

TAIL_BYTES = 16 * 1024
"""Usage stands at the end of an answer; log probabilities and the like behind it fit in this."""

# Within a JSON string a quote is escaped, so this matches only a real key.
_USAGE_KEY = re.compile(rb'"usage"\s*:\s*(?=\{)')
_DECODER = json.JSONDecoder()


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens whose KV the engine did not compute; None where it does not tell."""


def find_usage(data: bytes) -> Usage | None:
    """The last usage object in `data`, raw JSON text that may be cut at its front.

    OpenAI's names (prompt_tokens, prompt_tokens_details.cached_tokens), those of its Responses API, and Anthropic's
    (input_tokens, cache_read_input_tokens).
    """
    start = data.rfind(b'"usage"')
    found = None
    while start >= 0 and found is None:
        found = _USAGE_KEY.match(data, start)
        start = data.rfind(b'"usage"', 0, start)
    if found is None:
        return None
    try:
        value, _ = _DECODER.raw_decode(data[found.end() :].decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        # Not JSON, a number with too many digits for Python, or too deep.
        return None
    prompt = _count(value, "prompt_tokens")
    if prompt is None:
        prompt = _count(value, "input_tokens")
    completion = _count(value, "completion_tokens")
    if completion is None:
        completion = _count(value, "output_tokens")
    cached = _count(value, "cache_read_input_tokens")
    for key in ("prompt_tokens_details", "input_tokens_details"):
        details = value.get(key)
        if isinstance(details, dict):
            cached = _count(details, "cached_tokens")
    return Usage(prompt, completion, cached)


def _count(value: dict[str, object], key: str) -> int | None:
    count = value.get(key)
    return count if isinstance(count, int) else None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _OpenAIUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _OpenAIAnswer(msgspec.Struct):
    usage: _OpenAIUsage | None = None


_DECODE_ANSWER = msgspec.json.Decoder(_OpenAIAnswer).decode


def _whole_answer_usage(answer: bytes) -> Usage | None:
    """Of a complete Chat Completions or Completions answer: several times as fast as the search. None for any other."""
    try:
        usage = _DECODE_ANSWER(answer).usage
    except (msgspec.DecodeError, RecursionError):
        return None
    if usage is None or usage.prompt_tokens is None:
        return None
    details = usage.prompt_tokens_details
    return Usage(usage.prompt_tokens, usage.completion_tokens, details.cached_tokens if details is not None else None)


class JsonTail:
    """Keeps the end of an answer that passes by."""

    __slots__ = ("_cut", "_tail")

    def __init__(self) -> None:
        self._tail = b""
        self._cut = False

    def feed(self, data: bytes) -> None:
        tail = self._tail + data if self._tail else data
        if len(tail) > TAIL_BYTES:
            tail = tail[-TAIL_BYTES:]
            self._cut = True
        self._tail = tail

    def usage(self) -> Usage | None:
        usage = None if self._cut else _whole_answer_usage(self._tail)
        return usage or find_usage(self._tail)
