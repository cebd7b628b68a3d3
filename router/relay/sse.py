"""What passes in an event stream, seen without re-framing it.

The scanner has no I/O. Bytes go in as they come and come out unchanged, but only up to the end of the last complete
event, so that an error event can always be put behind a whole one. A stream from an engine mostly comes in whole
events, and then nothing is copied.

Server-sent events (WHATWG HTML, 9.2): an event ends at an empty line; lines end with LF, CR LF or CR.
"""

from collections.abc import Iterator

import msgspec

from kvroute.relay.usage import Usage, find_usage

MAX_HELD_BYTES = 1024 * 1024
"""An event that grows beyond this is let go in pieces: memory is worth more than a clean end."""


class SseScanner:
    __slots__ = ("_held", "done", "error", "first_token", "usage")

    def __init__(self) -> None:
        self._held = bytearray()
        self.first_token = False
        """An event with generated text, reasoning, or a tool call has passed."""
        self.done = False
        """`data: [DONE]` has passed."""
        self.error = False
        """An event with an error object has passed."""
        self.usage: Usage | None = None
        """The last usage object that has passed."""

    def feed(self, data: bytes) -> bytes:
        """The bytes that may be sent on now: what was held back and `data`, up to the last end of an event."""
        events = data if not self._held and data.endswith(b"\n\n") else self._join(data)
        if events:
            self._look(events)
        return events

    def flush(self) -> bytes:
        """What is still held back: an incomplete last event. What it says is not noticed."""
        held = bytes(self._held)
        self._held.clear()
        return held

    def _join(self, data: bytes) -> bytes:
        """What is held and `data`, up to the last end of an event; the rest is held."""
        held = self._held
        # An empty line may lie across the seam; what was held has no other.
        start = max(len(held) - 2, 0)
        held += data
        end = _last_event_end(held, start)
        if len(held) - end > MAX_HELD_BYTES:
            end = len(held)
        events = bytes(held[:end])
        del held[:end]
        return events

    def _look(self, events: bytes) -> None:
        """Notice what `events` say.

        Within JSON strings quotes are escaped, so generated text can look like none of the quoted marks, and line ends
        are, so it can't look like a line of its own. Only what bears a mark is looked at more closely.
        """
        if not self.first_token:
            self.first_token = any(map(_has_token, _data_lines(events)))
        if b'"usage"' in events:
            self.usage = find_usage(events) or self.usage
        if b'"error"' in events and not self.error:
            self.error = any(map(_is_error, _data_lines(events)))
        if b"[DONE]" in events and not self.done:
            self.done = events.endswith(b"\ndata: [DONE]\n\n") or any(map(_is_done, _data_lines(events)))


def _last_event_end(data: bytearray, start: int) -> int:
    """Position behind the last empty line from `start` on; 0 where there is none.

    An empty line that ends in CR LF follows LF, or CR LF and so again LF.
    """
    end = 0
    for empty_line in (b"\n\n", b"\n\r\n", b"\r\r"):
        found = data.rfind(empty_line, start)
        if found >= 0:
            end = max(end, found + len(empty_line))
    return end


def _data_lines(events: bytes) -> Iterator[bytes]:
    for line in events.splitlines():
        if line.startswith(b"data:"):
            yield line[5:].lstrip()


def _is_done(data: bytes) -> bool:
    return data.rstrip() == b"[DONE]"


def _json_object(data: bytes) -> dict[str, object] | None:
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _is_error(data: bytes) -> bool:
    """Whether an event's data is an error: vLLM, SGLang and the Messages API give an object under "error", and older
    engines a flat one. The Responses API's objects have a null there."""
    event = _json_object(data)
    return event is not None and bool(event.get("error") or event.get("object") == "error")


def _has_token(data: bytes) -> bool:
    """Whether an event's data carries generated output: Chat Completions and Completions by their choices, the
    Responses and Messages APIs by the name of the event."""
    event = _json_object(data)
    if event is None:
        return False
    kind = event.get("type")
    if isinstance(kind, str):
        return kind.endswith((".delta", "_delta")) and kind != "message_delta"
    choices = event.get("choices")
    if not isinstance(choices, list):
        return False
    for choice in choices:
        if isinstance(choice, dict):
            if choice.get("text"):
                return True
            delta = choice.get("delta")
            if isinstance(delta, dict):
                for key in ("content", "reasoning_content", "reasoning", "tool_calls", "refusal", "audio"):
                    if delta.get(key):
                        return True
    return False
