"""One structured line a request, written in batches: a request pays for an encode and an append, not for a syscall."""

import asyncio
from collections.abc import Callable

import msgspec

FLUSH_BYTES = 64 * 1024
FLUSH_S = 0.2


class Attempt(msgspec.Struct, frozen=True):
    """A try that failed before the first byte of an answer, so that another could follow."""

    instance: str
    error: str


class RequestRecord(msgspec.Struct, omit_defaults=True):
    """What happened to one request. No prompt text and no credentials, ever."""

    time: float
    """Unix seconds of arrival."""
    request_id: str
    method: str
    path: str
    status: int = 0
    """HTTP status sent to the client; 0 when it left before one was sent."""
    outcome: str = ""
    """"ok", "refused" (the gateway answered), "engine_error" (an engine's error passed on), "client_gone", "broken"
    (the answer broke off)."""
    model: str = ""
    stream: bool = False
    instance: str = ""
    policy: str = ""
    reason: str = ""
    grade: str = ""
    prompt_tokens: int | None = None
    """As the engine counted them, else as the gateway did."""
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    """As the engine told; None where it does not."""
    predicted_cached_tokens: int | None = None
    predicted_ttft_ms: float | None = None
    wait_ms: float | None = None
    read_ms: float | None = None
    prefill_ms: float | None = None
    """The parts of the prediction for the chosen instance."""
    decide_ms: float | None = None
    """From the request's arrival to the first decision: parsing, hashing, look-up, choice."""
    ttft_ms: float | None = None
    """From the request's arrival to the first token; of an answer that is not streamed, to its first byte."""
    duration_ms: float = 0.0
    failed_attempts: list[Attempt] = []
    error: str = ""


class RequestLog:
    """Lines of JSON to `write`. Lines wait at most FLUSH_S or FLUSH_BYTES; `close` writes what is left."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write = write
        self._encoder = msgspec.json.Encoder()
        self._lines = bytearray()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, record: RequestRecord) -> None:
        self._lines += self._encoder.encode(record)
        self._lines += b"\n"
        if len(self._lines) >= FLUSH_BYTES:
            self._flush()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._lines:
            lines, self._lines = bytes(self._lines), bytearray()
            try:
                self._write(lines)
            except OSError:
                # A full disk or a closed pipe must not take the service down; the metrics still count.
                return

    def close(self) -> None:
        self._flush()
