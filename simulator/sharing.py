"""Reads that share a bandwidth: processor sharing, without a clock."""

from dataclasses import dataclass

ROUNDING_S = 1e-6
"""What is left of a read for less than this is rounding: times are sums of floats."""


@dataclass(slots=True, eq=False)
class Read:
    begins_at: float
    """When its first byte comes."""
    bytes_left: float


class SharedReads:
    """Each read gets bandwidth / readers, the readers being those that transfer at the time: the ones here and
    `others`, who read from the same store elsewhere."""

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._others = 0
        self._now = 0.0
        self._reads: dict[Read, None] = {}

    @property
    def transferring(self) -> int:
        return sum(1 for read in self._reads if read.begins_at <= self._now)

    def set_others(self, now: float, others: int) -> None:
        """Readers elsewhere from `now` on, which must be what `advance` was told last."""
        assert now == self._now
        self._others = others

    def start(self, now: float, size: float) -> Read:
        """A read of `size` bytes is asked for. `now` must not lie before what `advance` was told last."""
        read = Read(now + self._latency_s, size)
        self._reads[read] = None
        return read

    def cancel(self, read: Read) -> None:
        """No effect on a read that has finished."""
        self._reads.pop(read, None)

    def next_event(self) -> float | None:
        """When a read will begin or finish if nothing changes; None without reads."""
        times = [read.begins_at for read in self._reads if read.begins_at > self._now]
        active = [read.bytes_left for read in self._reads if read.begins_at <= self._now]
        if active:
            times.append(self._now + min(active) / self._rate(len(active)))
        return min(times, default=None)

    def advance(self, now: float) -> list[tuple[float, Read]]:
        """The reads that finish up to and at `now`, each with its time, in order."""
        finished: list[tuple[float, Read]] = []
        while (due := self.next_event()) is not None and due <= now:
            finished += [(due, read) for read in self._transfer(due)]
        # Whose rest is rounding may finish here as well.
        return finished + [(now, read) for read in self._transfer(now)]

    def _rate(self, active: int) -> float:
        return self._bytes_per_s / (active + self._others)

    def _transfer(self, until: float) -> list[Read]:
        """No read begins between the last event and `until`, so that all rates are constant."""
        active = [read for read in self._reads if read.begins_at <= self._now]
        rate = self._rate(max(1, len(active)))
        for read in active:
            read.bytes_left -= (until - self._now) * rate
        self._now = until
        done = [read for read in active if read.bytes_left <= rate * ROUNDING_S]
        for read in done:
            del self._reads[read]
        return done
