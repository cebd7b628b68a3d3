"""An engine's order of work, without a clock: whoever drives it says what time it is.

As vLLM's scheduler with chunked prefill, in steps. A step computes a piece of one prompt, at most
`Timing.max_batched_tokens` of it, and gives one token to every running decode:

    duration = prefill_s(piece) + overhead_s with a prompt's last piece + decode_s_per_token if anything decodes

so that prefills have priority and slow decodes down. Requests are admitted first come, first served, at the border of
two steps, when no admitted prompt waits to be computed: until then a request looks nothing up, and so it hits what the
one before it has computed. What the pool holds beyond the GPU is read before the rest is computed; meanwhile the
compute is free for others, and any number of requests may read at the same time.

    WAITING -> READING -> PREFILL -> DECODE -> DONE        (READING only for a hit in the pool)

The driver asks `next_event()` when something will happen, and calls `advance(now)` then, or later: all that was due is
done at its own time. `submit`, `loaded` and `cancel` only note what happens at `now`, which must be what `advance` was
told last; their consequences come out of the next `advance`.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from kvroute.simulator.blocks import Allocation, BlockCache
from kvroute.simulator.timing import Timing


class Stage(Enum):
    WAITING = auto()
    READING = auto()
    PREFILL = auto()
    DECODE = auto()
    DONE = auto()


@dataclass(slots=True, eq=False)
class Job:
    """One request inside an engine. The fields from `stage` on are the scheduler's."""

    prompt_tokens: int
    """At least 1."""
    answer_tokens: int
    """At least 1; so many will be generated."""
    hashes: tuple[int, ...]
    """Of the full blocks of prompt and answer. The answer's last token is never fed back, so it has no KV."""
    slowdown: float = 1.0
    """Its work takes so many times as long; a decoding step is as slow as the slowest job in it."""
    stage: Stage = Stage.WAITING
    allocation: Allocation | None = None
    computed_tokens: int = 0
    """Leading prompt tokens whose KV is there: hit, read or computed."""
    hit_tokens: int = 0
    """Of these, found in the GPU."""
    read_tokens: int = 0
    """Of these, read from the pool."""
    produced: int = 0
    """Generated tokens."""
    submitted_at: float = 0.0
    admitted_at: float = 0.0
    first_token_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Admitted:
    at: float
    job: Job
    """Holds its blocks now. In stage READING, the driver has to call `loaded` when its `read_tokens` are there."""
    evicted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepEnded:
    at: float
    stored: list[tuple[Job, range]]
    """Positions of blocks (in the jobs' `hashes`) that are new in the cache."""
    produced: list[Job]
    """Jobs that got a token each."""
    prefilled: Job | None
    """The one of them whose token is its first."""
    finished: list[Job]
    """Those of them whose token was their last. They hold nothing any more."""


Progress = Admitted | StepEnded


@dataclass(frozen=True, slots=True)
class _Step:
    ends: float
    prefill: Job | None
    prefill_end: int
    """The prompt tokens before it will have been computed."""
    decodes: list[Job]


class Scheduler:
    def __init__(self, timing: Timing, cache: BlockCache, pool_tokens: Callable[[Job], int] = lambda job: 0) -> None:
        """`pool_tokens`: how many leading prompt tokens the pool holds, asked when the job is admitted."""
        self.waiting: deque[Job] = deque()
        self.running: dict[Job, None] = {}
        """In order of admission: stages READING, PREFILL and DECODE."""
        self._timing = timing
        self._cache = cache
        self._pool_tokens = pool_tokens
        self._step: _Step | None = None
        # Without a step: since when there is something to start, if there is.
        self._start_at: float | None = None

    def submit(self, now: float, job: Job) -> None:
        """Raises ValueError for a job that could never get its blocks."""
        if -(-self._total_tokens(job) // self._cache.block_tokens) > self._cache.capacity_blocks:
            raise ValueError("the request needs more blocks than there are")
        job.submitted_at = now
        self.waiting.append(job)
        self._wake(now)

    def loaded(self, now: float, job: Job) -> None:
        """The job's tokens have been read from the pool."""
        job.computed_tokens += job.read_tokens
        job.stage = Stage.PREFILL
        self._wake(now)

    def cancel(self, now: float, job: Job) -> None:
        """The job's client has gone: its blocks are free at once. What is being computed for it runs to the end of the
        step, as on a GPU. No effect on a job that is done."""
        if job.stage is Stage.DONE:
            return
        if job.stage is Stage.WAITING:
            self.waiting.remove(job)
            job.stage = Stage.DONE
        else:
            self._end(job)
        self._wake(now)

    def next_event(self) -> float | None:
        """When `advance` will have something to do; None when it depends on others' calls alone."""
        return self._step.ends if self._step is not None else self._start_at

    def advance(self, now: float) -> list[Progress]:
        """All that happens up to and at `now`, in order."""
        progress: list[Progress] = []
        while (due := self.next_event()) is not None and due <= now:
            if self._step is not None:
                progress.append(self._end_step(self._step))
            self._start_at = None
            self._admit(due, progress)
            self._step = self._start_step(due)
        return progress

    def _wake(self, now: float) -> None:
        if self._step is None and self._start_at is None:
            self._start_at = now

    def _admit(self, at: float, progress: list[Progress]) -> None:
        while (
            self.waiting
            and len(self.running) < self._timing.max_running
            and not any(job.stage is Stage.PREFILL for job in self.running)
        ):
            job = self.waiting[0]
            allocation = self._cache.allocate(job.hashes, job.prompt_tokens, self._total_tokens(job))
            if allocation is None:
                return
            self.waiting.popleft()
            self.running[job] = None
            job.allocation = allocation
            job.admitted_at = at
            job.hit_tokens = job.computed_tokens = allocation.cached_blocks * self._cache.block_tokens
            job.read_tokens = max(0, self._pool_tokens(job) - job.hit_tokens)
            job.stage = Stage.READING if job.read_tokens else Stage.PREFILL
            progress.append(Admitted(at, job, allocation.evicted))

    def _start_step(self, at: float) -> _Step | None:
        prefill = next((job for job in self.running if job.stage is Stage.PREFILL), None)
        decodes = [job for job in self.running if job.stage is Stage.DECODE]
        if prefill is None and not decodes:
            return None
        duration = 0.0
        prefill_end = 0
        if prefill is not None:
            start = prefill.computed_tokens
            prefill_end = min(prefill.prompt_tokens, start + self._timing.max_batched_tokens)
            duration += self._timing.prefill_s(start, prefill_end) * prefill.slowdown
            if prefill_end == prefill.prompt_tokens:
                duration += self._timing.overhead_s * prefill.slowdown
        if decodes:
            duration += self._timing.decode_s_per_token * max(job.slowdown for job in decodes)
        return _Step(at + duration, prefill, prefill_end, decodes)

    def _end_step(self, step: _Step) -> StepEnded:
        self._step = None
        stored: list[tuple[Job, range]] = []
        produced = [job for job in step.decodes if job.stage is not Stage.DONE]
        prefilled = None
        job = step.prefill
        if job is not None and job.stage is not Stage.DONE:
            job.computed_tokens = step.prefill_end
            self._commit(job, job.computed_tokens, stored)
            if job.computed_tokens == job.prompt_tokens:
                job.stage = Stage.DECODE
                job.first_token_at = step.ends
                prefilled = job
                produced.append(job)
        finished = []
        for job in produced:
            job.produced += 1
            self._commit(job, job.prompt_tokens + job.produced - 1, stored)
            if job.produced == job.answer_tokens:
                self._end(job)
                finished.append(job)
        return StepEnded(step.ends, stored, produced, prefilled, finished)

    def _commit(self, job: Job, tokens: int, stored: list[tuple[Job, range]]) -> None:
        allocation = job.allocation
        blocks = tokens // self._cache.block_tokens
        if allocation is not None and blocks > len(allocation.hashed):
            new = self._cache.commit(allocation, job.hashes[:blocks])
            if new:
                stored.append((job, new))

    def _end(self, job: Job) -> None:
        job.stage = Stage.DONE
        del self.running[job]
        if job.allocation is not None:
            self._cache.release(job.allocation)
            job.allocation = None

    @staticmethod
    def _total_tokens(job: Job) -> int:
        return job.prompt_tokens + job.answer_tokens
