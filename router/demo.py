"""kvroute demo: what cache-aware routing changes, seen on simulated engines that share a pool.

The same load of long sessions that return after a pause runs under round_robin and under min_prefill, each on a fresh
fleet; then the second fleet stays up to be talked to.
"""

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles

import httpx
import msgspec
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import kvroute.simulator
from kvroute.simulator.process import SimProcess, free_port
from kvroute.simulator.timing import Timing
from kvroute.simulator.workload import Session, sessions

MODEL = "sim"
MODEL_FOLDER = Path(kvroute.simulator.__path__[0]) / "model"
SEED = 20
KV_TOKENS = 100_000
"""GPU KV cache of an instance: a handful of sessions, so that returning ones are sometimes evicted."""
POOL_BYTES_PER_S = 4e9
"""One fast drive behind a network; arrays of several have been measured at more than twice that."""
POOL_LATENCY_S = 0.3
ANSWER_TOKENS = 32
POLICIES = ("round_robin", "min_prefill")


@dataclass(frozen=True, slots=True)
class Result:
    """One run of the load."""

    policy: str
    ttft_s: list[float]
    """Simulated seconds, one a request."""
    from_gpu: float
    """Share of all prompt tokens whose KV was in GPU memory."""
    from_pool: float
    failed: int


async def run_demo(*, instances: int, sessions_count: int, time_scale: float, port: int, stay: bool) -> int:
    """The whole demo; returns the exit status. Ctrl-C ends it at any point, and all that it started."""
    console = Console()
    demo = asyncio.create_task(_demo(console, instances, sessions_count, time_scale, port, stay))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, demo.cancel)
    try:
        return await demo
    except asyncio.CancelledError:
        console.print("stopped")
        return 130


async def _demo(console: Console, instances: int, sessions_count: int, time_scale: float, port: int, stay: bool) -> int:
    load = sessions(sessions_count, seed=SEED)
    console.print(
        f"{instances} simulated instances with {KV_TOKENS:,} tokens of GPU KV each and one pool of "
        f"{POOL_BYTES_PER_S / 1e9:g} GB/s; {sessions_count} sessions of 6k to 16k tokens, {len(load[0].turns)} turns "
        f"each.\nSimulated time runs {time_scale:g} times as fast as the clock; all times below are simulated."
    )
    results = []
    for policy in POLICIES:
        with _fleet(instances, time_scale, policy, port_or_any(port)) as fleet:
            await fleet.wait_ready()
            results.append(await _play(console, fleet, policy, load, time_scale))
            if policy == POLICIES[-1]:
                console.print(_table(results))
                console.print(_verdict(results))
                if stay:
                    _invite(console, fleet.url)
                    # The demo is over; that it is ended by a signal is no failure.
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.Event().wait()
    return 1 if any(result.failed for result in results) else 0


class _Fleet:
    """Engines, their pool and a gateway, as processes."""

    def __init__(self, engines: list[SimProcess], config: Path, url: str) -> None:
        self.engines = engines
        self.url = url
        for engine in engines:
            engine.start()
        self._gateway = subprocess.Popen(
            [sys.executable, "-m", "kvroute.cli", "serve", str(config)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    async def wait_ready(self) -> None:
        for engine in self.engines:
            await engine.wait_ready()
        async with httpx.AsyncClient(trust_env=False) as client:
            for _ in range(600):
                if self._gateway.poll() is not None:
                    raise RuntimeError(f"the gateway ended with status {self._gateway.returncode}")
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(self.url + "/ready")).is_success:
                        return
                await asyncio.sleep(0.05)
        raise RuntimeError("the gateway did not come up")

    def stop(self) -> None:
        self._gateway.kill()
        self._gateway.wait()
        for engine in self.engines:
            engine.kill()


@contextlib.contextmanager
def _fleet(instances: int, time_scale: float, policy: str, port: int) -> Iterator[_Fleet]:
    timing = Timing()
    with tempfile.TemporaryDirectory(prefix="kvroute-demo-") as folder:
        pool = Path(folder, "pool")
        arguments = ["--model-name", MODEL, "--time-scale", str(time_scale), "--kv-tokens", str(KV_TOKENS)]
        arguments += ["--pool-dir", str(pool), "--pool-bandwidth", str(POOL_BYTES_PER_S)]
        arguments += ["--pool-latency-s", str(POOL_LATENCY_S)]
        engines = [SimProcess(arguments) for _ in range(instances)]
        config = Path(folder, "kvroute.yaml")
        # What an operator would measure on these engines; the gateway's clock is the wall's.
        settings = {
            "server": {"listen": f"127.0.0.1:{port}", "admin": f"127.0.0.1:{free_port()}"},
            "telemetry": {"request_log": "off"},
            "health": {"interval": 0.25},
            "models": {
                MODEL: {
                    "tokenizer": str(MODEL_FOLDER),
                    "policy": policy,
                    "instances": [{"url": engine.url, "id": f"sim-{n}"} for n, engine in enumerate(engines)],
                    "cost": {
                        "prefill_tokens_per_s": timing.prefill_tokens_per_s * time_scale,
                        "attention_s_per_token2": timing.attention_s_per_token2 / time_scale,
                        "overhead": timing.overhead_s / time_scale,
                    },
                    "pool": {
                        "name": "demo",
                        "path": str(pool),
                        "bandwidth": POOL_BYTES_PER_S * time_scale,
                        "latency": POOL_LATENCY_S / time_scale,
                    },
                }
            },
        }
        config.write_text(yaml.safe_dump(settings, sort_keys=False))
        fleet = _Fleet(engines, config, f"http://127.0.0.1:{port}")
        try:
            yield fleet
        finally:
            fleet.stop()
            shutil.rmtree(pool, ignore_errors=True)


async def _play(console: Console, fleet: _Fleet, policy: str, load: Sequence[Session], time_scale: float) -> Result:
    ttft_s: list[float] = []
    failed = 0
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task(policy, total=sum(len(each.turns) for each in load))
        async with httpx.AsyncClient(trust_env=False, timeout=120.0) as client:

            async def hold(session: Session) -> None:
                nonlocal failed
                await asyncio.sleep(session.starts_s / time_scale)
                messages = [{"role": "system", "content": session.system}]
                first = session.document + "\n" + session.turns[0].question
                for turn in session.turns:
                    await asyncio.sleep(turn.pause_s / time_scale)
                    question = first if len(messages) == 1 else turn.question
                    messages.append({"role": "user", "content": question})
                    try:
                        seconds, answer = await _ask(client, fleet.url, messages)
                        ttft_s.append(seconds * time_scale)
                        messages.append({"role": "assistant", "content": answer})
                    except (httpx.HTTPError, ValueError):
                        failed += 1
                    progress.advance(bar)

            async with asyncio.TaskGroup() as tasks:
                for session in load:
                    tasks.create_task(hold(session))
            states = [(await client.get(engine.url + "/sim/state")).json() for engine in fleet.engines]
    queries = sum(state["prefix_queries"] for state in states)
    return Result(
        policy=policy,
        ttft_s=ttft_s,
        from_gpu=sum(state["prefix_hits"] for state in states) / queries,
        from_pool=sum(state["external_hits"] for state in states) / queries,
        failed=failed,
    )


async def _ask(client: httpx.AsyncClient, url: str, messages: list[dict[str, str]]) -> tuple[float, str]:
    """(wall seconds to the first token, the answer)."""
    body = {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "stream": True}
    started = time.monotonic()
    first = 0.0
    parts: list[str] = []
    async with client.stream("POST", url + "/v1/chat/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                chunk = msgspec.json.decode(line[6:])
                if "error" in chunk:
                    raise ValueError(chunk["error"]["message"])
                content = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
                if content:
                    first = first or time.monotonic() - started
                    parts.append(content)
    return first, "".join(parts)


def _table(results: Sequence[Result]) -> Table:
    table = Table(title="Time to first token, and where prompts' KV came from")
    for name in ("policy", "p50", "p90", "p99", "GPU hit", "pool", "computed", "failed"):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for result in results:
        percentiles = quantiles(result.ttft_s, n=100, method="inclusive")
        shares = (result.from_gpu, result.from_pool, 1 - result.from_gpu - result.from_pool)
        table.add_row(
            result.policy,
            *(f"{percentiles[p - 1]:.2f} s" for p in (50, 90, 99)),
            *(f"{share:.0%}" for share in shares),
            str(result.failed),
        )
    return table


def _verdict(results: Sequence[Result]) -> str:
    one, other = (quantiles(result.ttft_s, n=2, method="inclusive")[0] for result in results)
    return f"TTFT p50 under {results[1].policy}: {other / one:.2f} of {results[0].policy}'s."


def _invite(console: Console, url: str) -> None:
    body = '{"model": "sim", "stream": true, "messages": [{"role": "user", "content": "hello"}]}'
    console.print("\nThe fleet stays up. Talk to it from another terminal:\n")
    line = f"curl -N {url}/v1/chat/completions -H 'content-type: application/json' -H 'x-kvroute-debug: 1' -d '{body}'"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print("\nCtrl-C ends all of it.")


def port_or_any(port: int) -> int:
    """`port`, or any free one when it is taken."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return free_port()
    return port
