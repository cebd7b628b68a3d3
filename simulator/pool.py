"""A pool of KV cache in a shared directory, as LMCache's fs connector keeps it.

The files have the size that they would have but are sparse: nobody reads their content, only the time is taken.
"""

import asyncio
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from kvroute.simulator.chunks import CHUNK_TOKENS, file_name
from kvroute.simulator.readers import Readers
from kvroute.simulator.sharing import Read, SharedReads
from kvroute.simulator.timing import PoolTiming

TICK_S = 0.01
"""Wall seconds between two looks at who else is reading."""


class Pool:
    """One process's side of the pool. Belongs to the running event loop."""

    def __init__(
        self,
        directory: Path,
        model: str,
        timing: PoolTiming,
        readers: Readers,
        *,
        simulated_time: Callable[[], float],
        time_scale: float,
    ) -> None:
        """`simulated_time` runs `time_scale` times as fast as the wall clock."""
        self._directory = directory
        self._model = model
        self._chunk_bytes = timing.kv_bytes_per_token * CHUNK_TOKENS
        self._readers = readers
        self._now = simulated_time
        self._time_scale = time_scale
        self._reads = SharedReads(timing.bytes_per_s, timing.latency_s)
        self._done: dict[Read, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def stored_tokens(self, hashes: Sequence[int]) -> int:
        """Leading tokens that the pool holds, in whole chunks."""
        for position, chunk_hash in enumerate(hashes):
            if not os.path.exists(self._directory / file_name(self._model, chunk_hash)):
                return position * CHUNK_TOKENS
        return len(hashes) * CHUNK_TOKENS

    def store(self, hashes: Sequence[int]) -> None:
        """Write the chunks that are not there, each under a temporary name first. May run in any thread."""
        for chunk_hash in hashes:
            path = self._directory / file_name(self._model, chunk_hash)
            if not path.exists():
                # Another engine, or another thread of this one, may be writing the same chunk.
                temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
                with temporary.open("wb") as file:
                    file.truncate(self._chunk_bytes)
                temporary.replace(path)

    def start_read(self, tokens: int, done: Callable[[], None]) -> Read:
        """`done` is called, from the event loop, when the KV of `tokens` tokens has come, beside all who read
        meanwhile. It can still come right after `cancel_read`."""
        self._tick()
        read = self._reads.start(self._now(), tokens / CHUNK_TOKENS * self._chunk_bytes)
        self._done[read] = done
        self._arm()
        return read

    def cancel_read(self, read: Read) -> None:
        """No effect on a read that is done."""
        if read in self._done:
            self._tick()
            self._reads.cancel(read)
            self._done.pop(read, None)
            self._readers.show(self._reads.transferring)
            self._arm()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._readers.show(0)

    def _tick(self) -> None:
        now = self._now()
        finished = self._reads.advance(now)
        self._reads.set_others(now, self._readers.others())
        self._readers.show(self._reads.transferring)
        self._arm()
        for _, read in finished:
            # Not from here: whoever starts or cancels a read is not ready to hear of another one.
            asyncio.get_running_loop().call_soon(self._done.pop(read))

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self._reads.next_event()
        if due is None:
            self._timer = None
        else:
            delay = max(0.0, (due - self._now()) / self._time_scale)
            self._timer = asyncio.get_running_loop().call_later(min(TICK_S, delay), self._tick)
