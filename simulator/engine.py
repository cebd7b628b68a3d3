"""A simulated engine: the scheduler driven by the clock, its cache, its share of the pool, and what it reports."""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from kvroute.prompt.hashing import chain, root_hash
from kvroute.simulator.blocks import BlockCache
from kvroute.simulator.events import Event, Publisher, all_blocks_cleared, block_stored, blocks_removed
from kvroute.simulator.pool import CHUNK_TOKENS, Pool, chunk_hashes
from kvroute.simulator.scheduler import Job, Scheduler
from kvroute.simulator.timing import Timing


@dataclass(slots=True, eq=False)
class Run:
    """A request while it runs."""

    job: Job
    tokens: list[int]
    """Prompt and generated token ids."""
    root: int
    chunks: list[int]
    """Pool hashes of the prompt's chunks."""
    arrived: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    """A number a generated token, as it is generated."""
    cached_tokens: int = 0
    read: asyncio.Task[None] | None = None


class Engine:
    def __init__(
        self,
        timing: Timing,
        cache: BlockCache,
        *,
        time_scale: float,
        clock: Callable[[], float],
        reply: Sequence[int],
        pool: Pool | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        """`time_scale`: simulated seconds a second; `reply`: token ids that answers consist of, over and over."""
        self.timing = timing
        self.cache = cache
        self.slowdown = 1.0
        self.counters: Counter[str] = Counter()
        self.ttft_s: list[float] = []
        """Simulated seconds, one a request."""
        self._time_scale = time_scale
        self._clock = clock
        self._reply = reply
        self._pool = pool
        self._publisher = publisher
        self._scheduler = Scheduler(timing, cache, self._admitted)
        self._runs: dict[Job, Run] = {}
        self._work = asyncio.Event()
        self._events: list[Event] = []

    @property
    def running(self) -> int:
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    async def generate(
        self, prompt: list[int], max_tokens: int, salt: str, run: list[Run]
    ) -> AsyncGenerator[int, None]:
        """Token ids as they are generated. `run` gets the request's state, for its usage. Leaving the iterator early
        (the client has gone) takes the request out of the engine at once."""
        root = root_hash("", cache_salt=salt)
        hashes = chain(root, prompt, self.cache.block_tokens)
        job = Job(len(prompt), hashes, max_tokens)
        chunks = chunk_hashes(prompt) if self._pool is not None else []
        mine = Run(job, list(prompt), root, chunks)
        run.append(mine)
        self._runs[job] = mine
        self.counters["requests"] += 1
        started = self._clock()
        self._scheduler.submit(job)
        self._work.set()
        finished = False
        try:
            for number, token in zip(range(max_tokens), itertools.cycle(self._reply)):
                await mine.arrived.get()
                if number == 0:
                    self.ttft_s.append((self._clock() - started) * self._time_scale)
                mine.tokens.append(token)
                yield token
            finished = True
        finally:
            if not finished:
                self.counters["aborted"] += 1
            self._finish(mine)

    def reset(self) -> bool:
        """Forget the prefix cache; False while requests hold blocks."""
        cleared = self.cache.clear()
        if cleared:
            self._events.append(all_blocks_cleared())
            self._work.set()
        return cleared

    async def run(self) -> None:
        """The engine's loop, until cancelled."""
        while True:
            await self._publish()
            step = self._scheduler.start_step()
            if step is None:
                await self._publish()
                self._work.clear()
                await self._work.wait()
                continue
            await asyncio.sleep(step.duration * self.slowdown / self._time_scale)
            outcome = self._scheduler.end_step(step)
            for job in outcome.prefilled:
                self._prefilled(self._runs[job])
            for job in outcome.tokens:
                self._runs[job].arrived.put_nowait(job.produced)
                self.counters["generation_tokens"] += 1
                if job.produced >= job.max_tokens:
                    # Over for the scheduler; the blocks stay held until the last token has been fetched.
                    del self._scheduler.running[job]

    def _admitted(self, job: Job) -> None:
        run = self._runs[job]
        assert job.allocation is not None
        if job.allocation.evicted:
            self._events += [blocks_removed([block]) for block in job.allocation.evicted]
        self.counters["prefix_queries"] += job.prompt_tokens
        self.counters["prefix_hits"] += job.computed
        run.cached_tokens = job.computed
        if self._pool is not None:
            stored = min(self._pool.stored_tokens(run.chunks), (job.prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS)
            self.counters["external_queries"] += job.prompt_tokens - job.computed
            if stored > job.computed:
                job.reading = True
                run.read = asyncio.create_task(self._read(self._pool, run, stored))

    async def _read(self, pool: Pool, run: Run, stored: int) -> None:
        job = run.job
        await pool.read(stored - job.computed)
        job.read_tokens = stored - job.computed
        self.counters["external_hits"] += job.read_tokens
        job.computed = run.cached_tokens = stored
        job.reading = False
        self._work.set()

    def _prefilled(self, run: Run) -> None:
        self.counters["prompt_tokens"] += run.job.prompt_tokens
        self.counters["prompt_tokens_cached"] += run.cached_tokens
        self._commit(run, run.job.hashes)
        if self._pool is not None:
            self._pool.store(run.chunks)

    def _commit(self, run: Run, hashes: Sequence[int]) -> None:
        allocation = run.job.allocation
        if allocation is None:
            return
        size = self.cache.block_tokens
        known = len(allocation.hashed)
        stored = frozenset(self.cache.commit(allocation, hashes))
        if self._publisher is not None:
            for position in range(known, len(allocation.hashed)):
                if hashes[position] in stored:
                    parent = hashes[position - 1] if position else None
                    tokens = run.tokens[position * size : (position + 1) * size]
                    self._events.append(block_stored([hashes[position]], parent, tokens, size))

    def _finish(self, run: Run) -> None:
        if run.read is not None:
            run.read.cancel()
        if run.job.prefilled:
            # The answer's KV is in the cache as well, but for its last token, which was never fed back.
            self._commit(run, chain(run.root, run.tokens[:-1], self.cache.block_tokens))
        self._scheduler.remove(run.job)
        del self._runs[run.job]
        self._work.set()

    async def _publish(self) -> None:
        if self._publisher is not None and self._events:
            events, self._events = self._events, []
            await self._publisher.publish(events)
        else:
            self._events.clear()
