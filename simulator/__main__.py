"""One simulated engine: python -m kvroute.simulator --port 9000"""

import argparse
import asyncio
import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from tokenizers import Tokenizer as RawTokenizer
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvroute.prompt.template import ChatTemplate
from kvroute.prompt.tokenizer import Tokenizer
from kvroute.simulator.blocks import BlockCache
from kvroute.simulator.engine import Engine
from kvroute.simulator.events import Publisher
from kvroute.simulator.pool import Pool
from kvroute.simulator.server import EngineApp
from kvroute.simulator.timing import Timing

MODEL_FOLDER = Path(__file__).parent / "model"
KV_BYTES_PER_TOKEN = 253_952
"""Of the model that model/config.json describes: 62 layers x 2 x 8 KV heads x 128 x 2 bytes."""
REPLY = " the engine reads a long session from the pool and the answer comes back in good time to those who asked"


class _Protocol(HttpToolsProtocol):
    """Lets the application cut a connection, as a killed engine does."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        extensions: dict[str, Any] = {"kvroute.simulator.cut": self._cut}
        self.scope["extensions"] = extensions

    def _cut(self) -> None:
        self.cycle.disconnected = True
        self.transport.abort()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def build(options: argparse.Namespace) -> EngineApp:
    raw = RawTokenizer.from_file(str(MODEL_FOLDER / "tokenizer.json"))
    words = [raw.decode([token], skip_special_tokens=False) for token in range(raw.get_vocab_size())]
    settings = json.loads((MODEL_FOLDER / "tokenizer_config.json").read_text())
    timing = Timing(
        prefill_tokens_per_s=options.prefill_tokens_per_s,
        attention_s_per_token2=options.attention_s_per_token2,
        decode_s_per_token=options.decode_s_per_token,
        overhead_s=options.overhead_s,
        max_running=options.max_running,
    )
    clock: Callable[[], float] = time.monotonic
    pool = None
    if options.pool_dir is not None:
        pool = Pool(
            options.pool_dir,
            options.model_name,
            bytes_per_s=options.pool_bandwidth,
            latency_s=options.pool_latency_s,
            kv_bytes_per_token=KV_BYTES_PER_TOKEN,
            time_scale=options.time_scale,
            clock=clock,
        )
    publisher = Publisher(options.events_port, options.replay_port) if options.events_port else None
    engine = Engine(
        timing,
        BlockCache(options.kv_tokens // options.block_size, options.block_size),
        time_scale=options.time_scale,
        clock=clock,
        reply=raw.encode(REPLY).ids,
        pool=pool,
        publisher=publisher,
    )
    return EngineApp(
        engine=engine,
        model=options.model_name,
        max_model_len=options.max_model_len,
        tokenizer=Tokenizer(raw),
        template=ChatTemplate(settings["chat_template"], {"eos_token": settings["eos_token"]}),
        words=words,
        publisher=publisher,
    )


async def serve(options: argparse.Namespace) -> None:
    app = build(options)
    server = _Server(
        uvicorn.Config(
            app.asgi(),
            host=options.host,
            port=options.port,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=0,
        )
    )
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: setattr(server, "should_exit", True))
    async with app.running():
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        print(f"{options.model_name} simulated on http://{options.host}:{options.port}", flush=True)
        await task


def parser() -> argparse.ArgumentParser:
    timing = Timing()
    made = argparse.ArgumentParser(prog="kvroute simulate", description="One simulated inference engine.")
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, required=True)
    made.add_argument("--model-name", default="sim")
    made.add_argument("--max-model-len", type=int, default=131072, metavar="TOKENS")
    made.add_argument(
        "--kv-tokens", type=int, default=400_000, metavar="TOKENS", help="GPU KV cache; default: %(default)s"
    )
    made.add_argument("--block-size", type=int, default=16, metavar="TOKENS")
    made.add_argument("--max-running", type=int, default=timing.max_running)
    made.add_argument("--time-scale", type=float, default=1.0, help="simulated seconds a second; default: %(default)s")
    made.add_argument("--prefill-tokens-per-s", type=float, default=timing.prefill_tokens_per_s)
    made.add_argument("--attention-s-per-token2", type=float, default=timing.attention_s_per_token2)
    made.add_argument("--decode-s-per-token", type=float, default=timing.decode_s_per_token)
    made.add_argument("--overhead-s", type=float, default=timing.overhead_s)
    made.add_argument("--pool-dir", type=Path, help="shared pool in LMCache's fs layout; default: none")
    made.add_argument("--pool-bandwidth", type=float, default=9.6e9, metavar="BYTES_PER_S")
    made.add_argument("--pool-latency-s", type=float, default=0.3)
    made.add_argument("--events-port", type=int, help="publish KV events there over ZeroMQ")
    made.add_argument("--replay-port", type=int, help="answer replay requests there")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    uvloop.run(serve(parser().parse_args(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
