"""One simulated engine: python -m kvroute.simulator --port 9000"""

import argparse
import asyncio
import contextlib
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvroute.simulator.blocks import BlockCache
from kvroute.simulator.engine import Engine
from kvroute.simulator.events import Publisher
from kvroute.simulator.faults import CUT_EXTENSION
from kvroute.simulator.metrics import Histograms, Report
from kvroute.simulator.pool import Pool
from kvroute.simulator.prompts import MODEL_FOLDER as MODEL_FOLDER
from kvroute.simulator.prompts import Prompts
from kvroute.simulator.readers import Readers
from kvroute.simulator.server import Parts, make_app
from kvroute.simulator.timing import PoolTiming, Timing


class _Protocol(HttpToolsProtocol):
    """Lets the application cut its connection, as a dying engine does."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {CUT_EXTENSION: self._cut}
        self.scope["extensions"] = extensions

    def _cut(self) -> None:
        self.cycle.disconnected = True
        self.transport.abort()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # serve() below has its own: uvicorn's would raise the signal once more at the end.
        yield


@contextlib.asynccontextmanager
async def build(options: argparse.Namespace) -> AsyncIterator[Parts]:
    """The engine and what it needs, in the running event loop."""
    started = time.monotonic()

    def simulated_time() -> float:
        return float((time.monotonic() - started) * options.time_scale)

    pool = None
    if options.pool_dir is not None:
        pool_timing = PoolTiming(options.pool_bandwidth, options.pool_latency_s)
        readers = Readers(options.pool_dir, wall_time=time.time)
        pool = Pool(
            options.pool_dir,
            options.model_name,
            pool_timing,
            readers,
            simulated_time=simulated_time,
            time_scale=options.time_scale,
        )
    publisher = Publisher(options.events_port, options.replay_port) if options.events_port is not None else None
    prompts = Prompts()
    histograms = Histograms(options.model_name)
    cache = BlockCache(options.kv_tokens // options.block_size, options.block_size)
    engine = Engine(
        Timing(
            prefill_tokens_per_s=options.prefill_tokens_per_s,
            attention_s_per_token2=options.attention_s_per_token2,
            overhead_s=options.overhead_s,
            decode_s_per_token=options.decode_s_per_token,
            max_running=options.max_running,
        ),
        cache,
        simulated_time=simulated_time,
        time_scale=options.time_scale,
        vocabulary=prompts.vocabulary,
        seed=options.seed,
        histograms=histograms,
        pool=pool,
        publisher=publisher,
    )
    report = Report(
        histograms,
        engine.totals,
        engine.gauges,
        block_tokens=cache.block_tokens,
        blocks=cache.capacity_blocks,
    )
    try:
        yield Parts(engine, prompts, report, options.model_name, options.max_model_len, publisher)
    finally:
        await engine.close()
        if pool is not None:
            pool.close()
        if publisher is not None:
            await publisher.close()


async def serve(options: argparse.Namespace) -> None:
    """Until SIGTERM or SIGINT."""
    async with build(options) as parts:
        server = _Server(
            uvicorn.Config(
                make_app(parts),
                host=options.host,
                port=options.port,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
            )
        )

        def stop() -> None:
            # At once: a client that still waits for its answer sees a connection that breaks off.
            server.force_exit = True
            server.should_exit = True

        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        if server.started:
            print(f"{options.model_name} simulated on http://{options.host}:{options.port}", flush=True)
        await task


_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def bandwidth(text: str) -> float:
    """Bytes per second: "9.6e9", "10GB/s", "10 GiB/s". Raises ValueError."""
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?) ?(?:([kMGT]i?)?B)?(?:/s)?", text.strip())
    if found is None:
        raise ValueError(text)
    value = float(found[1]) * _BYTES[found[2] or ""]
    if value <= 0:
        raise ValueError(text)
    return value


def positive(text: str) -> float:
    """Raises ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def count(text: str) -> int:
    """Raises ValueError."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def parser() -> argparse.ArgumentParser:
    timing, pool = Timing(), PoolTiming()
    made = argparse.ArgumentParser(
        prog="kvroute simulate",
        description="One simulated inference engine. It speaks vLLM's API and takes the time that a GPU would.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = made.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, required=True, help="port to listen on")
    add("--model-name", default="sim", help="name that the model is served under")
    add("--max-model-len", type=count, default=131_072, metavar="TOKENS", help="prompt and answer together")
    add("--kv-tokens", type=count, default=400_000, metavar="TOKENS", help="size of the GPU's KV cache")
    add("--block-size", type=count, default=16, metavar="TOKENS", help="tokens a block")
    add("--max-running", type=count, default=timing.max_running, help="requests that run at the same time")
    add("--time-scale", type=positive, default=1.0, help="simulated seconds a second")
    add("--prefill-tokens-per-s", type=positive, default=timing.prefill_tokens_per_s, help="linear layers")
    add("--attention-s-per-token2", type=float, default=timing.attention_s_per_token2, help="each pair of tokens")
    add("--decode-s-per-token", type=float, default=timing.decode_s_per_token, help="a decoding step")
    add("--overhead-s", type=float, default=timing.overhead_s, help="once a request")
    add("--pool-dir", type=Path, default=None, help="shared pool, in the layout of LMCache's fs connector")
    add("--pool-bandwidth", type=bandwidth, default=pool.bytes_per_s, help="of the whole pool, such as 10GB/s")
    add("--pool-latency-s", type=float, default=pool.latency_s, help="before a read's first byte")
    add("--events-port", type=int, default=None, help="publish KV events there, over ZeroMQ")
    add("--replay-port", type=int, default=None, help="replay KV events there")
    add("--seed", type=int, default=0, help="of the words that answers consist of")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    options = (known := parser()).parse_args(arguments)
    if options.kv_tokens < options.block_size:
        known.error("--kv-tokens: not even one block")
    uvloop.run(serve(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
