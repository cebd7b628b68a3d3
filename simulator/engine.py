"""A simulated engine: the scheduler driven by the event loop's clock, its cache, its side of the pool, its reports."""

import asyncio
import math
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from xxhash import xxh3_64_intdigest

from kvroute.prompt.hashing import chain, root_hash
from kvroute.simulator.blocks import BlockCache
from kvroute.simulator.chunks import CHUNK_TOKENS, chunk_hashes
from kvroute.simulator.events import Event, Publisher, all_blocks_cleared, block_removed, block_stored
from kvroute.simulator.metrics import Gauges, Histograms, Totals
from kvroute.simulator.pool import Pool
from kvroute.simulator.scheduler import Admitted, Job, Scheduler, Stage, StepEnded
from kvroute.simulator.sharing import Read
from kvroute.simulator.timing import Timing

HASH_SEED = "engine block"
"""What the engine's block hashes start from. Engines' hashes are their own, so these must not equal the router's."""


@dataclass(slots=True, eq=False)
class Generation:
    """A request and its answer, while it is made."""

    job: Job
    tokens: Sequence[int]
    """Of the prompt and then of the answer, so many of which have been generated as `job.produced` says."""
    cache_salt: str
    chunks: Sequence[int]
    """Pool hashes of the prompt's full chunks."""
    number: int = 0
    """Counts the engine's requests."""
    stops: bool = False
    """The answer ends by itself, and not for its length."""
    read: Read | None = None
    news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed: hits in the GPU and in the pool."""
        return self.job.hit_tokens + self.job.read_tokens

    async def pieces(self) -> AsyncIterator[Sequence[int]]:
        """The answer's token ids as they come, in the pieces that they come in."""
        start = self.job.prompt_tokens
        while start < len(self.tokens):
            while (end := self.job.prompt_tokens + self.job.produced) == start:
                self.news.clear()
                await self.news.wait()
            yield self.tokens[start:end]
            start = end


class Engine:
    """Belongs to the running event loop. All of its state changes in plain calls; nothing here waits."""

    def __init__(
        self,
        timing: Timing,
        cache: BlockCache,
        *,
        simulated_time: Callable[[], float],
        time_scale: float,
        vocabulary: Sequence[int],
        seed: int,
        histograms: Histograms,
        pool: Pool | None = None,
        publisher: Publisher | None = None,
    ) -> None:
        """`simulated_time` runs `time_scale` times as fast as the wall clock. `vocabulary`: the token ids that answers
        consist of."""
        self.cache = cache
        self.totals = Totals()
        self._now = simulated_time
        self._time_scale = time_scale
        self._vocabulary = vocabulary
        self._seed = seed
        self._histograms = histograms
        self._pool = pool
        self._publisher = publisher
        self._scheduler = Scheduler(timing, cache, self._pool_tokens)
        self._generations: dict[Job, Generation] = {}
        self._events: list[Event] = []
        self._timer: asyncio.TimerHandle | None = None
        self._stores: set[asyncio.Future[None]] = set()

    @property
    def running(self) -> list[int]:
        """Numbers of the requests that hold blocks."""
        return [self._generations[job].number for job in self._scheduler.running]

    @property
    def waiting(self) -> list[int]:
        return [self._generations[job].number for job in self._scheduler.waiting]

    def gauges(self) -> Gauges:
        return Gauges(len(self._scheduler.running), len(self._scheduler.waiting), self.cache.usage)

    def prepare(
        self,
        prompt: Sequence[int],
        answer_tokens: int,
        *,
        cache_salt: str = "",
        stops: bool = False,
        slowdown: float = 1.0,
    ) -> Generation:
        """Make a request of at least one prompt token and one answer token. Pure, and may run in any thread: hashing a
        long prompt takes milliseconds. The same prompt always gets the same answer."""
        digest = xxh3_64_intdigest(array("I", prompt).tobytes(), self._seed)
        answer = Random(digest).choices(self._vocabulary, k=answer_tokens)
        tokens = [*prompt, *answer]
        hashes = chain(root_hash(HASH_SEED, cache_salt=cache_salt), tokens[:-1], self.cache.block_tokens)
        chunks = chunk_hashes(prompt) if self._pool is not None else ()
        return Generation(Job(len(prompt), answer_tokens, hashes, slowdown), tokens, cache_salt, chunks, stops=stops)

    def start(self, generation: Generation) -> None:
        """Raises ValueError for a request that the cache could never hold."""
        now = self._catch_up()
        self._scheduler.submit(now, generation.job)
        generation.number = self.totals.requests
        self.totals.requests += 1
        self._generations[generation.job] = generation
        self._run()

    def leave(self, generation: Generation) -> None:
        """Nobody waits for the answer any more. Takes what is not finished out of the engine, with its blocks."""
        now = self._catch_up()
        if self._generations.pop(generation.job, None) is not None:
            self.totals.aborted += 1
            if generation.read is not None and self._pool is not None:
                self._pool.cancel_read(generation.read)
            self._scheduler.cancel(now, generation.job)
        self._run()

    def reset(self) -> bool:
        """Forget the prefix cache; False while requests hold blocks."""
        self._catch_up()
        cleared = self.cache.clear()
        if cleared and self._publisher is not None:
            self._events.append(all_blocks_cleared())
        self._run()
        return cleared

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._stores:
            await asyncio.wait(self._stores)

    def _run(self) -> None:
        """Do all that is due, and come back when the next is."""
        now = self._catch_up()
        self._publish()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = self._scheduler.next_event()
        if due is not None:
            # Event loops count whole milliseconds; rounded down, they would come back too early, again and again.
            delay = math.ceil((due - now) / self._time_scale * 1000) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay, self._run)

    def _catch_up(self) -> float:
        """The time now, with all done that was due."""
        now = self._now()
        for progress in self._scheduler.advance(now):
            if isinstance(progress, Admitted):
                self._admitted(progress)
            else:
                self._step_ended(progress)
        return now

    def _pool_tokens(self, job: Job) -> int:
        if self._pool is None:
            return 0
        # As in the GPU's cache, the last token is always computed.
        usable = (job.prompt_tokens - 1) // CHUNK_TOKENS
        return self._pool.stored_tokens(self._generations[job].chunks[:usable])

    def _admitted(self, progress: Admitted) -> None:
        job = progress.job
        generation = self._generations[job]
        if self._publisher is not None:
            self._events += [block_removed(block) for block in progress.evicted]
        self.totals.prefix_queries += job.prompt_tokens
        self.totals.prefix_hits += job.hit_tokens
        if self._pool is not None:
            self.totals.external_queries += job.prompt_tokens - job.hit_tokens
            if job.read_tokens:
                generation.read = self._pool.start_read(job.read_tokens, lambda: self._loaded(job))

    def _loaded(self, job: Job) -> None:
        if job.stage is Stage.READING:
            self.totals.external_hits += job.read_tokens
            self._scheduler.loaded(self._catch_up(), job)
            self._run()

    def _step_ended(self, progress: StepEnded) -> None:
        if self._publisher is not None:
            self._events += [self._stored(self._generations[job], positions) for job, positions in progress.stored]
        self.totals.generation_tokens += len(progress.produced)
        if progress.prefilled is not None:
            self._prefilled(self._generations[progress.prefilled])
        for job in progress.produced:
            self._generations[job].news.set()
        for job in progress.finished:
            if self._generations.pop(job).stops:
                self.totals.stopped += 1
            else:
                self.totals.cut_off += 1

    def _stored(self, generation: Generation, positions: range) -> Event:
        size = self.cache.block_tokens
        hashes = generation.job.hashes
        first = positions.start
        return block_stored(
            hashes[first : positions.stop],
            hashes[first - 1] if first else None,
            generation.tokens[first * size : positions.stop * size],
            size,
            generation.cache_salt,
        )

    def _prefilled(self, generation: Generation) -> None:
        job = generation.job
        computed = job.prompt_tokens - generation.cached_tokens
        self.totals.prompt_tokens += job.prompt_tokens
        self.totals.computed_tokens += computed
        self._histograms.ttft_s.observe((job.first_token_at - job.submitted_at) / self._time_scale)
        self._histograms.queue_s.observe((job.admitted_at - job.submitted_at) / self._time_scale)
        self._histograms.prefill_s.observe((job.first_token_at - job.admitted_at) / self._time_scale)
        self._histograms.computed_tokens.observe(computed)
        if self._pool is not None and generation.chunks:
            store = asyncio.get_running_loop().run_in_executor(None, self._pool.store, generation.chunks)
            self._stores.add(store)
            store.add_done_callback(self._stores.discard)

    def _publish(self) -> None:
        if self._publisher is not None and self._events:
            self._publisher.publish(self._events)
            self._events = []
