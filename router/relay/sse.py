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
        self._held = b""
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
        if self._held:
            data = self._held + data
            self._held = b""
        if not data.endswith(b"\n\n"):
            end = _last_event_end(data)
            if len(data) - end <= MAX_HELD_BYTES:
                self._held = data[end:]
                data = data[:end]
        if data:
            self._look(data)
        return data

    def flush(self) -> bytes:
        """What is still held back: an incomplete last event."""
        held, self._held = self._held, b""
        return held

    def _look(self, events: bytes) -> None:
        if not self.first_token:
            self.first_token = any(map(_has_token, _data_lines(events)))
        # Within JSON strings quotes and line ends are escaped, so generated text can't look like any of these.
        if b'"usage"' in events:
            self.usage = find_usage(events) or self.usage
        if b'data: {"error"' in events or b'data:{"error"' in events:
            self.error = True
        if b"[DONE]" in events and (events.startswith(b"data: [DONE]") or b"\ndata: [DONE]" in events):
            self.done = True


def _last_event_end(data: bytes) -> int:
    """Position behind the last empty line; 0 where there is none. Every CR LF empty line ends in LF CR LF."""
    end = 0
    for empty_line in (b"\n\n", b"\n\r\n", b"\r\r"):
        found = data.rfind(empty_line)
        if found >= 0:
            end = max(end, found + len(empty_line))
    return end


def _data_lines(events: bytes) -> Iterator[bytes]:
    for line in events.splitlines():
        if line.startswith(b"data:"):
            yield line[5:].lstrip()


def _has_token(data: bytes) -> bool:
    """Whether an event's data carries generated output: Chat Completions and Completions by their choices, the
    Responses and Messages APIs by the name of the event."""
    try:
        event = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return False
    if not isinstance(event, dict):
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
