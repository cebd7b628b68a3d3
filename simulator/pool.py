"""A pool of KV cache in a shared directory, in the file layout of LMCache's fs connector.

`<model, "/" as -SEP->@<world size>@<worker>@<chunk hash, hex>@<dtype>.data`, one file a chunk of 256 tokens, written
under a temporary name and renamed. The files have their real size but are sparse: nobody reads their content.

A chunk's hash is the first 8 bytes (big-endian) of SHA-256 over the canonical CBOR (RFC 8949) of
[previous chunk's hash, its token ids, []], LMCache's `sha256_cbor`; before the first chunk stands the hash of the
seed's text, here "0", the seed that LMCache's documentation has fleets agree on (PYTHONHASHSEED=0).

All readers share the bandwidth. Each one leaves a file in `.readers/` while it reads, so that engines in other
processes see how many they are; what a killed process left there is known by its process id and ignored.
"""

import asyncio
import hashlib
import itertools
import os
from collections.abc import Callable, Sequence
from pathlib import Path

CHUNK_TOKENS = 256
SEED = "0"
TICK_S = 0.01
"""Wall seconds between two looks at who else is reading."""


def chunk_hashes(tokens: Sequence[int]) -> list[int]:
    """Hashes of the full chunks of a prompt."""
    parent = _first_8_bytes(_cbor_text(SEED))
    hashes = []
    for start in range(0, len(tokens) - CHUNK_TOKENS + 1, CHUNK_TOKENS):
        chunk = tokens[start : start + CHUNK_TOKENS]
        parts = [b"\x83", _cbor_unsigned(parent), _cbor_head(4, len(chunk)), *map(_cbor_unsigned, chunk), b"\x80"]
        parent = _first_8_bytes(b"".join(parts))
        hashes.append(parent)
    return hashes


def _first_8_bytes(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "big")


def _cbor_head(major: int, value: int) -> bytes:
    """A data item's head: three bits of major type, then the value in as few bytes as hold it."""
    if value < 24:
        return bytes([major << 5 | value])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if value < 1 << (8 * size):
            return bytes([major << 5 | code]) + value.to_bytes(size, "big")
    raise OverflowError(value)


def _cbor_unsigned(value: int) -> bytes:
    return _cbor_head(0, value)


def _cbor_text(text: str) -> bytes:
    data = text.encode()
    return _cbor_head(3, len(data)) + data


class Pool:
    def __init__(
        self,
        directory: Path,
        model: str,
        *,
        bytes_per_s: float,
        latency_s: float,
        kv_bytes_per_token: int,
        time_scale: float,
        clock: Callable[[], float],
    ) -> None:
        """`bytes_per_s`, `latency_s`: in simulated time, which runs `time_scale` times as fast as `clock`."""
        self._directory = directory
        self._model = model.replace("/", "-SEP-")
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._chunk_bytes = kv_bytes_per_token * CHUNK_TOKENS
        self._time_scale = time_scale
        self._clock = clock
        self._readers = directory / ".readers"
        self._numbers = itertools.count()
        self._readers.mkdir(parents=True, exist_ok=True)

    def path(self, chunk_hash: int) -> Path:
        return self._directory / f"{self._model}@1@0@{chunk_hash:x}@bfloat16.data"

    def stored_tokens(self, hashes: Sequence[int]) -> int:
        """Leading tokens that the pool holds, in whole chunks."""
        for position, chunk_hash in enumerate(hashes):
            if not self.path(chunk_hash).exists():
                return position * CHUNK_TOKENS
        return len(hashes) * CHUNK_TOKENS

    def store(self, hashes: Sequence[int]) -> None:
        """Write the chunks that are not there."""
        for chunk_hash in hashes:
            path = self.path(chunk_hash)
            if not path.exists():
                temporary = path.with_suffix(f".{os.getpid()}.tmp")
                with temporary.open("wb") as file:
                    file.truncate(self._chunk_bytes)
                temporary.replace(path)

    async def read(self, tokens: int) -> None:
        """Take the time that reading the KV of `tokens` takes beside all who read now."""
        presence = self._readers / f"{os.getpid()}-{next(self._numbers)}"
        presence.touch()
        try:
            await asyncio.sleep(self._latency_s / self._time_scale)
            left = tokens / CHUNK_TOKENS * self._chunk_bytes
            then = self._clock()
            while True:
                rate = self._bytes_per_s * self._time_scale / self._count_readers()
                await asyncio.sleep(min(TICK_S, left / rate))
                now = self._clock()
                left -= (now - then) * rate
                then = now
                if left <= 0:
                    return
        finally:
            presence.unlink(missing_ok=True)

    def _count_readers(self) -> int:
        count = 0
        for name in os.listdir(self._readers):
            if Path("/proc", name.partition("-")[0]).exists():
                count += 1
            else:
                (self._readers / name).unlink(missing_ok=True)
        return max(1, count)
