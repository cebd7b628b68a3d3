"""An engine's order of work, in steps, without a clock.

As vLLM's scheduler with chunked prefill: each step gives one token to every running decode and computes up to a budget
of prompt tokens, oldest request first. A step takes as long as its work, so that long prefills slow decodes down.
Whoever drives it asks for a step's duration, lets that time pass, and then takes what the step produced.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvroute.simulator.blocks import Allocation, BlockCache
from kvroute.simulator.timing import Timing


@dataclass(slots=True, eq=False)
class Job:
    """One request inside an engine."""

    prompt_tokens: int
    hashes: tuple[int, ...]
    """Of the prompt's full blocks."""
    max_tokens: int
    allocation: Allocation | None = None
    computed: int = 0
    """Leading prompt tokens whose KV is there."""
    reading: bool = False
    """Waits for a read from the pool; its turn comes after that."""
    read_tokens: int = 0
    """Tokens that the pool gave."""
    produced: int = 0
    """Generated tokens."""

    @property
    def prefilled(self) -> bool:
        return self.computed >= self.prompt_tokens


@dataclass(slots=True)
class Step:
    """What one step computes."""

    duration: float
    """Seconds."""
    prefills: list[tuple[Job, int]] = field(default_factory=list)
    """Jobs and how far their prompts will be computed."""
    decodes: list[Job] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """What a step has produced."""

    prefilled: list[Job] = field(default_factory=list)
    """Jobs whose prompts are complete; each has its first token as well."""
    tokens: list[Job] = field(default_factory=list)
    """Jobs that got a token."""


class Scheduler:
    def __init__(self, timing: Timing, cache: BlockCache, on_admitted: Callable[[Job], None]) -> None:
        """`on_admitted` is told of each job that gets its blocks; it may set `reading` until a pool read is done."""
        self._timing = timing
        self._cache = cache
        self._on_admitted = on_admitted
        self.waiting: deque[Job] = deque()
        self.running: dict[Job, None] = {}

    def submit(self, job: Job) -> None:
        self.waiting.append(job)

    def remove(self, job: Job) -> None:
        """The job is over, finished or cancelled: its blocks are free at once."""
        if job in self.running:
            del self.running[job]
        elif job in self.waiting:
            self.waiting.remove(job)
        if job.allocation is not None:
            self._cache.release(job.allocation)
            job.allocation = None

    def start_step(self) -> Step | None:
        """The next step; None when there is nothing to compute now."""
        self._admit()
        step = Step(0.0)
        budget = self._timing.max_batched_tokens
        for job in self.running:
            if job.prefilled:
                step.decodes.append(job)
            elif not job.reading and budget:
                end = min(job.prompt_tokens, job.computed + budget)
                budget -= end - job.computed
                step.duration += self._timing.prefill_s(job.computed, end)
                if end == job.prompt_tokens:
                    step.duration += self._timing.overhead_s
                step.prefills.append((job, end))
        if step.decodes:
            step.duration += self._timing.decode_s_per_token
        return step if step.prefills or step.decodes else None

    def end_step(self, step: Step) -> Outcome:
        """The step's time has passed. Jobs that were removed meanwhile are left out."""
        outcome = Outcome()
        for job, end in step.prefills:
            if job in self.running:
                job.computed = end
                if job.prefilled:
                    outcome.prefilled.append(job)
                    outcome.tokens.append(job)
        outcome.tokens += [job for job in step.decodes if job in self.running]
        for job in outcome.tokens:
            job.produced += 1
        return outcome

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._timing.max_running:
            job = self.waiting[0]
            allocation = self._cache.allocate(job.hashes, job.prompt_tokens, job.prompt_tokens + job.max_tokens)
            if allocation is None:
                return
            self.waiting.popleft()
            job.allocation = allocation
            job.computed = allocation.cached_blocks * self._cache.block_tokens
            self.running[job] = None
            self._on_admitted(job)
